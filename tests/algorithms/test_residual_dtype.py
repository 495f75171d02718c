"""Residuals in bfloat16: algorithms do not know of it."""

from typing import Any

import pytest
import torch

from regtopk import Dense, TopK
from regtopk.core import Worker
from regtopk.errors import ArgumentError
from regtopk.simulate import Cluster
from tests.algorithms.cases import CASES, LAYOUT, WEIGHTS, Case, N, random_grads

WORKER = Worker(torch.tensor(1.0), torch.tensor(0), N, 0, LAYOUT)


def cluster_of(algorithm: Any, residual_dtype: str) -> Cluster:
    return Cluster(algorithm, num_workers=N, weights=WEIGHTS, layout=LAYOUT, residual_dtype=residual_dtype)


@pytest.mark.parametrize("case", [case for case in CASES if case.is_first], ids=str)
def test_a_step_is_that_of_float32_and_its_residual_is_rounded(case: Case) -> None:
    if not hasattr(case.make().init(WORKER), "residual"):
        with pytest.raises(ArgumentError, match="which keeps no residual, got 'bfloat16'"):
            cluster_of(case.make(), "bfloat16").step(random_grads(1)[0])
        return
    narrow, wide = cluster_of(case.make(), "bfloat16"), cluster_of(case.make(), "float32")
    for number, grads in enumerate(random_grads(4)):
        if number > 0:
            wide.load_state_dict(narrow.state_dict())
        assert torch.equal(narrow.step(grads), wide.step(grads))
        states: list[Any] = [narrow.state, wide.state]
        kept, exact = (state.residual for state in states)
        assert kept.dtype == torch.bfloat16 and exact.dtype == torch.float32
        assert ((kept - exact).abs() <= 2.0**-7 * exact.abs()).all()
    assert not torch.equal(kept.float(), exact)  # the last step was rounded


def test_what_is_far_smaller_than_the_residual_adds_up() -> None:
    """Entry 1 gets a 500th of what it holds in every step: the nearest bfloat16 would never move."""
    cluster = Cluster(TopK(k=1), num_workers=1, residual_dtype="bfloat16")
    grads = torch.tensor([[100.0, 1.0]])
    for _ in range(501):
        cluster.step(grads)
        grads[0, 1] = 1 / 500
    state: Any = cluster.state
    assert 1.8 < float(state.residual[0, 1]) < 2.2  # 2 in float32


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ArgumentError, match="residual_dtype must be one of"):
        Cluster(Dense(), num_workers=1, residual_dtype="float16")
