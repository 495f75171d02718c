"""Methods as words: the ones that adapt another."""

import pytest

from regtopk.algorithms import AdaptiveDensity, Consensus, RegTopK
from regtopk.errors import ArgumentError
from regtopk.experiments.methods import make_method, parse_method, takes_density, with_budget


def test_an_adapted_algorithm_has_its_own_options() -> None:
    spec = "adaptive:algorithm=consensus:seed=3:bytes_per_step=900:every=2:density=0.2"
    assert make_method(spec, density=None, value_code="4bit") == AdaptiveDensity(
        algorithm=Consensus(density=0.2, seed=3, value_code="4bit"), bytes_per_step=900, every=2
    )
    assert not takes_density(spec)


def test_regtopk_is_adapted_unless_told() -> None:
    assert make_method("adaptive:mu=2", density=None, value_code=None) == AdaptiveDensity(
        algorithm=RegTopK(density=0.01, mu=2)
    )
    with pytest.raises(ArgumentError, match=r"option of regtopk must be .*got 'nu' \(did you mean 'mu'\?\)"):
        parse_method("adaptive:nu=2")


def test_a_budget_goes_to_methods_that_keep_one_themselves() -> None:
    assert with_budget("adaptive", 812.3) == "adaptive:bytes_per_step=812"
    assert with_budget("adaptive:bytes_per_step=5", 812.3) == "adaptive:bytes_per_step=5"
    assert with_budget("adaptive:target_error=0.5", 812.3) == "adaptive:target_error=0.5"
    assert with_budget("topk", 812.3) == "topk"
