"""Steps that go on before the host has heard from the others, as over collectives that run on the device."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import regtopk
from regtopk.distributed.state.layout import into
from regtopk.distributed.steps.step import Steps
from regtopk.distributed.transport.collectives import Collectives
from tests.algorithms.cases import Case
from tests.distributed.late import answers_on_the_device
from tests.distributed.ranks import on_ranks
from tests.distributed.test_equals_simulator import OF_EACH_KIND
from tests.distributed.training import refusal, same, steps_of

SIZES = {"a": 400, "b": 90, "c": 400}  # two are computed together
BAD_STEP, BAD_RANK = 2, 1


def make_step(steps: Steps, generator: torch.Generator, *, is_bad: bool = False) -> tuple[list[Tensor], bool]:
    """The aggregates of one step, and whether it went on without the answers."""
    grads = {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}
    if is_bad and dist.get_rank() == BAD_RANK:
        grads["b"][7] = torch.nan
    flats = list(grads.values())
    with steps.step((flats, torch.cat(flats).isfinite().all()), may_go_on=True) as step:
        is_late = step.is_spoilt is not None
        step.exchange(into(grads))
    return flats, is_late


def run(case: Case) -> tuple[list[Tensor], list[bool]]:
    """The aggregates of all steps that count and the states at the end; and which steps were late."""
    steps, generator = steps_of(case.make(), SIZES), torch.Generator().manual_seed(dist.get_rank())
    kept, were_late = [], []
    for number in range(4):
        aggregates, is_late = make_step(steps, generator, is_bad=number == BAD_STEP)
        kept += aggregates if number != BAD_STEP else []
        were_late.append(is_late)
    assert steps.num_steps == 3 and steps.ledger.total.num_skipped == 1
    states = [tensor for bucket in steps.buckets.all for tensor in bucket.state.state_dict().values()]
    return kept + [tensor.clone() for tensor in states], were_late


@pytest.mark.parametrize("case", OF_EACH_KIND, ids=str)
@on_ranks(2)
def test_bits_are_those_of_steps_that_wait(case: Case) -> None:
    heard, _ = run(case)
    with answers_on_the_device():
        late, were_late = run(case)
    assert same(heard, late)
    assert not were_late[0] and were_late[-1] != case.make().listens


@on_ranks(2)
def test_a_damaged_message_is_refused_when_somebody_looks() -> None:
    steps, generator = steps_of(regtopk.TopK(k=4), SIZES), torch.Generator().manual_seed(0)
    real = Collectives.all_gather

    def flip_a_bit(self: Collectives, tensor: Tensor) -> Tensor:
        gathered = real(self, tensor)
        if tensor.dtype == torch.uint8:
            gathered[1, 40] ^= 1
        return gathered

    with answers_on_the_device():
        make_step(steps, generator)
        with patch.object(Collectives, "all_gather", flip_a_bit):
            _, is_late = make_step(steps, generator)
        assert is_late
        kind, text = refusal(lambda: steps.num_steps)
        assert kind == "WireFormatError" and text.startswith("message of rank 1 is refused")
        kind, text = refusal(lambda: make_step(steps, generator))
        assert kind == "ClusterError" and "step 1 failed half-way (WireFormatError" in text
