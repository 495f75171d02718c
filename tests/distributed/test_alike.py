"""Buckets that are computed together give the bits of buckets that are not."""

import gc
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import regtopk
from regtopk.core.algorithm import Algorithm
from regtopk.distributed.state.layout import into
from regtopk.distributed.steps import alike
from regtopk.distributed.steps.driver import as_rows
from regtopk.distributed.steps.step import Steps
from tests.distributed.ranks import on_ranks
from tests.distributed.training import same, steps_of

SIZES = {"a": 400, "b": 900, "c": 400, "d": 400, "e": 90}
ALIKE = [[["a"], ["c"], ["d"]]]

CASES: dict[str, tuple[Algorithm[Any], dict[str, Any]]] = {
    "topk": (regtopk.TopK(density=0.05), {}),
    "regtopk": (regtopk.RegTopK(density=0.05), {}),
    "4-bit": (regtopk.TopK(density=0.2, value_code="4bit"), {}),
    "chunks": (regtopk.ChunkedTopK(density=0.05, chunk=64), {}),
    "bfloat16": (regtopk.RegTopK(density=0.05), {"residual_dtype": "bfloat16"}),
    "split": (regtopk.RegTopK(density=0.3), {"collective": "split"}),
    "a schedule": (regtopk.RegTopK(density=lambda step: 0.3 / (1 + step)), {}),
    "weights": (regtopk.RegTopK(density=0.05), {"weight": (0.25, 0.75)}),
    "not alike": (regtopk.TopK(density=0.05, impute=0.5), {}),
}


def run(algorithm: Algorithm[Any], given: dict[str, Any]) -> tuple[Any, Any]:
    """What was computed together; and aggregates, states and bytes."""
    if "weight" in given:
        given = given | {"weight": given["weight"][dist.get_rank()]}
    steps, generator = steps_of(algorithm, SIZES, **given), torch.Generator().manual_seed(dist.get_rank())
    aggregates = []
    for number in range(6):
        grads = {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}
        if number == 2:  # a unit that a step did not use
            del grads["c"]
        if number == 4:  # somebody puts other tensors in the place of a state's
            steps.buckets.all[0].state = steps.buckets.all[0].state.clone()
        make_step(steps, grads)
        aggregates += [grads[name].clone() for name in sorted(grads)]
    groups = [[list(names) for names in group] for group in steps._alike._rows]
    states = [bucket.state.state_dict() for bucket in steps.buckets.all]
    return groups, (aggregates, states, steps.ledger.total.sent_bytes)


def make_step(steps: Steps, grads: dict[str, Tensor]) -> None:
    buckets = [bucket for bucket in steps.buckets.all if bucket.names[0] in grads]
    flats = [grads[bucket.names[0]] for bucket in buckets]
    with steps.step((flats, torch.tensor(True)), buckets) as step:
        step.exchange(into(grads))


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_together_and_apart_are_the_same_bits(name: str) -> None:
    groups, together = run(*CASES[name])
    with patch.object(alike, "_kind_of", lambda bucket: None):
        _, apart = run(*CASES[name])
    assert same(together, apart) and groups == ([] if name == "not alike" else ALIKE)


@on_ranks(2)
def test_groups_are_found_again_only_when_something_has_changed() -> None:
    steps, after = steps_of(regtopk.RegTopK(density=0.05), SIZES), []
    with patch.object(alike, "_kind_of", wraps=alike._kind_of) as looked:
        for names in ("abcde", "abcde", "abcde", "abcde", "abde", "abde"):
            make_step(steps, {name: torch.ones(SIZES[name]) for name in names})
            after.append(looked.call_count)
    first, second, third, fourth, fewer, again = after
    assert 0 < first == second == third == fourth < fewer == again


@on_ranks(2)
def test_a_step_that_is_skipped_copies_no_state() -> None:
    steps = steps_of(regtopk.TopK(density=0.5), {"a": 4})
    for is_finite in (True, False):
        with steps.step(([torch.ones(4)], torch.tensor(is_finite)), can_be_taken_back=True) as step:
            assert step.is_finite == is_finite == (steps.buckets.all[0].state_before is not None)
            step.take_back()


def live_bytes(steps: Steps) -> int:
    """Memory of all states and sums, each storage once."""
    gc.collect()
    buckets = steps.buckets.all
    tensors = [t for bucket in buckets for t in bucket.state.state_dict().values()]
    rows = steps._alike._rows.values()
    for sums in [*(bucket.sums for bucket in buckets), *(each.sums for each in rows)]:
        tensors += [total.vector for total in (sums.spare, sums.total) if total is not None]
    for each in rows:
        tensors += each._fields.values()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@on_ranks(2)
def test_memory_does_not_grow() -> None:
    """A residual and a sum for each entry; units that take part while others do not add their sums."""
    vectors, of_alike = 4 * sum(SIZES.values()), 3 * 4 * SIZES["a"]
    for num_dense in (0, 2):
        steps, after = steps_of(regtopk.TopK(k=4), SIZES, dense_steps=num_dense), []
        for names in ("abcde", "abcde", "abcde", "acde", "ace", "abcde"):
            make_step(steps, {name: torch.ones(SIZES[name]) for name in names})
            after.append(live_bytes(steps))
        assert after[num_dense:3] == [2 * vectors] * (3 - num_dense) and after[5] == 2 * vectors
        assert num_dense or max(after) <= 2 * vectors + of_alike
        steps._forget()
        assert live_bytes(steps) == 2 * vectors - of_alike


def test_rows_that_follow_one_another_are_not_copied() -> None:
    rows = torch.zeros(3, 5)
    assert as_rows(list(rows)).data_ptr() == rows.data_ptr()
    assert as_rows([rows[0], rows[2]]).data_ptr() != rows.data_ptr()
