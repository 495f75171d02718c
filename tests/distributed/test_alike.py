"""Buckets computed together, and steps that go on before the host has heard from others: the same bits."""

import gc
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import regtopk
from regtopk.core.algorithm import Algorithm
from regtopk.distributed.state.buckets import into
from regtopk.distributed.steps import alike
from regtopk.distributed.steps.step import Steps
from regtopk.distributed.transport.collectives import Collectives
from tests.algorithms.cases import Case
from tests.distributed.ranks import on_ranks
from tests.distributed.test_equals_simulator import OF_EACH_KIND
from tests.distributed.training import answers_on_the_device, flip_a_bit, refusal, same, steps_of

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


def make_step(steps: Steps, grads: dict[str, Tensor], **options: Any) -> bool:
    """Whether it went on without the answers."""
    buckets = [bucket for bucket in steps.buckets.all if bucket.names[0] in grads]
    flats = [grads[bucket.names[0]] for bucket in buckets]
    with steps.step((flats, torch.cat(flats).isfinite().all()), buckets, **options) as step:
        is_late = step.agreement.is_spoilt is not None
        step.exchange(into(grads))
    return is_late


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_together_and_apart_are_the_same_bits(name: str) -> None:
    groups, together = run(*CASES[name])
    with patch.object(alike, "_kind_of", lambda bucket: None):
        _, apart = run(*CASES[name])
    assert same(together, apart) and groups == ([] if name == "not alike" else ALIKE)


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


SIZES_OF_LATE = {"a": 400, "b": 90, "c": 400}  # two are computed together
BAD_STEP, BAD_RANK = 2, 1


def make_late_step(
    steps: Steps, generator: torch.Generator, *, is_bad: bool = False
) -> tuple[list[Tensor], bool]:
    """The aggregates of one step, and whether it went on without the answers."""
    grads = {name: torch.randn(size, generator=generator) for name, size in SIZES_OF_LATE.items()}
    if is_bad and dist.get_rank() == BAD_RANK:
        grads["b"][7] = torch.nan
    is_late = make_step(steps, grads, may_go_on=True)
    return list(grads.values()), is_late


def run_late(case: Case) -> tuple[list[Tensor], list[bool]]:
    """The aggregates of all steps that count and the states at the end; and which steps were late."""
    steps, generator = steps_of(case.make(), SIZES_OF_LATE), torch.Generator().manual_seed(dist.get_rank())
    kept, were_late = [], []
    for number in range(4):
        aggregates, is_late = make_late_step(steps, generator, is_bad=number == BAD_STEP)
        kept += aggregates if number != BAD_STEP else []
        were_late.append(is_late)
    assert steps.num_steps == 3 and steps.ledger.total.num_skipped == 1
    states = [tensor for bucket in steps.buckets.all for tensor in bucket.state.state_dict().values()]
    return kept + [tensor.clone() for tensor in states], were_late


@pytest.mark.parametrize("case", OF_EACH_KIND, ids=str)
@on_ranks(2)
def test_bits_are_those_of_steps_that_wait(case: Case) -> None:
    heard, _ = run_late(case)
    with answers_on_the_device():
        late, were_late = run_late(case)
    assert same(heard, late)
    assert not were_late[0] and were_late[-1] != case.make().listens


@on_ranks(2)
def test_a_damaged_message_is_refused_when_somebody_looks() -> None:
    steps, generator = steps_of(regtopk.TopK(k=4), SIZES_OF_LATE), torch.Generator().manual_seed(0)
    with answers_on_the_device():
        make_late_step(steps, generator)
        with patch.object(Collectives, "all_gather", flip_a_bit):
            _, is_late = make_late_step(steps, generator)
        assert is_late
        kind, text = refusal(lambda: steps.num_steps)
        assert kind == "WireFormatError" and text.startswith("message of rank 1 is refused")
        kind, text = refusal(lambda: make_late_step(steps, generator))
        assert kind == "ClusterError" and "step 1 failed half-way (WireFormatError" in text
