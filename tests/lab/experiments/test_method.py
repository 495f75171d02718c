"""Settings and methods as words, and what is built from them."""

import pytest
import torch

from regtopk.algorithms import AdaptiveDensity, Consensus, RegTopK, TopK
from regtopk.algorithms.posterior import PosteriorScore
from regtopk.errors import ArgumentError
from regtopk.lab.experiments import EXPERIMENTS, parse_settings
from regtopk.lab.experiments.paper.fig2 import Fig2Config
from regtopk.lab.experiments.settings import SMALL, check_device, format_seeds, parse_seeds, threads_for
from regtopk.lab.method import Method
from regtopk.rounds import Rounds


def test_words_become_fields() -> None:
    method = Method.parse("topk:value_code=4bit:lr=0.1:index_code=raw32:residual_dtype=bfloat16:density=0.5")
    assert (method.algorithm, method.options) == ("topk", {"value_code": "4bit", "density": 0.5})
    assert (method.lr, method.index_code, method.residual_dtype) == (0.1, "raw32", "bfloat16")
    assert not method.takes_density
    assert method.build(density=0.1, value_code="2bit") == TopK(density=0.5, value_code="4bit")
    assert Method.parse("topk").build(density=0.1, value_code="2bit") == TopK(density=0.1, value_code="2bit")
    assert method.without("lr") == "topk:value_code=4bit:index_code=raw32:residual_dtype=bfloat16:density=0.5"
    other = "topk:density=0.5:residual_dtype=bfloat16:lr=0.1:value_code=4bit:index_code=raw32"
    assert method.is_same(Method.parse(other)) and not method.is_same(Method.parse(f"{other}:k=3"))


def test_a_score_has_its_own_options() -> None:
    method = Method.parse("consensus:score=regtopk:mu=1.5:value_code=4bit")
    assert method.options == {"score": "regtopk", "mu": 1.5, "value_code": "4bit"}
    assert method.build(density=0.1, value_code=None) == Consensus(
        density=0.1, score=PosteriorScore(mu=1.5), value_code="4bit"
    )


def test_an_adapted_algorithm_has_its_own_options() -> None:
    method = Method.parse("adaptive:algorithm=consensus:seed=3:bytes_per_step=900:every=2:density=0.2")
    assert method.build(density=None, value_code="4bit") == AdaptiveDensity(
        algorithm=Consensus(density=0.2, seed=3, value_code="4bit"), bytes_per_step=900, every=2
    )
    assert not method.takes_density
    assert Method.parse("adaptive:mu=2").build(density=None, value_code=None) == AdaptiveDensity(
        algorithm=RegTopK(density=0.01, mu=2)
    )


def test_what_is_exchanged_is_no_option_of_the_algorithm() -> None:
    method = Method.parse("dense:exchange=updates:every=16:outer=nesterov:outer_lr=0.5:lr=0.004")
    assert (method.options, method.lr) == ({}, 0.004)
    assert method.rounds == Rounds("updates", 16, "nesterov", 0.5)
    assert method.rounds.outer_settings == (0.5, 0.9, True)
    assert Method.parse("dense:exchange=updates:outer=none").is_same(Method.parse("dense:exchange=updates"))
    assert Method.parse("topk:exchange=gradients").is_same(Method.parse("topk"))
    assert not Method.parse("topk:exchange=updates").is_same(Method.parse("topk"))


def test_workers_may_make_different_numbers_of_steps() -> None:
    rounds = Method.parse("topk:exchange=updates:every=6/4/2:fragments=2:clip_norm=3").rounds
    assert (rounds.every, rounds.by_worker, rounds.clip_norm) == (6, (6, 4, 2), 3)
    made = ["".join(str(int(rounds.makes_step(worker, step))) for step in range(12)) for worker in range(3)]
    assert made == ["111111111111", "110110110110", "100100100100"]


def test_there_may_be_as_many_fragments_as_steps() -> None:
    for every in (2, 8):
        method = Method.parse(f"topk:exchange=updates:every={every}:fragments=every")
        assert method.rounds == Rounds(exchange="updates", every=every, fragments=every)


def test_every_is_the_algorithms_own_unless_updates_are_exchanged() -> None:
    own, shared = Method.parse("adaptive:every=3"), Method.parse("adaptive:exchange=updates:every=3")
    assert (own.options, own.rounds.every) == ({"every": 3}, 1)
    assert (shared.options, shared.rounds.every) == ({}, 3)


def test_a_budget_goes_to_methods_that_keep_one_themselves() -> None:
    assert Method.parse("adaptive").with_budget(812.3).label == "adaptive:bytes_per_step=812"
    for label in ("adaptive:bytes_per_step=5", "adaptive:target_error=0.5", "topk"):
        assert Method.parse(label).with_budget(812.3).label == label


def test_text_that_is_no_method_is_its_own_name() -> None:
    for text in ("density", "S = 0.4: distance", "regtopk-current"):
        assert Method.read(text) == Method(text, text) and Method.read(text).without("lr") == text


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("regtopp", r"algorithm must be one of .*got 'regtopp' \(did you mean 'regtopk'\?\)"),
        ("regtopk:nu=2", r"option of regtopk must be one of .*got 'nu' \(did you mean 'mu'\?\)"),
        ("adaptive:nu=2", r"option of regtopk must be .*got 'nu' \(did you mean 'mu'\?\)"),
        ("topk:exchange=updates:by_worker=3", "option of topk must be one of .*got 'by_worker'"),
        ("topk:exchange=updates:every=4/²", "every must be an integer of at least 1, got '4/²'"),
        ("topk:4bit", r"method must be NAME\[:OPTION=VALUE\]..., got 'topk:4bit'"),
        ("topk:score=regtopk", "score must be 'regtopk', of an algorithm that takes one"),
        ("topk:lr=fast", "lr must be positive and finite, got 'fast'"),
        ("topk:lr=0", "lr must be positive and finite, got 0"),
        ("topk:index_code=zip", "index_code must be"),
        ("topk:residual_dtype=int8", "residual_dtype must be one of float32, bfloat16, got 'int8'"),
        ("consensus:impute=0.3", "must be one of density, k, value_code, returned, sum_code, score, "),
        ("topk:exchange=updates:every=4/x", "every must be an integer of at least 1, got '4/x'"),
        ("topk:exchange=updates:every=4/0", "every must be an integer of at least 1, got 0"),
        ("topk:exchange=updates:every=4/2:delay=2", "delay must be an integer from 0 to 1 with every = 2"),
        (
            "topk:exchange=updates:every=4/3:fragments=2",
            "^every of each worker must be a multiple of fragments, and delay less than every // fragments, "
            "got 'topk:exchange=updates:every=4/3:fragments=2'$",
        ),
        ("topk:exchange=updates:clip_norm=0", "clip_norm must be positive and finite, got 0"),
        ("adaptive:algorithm=consensus:impute=0.3", "option of consensus must be one of .*, got 'impute'"),
    ],
)
def test_bad_words_are_refused(label: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Method.parse(label)


def test_the_method_whose_bytes_others_send() -> None:
    like = Method.parse_like("topk:0.001:raw32:float32")
    assert like.label == "topk:density=0.001:index_code=raw32:value_code=float32"
    refused = {"topk:0.1": "like must be NAME:DENSITY", "topk:x:raw32:float32": "density .*'x'"}
    for text, message in refused.items():
        with pytest.raises(ArgumentError, match=message):
            Method.parse_like(text)


def test_values_take_the_type_of_the_default() -> None:
    config = parse_settings(Fig2Config, ["num_iterations=3", "lr=1e-3", "densities=0.25,1", "device=cpu"])
    assert config == Fig2Config(num_iterations=3, lr=0.001, densities=(0.25, 1.0), device="cpu")
    assert parse_settings(Fig2Config, []) == Fig2Config()


@pytest.mark.parametrize(
    ("experiment", "settings", "message"),
    [
        ("fig2", "lr", "setting must be key=value, got 'lr'"),
        ("fig2", "num_worker=3", r"got 'num_worker' \(did you mean 'num_workers'\?\)"),
        ("fig2", "lr=1 lr=2", "each setting must be given once, got lr twice"),
        ("fig2", "num_workers=two", r"num_workers must be like its default, 20, got 'two'"),
        ("fig2", "densities=0.4;0.5", "densities .* got '0.4;0.5'"),
        ("fig3", "deterministic=maybe", "deterministic .* got 'maybe'"),
        ("fig2", "num_iterations=-1", "num_iterations .* got -1"),
        ("fig2", "lr=nan", "lr .* got nan"),
        ("fig2", "mu=0", "mu .* got 0.0"),
        ("fig2", "densities=0.4,1.5", "density .* got 1.5"),
        ("fig2", "densities=0.4,0.4", r"densities must be different and at least one, got \(0.4, 0.4\)"),
        ("fig2", "device=tpu", "device must be cpu or cuda, got 'tpu'"),
        ("scaling", "slope=nan", "slope .* got nan"),
        ("scaling", "curvature=-1", "curvature .* got -1.0"),
    ],
)
def test_bad_settings_are_refused(experiment: str, settings: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_settings(EXPERIMENTS[experiment].config, settings.split())


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("3", [0, 1, 2]), ("3,4,5", [3, 4, 5]), ("2-6", [2, 3, 4, 5, 6]), ("3-3", [3]), ("3,", [3])],
)
def test_seeds_are_a_number_or_a_list(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds and parse_seeds(format_seeds(seeds)) == seeds


@pytest.mark.parametrize("text", ["", "0", "x", "3,3", "5-3", "-1", "1,-2"])
def test_other_seeds_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="seeds"):
        parse_seeds(text)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArgumentError, match="device must be cpu where torch finds no GPU, got 'cuda'"):
        check_device("device", "cuda")


def test_small_models_have_one_thread_and_the_number_is_given_back() -> None:
    torch.set_num_threads(2)
    with threads_for(SMALL):
        assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="x"), threads_for(SMALL - 1):
        assert torch.get_num_threads() == 1
        raise ValueError("x")
    assert torch.get_num_threads() == 2
