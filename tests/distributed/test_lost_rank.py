"""A rank is lost in the middle of a step: the others say so, do not hang, and a restart goes on."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import regtopk
from tests.distributed.ranks import Ranks
from tests.distributed.training import (
    SMALL_BUCKETS,
    algorithm_state,
    closing,
    ddp,
    flat_parameters,
    loss_of,
    refusal,
    same,
)

LOST, SAVED_AT, LOST_AT, LAST = 2, 4, 6, 9
RESTART = ": restart all ranks from the last checkpoint"


@pytest.mark.parametrize(
    ("moment", "signal_number"),
    [("in the exchange", signal.SIGKILL), ("in backward", signal.SIGSTOP)],
    ids=str,
)
def test_others_fail_clearly_and_a_restart_goes_on(
    four_ranks: Ranks, tmp_path: Path, moment: str, signal_number: int
) -> None:
    ranks = Ranks(4, timeout_s=5)
    try:
        started = ranks.start(lose_one, tmp_path, moment, signal_number)
        answers = ranks.wait_for([rank for rank in started if rank != LOST], timeout_s=60)
    finally:
        ranks.stop()
    for kind, text in answers:
        assert kind == "ClusterError"
        assert "a rank has stopped, is unreachable or is slower than the process group's timeout" in text
        assert "restart all ranks from the last checkpoint" in text
    for resumed, straight in four_ranks.run(resume, tmp_path):
        assert torch.equal(resumed, straight)


def lose_one(folder: Path, moment: str, signal_number: int) -> tuple[str, str]:
    """What the step in which a rank is lost ends with."""
    model, exchange, optimizer = make()
    train(model, optimizer, 0, SAVED_AT)
    parts = {"model": model.module.state_dict(), "exchange": exchange.state_dict()}
    torch.save(parts, folder / f"rank{dist.get_rank()}.pt")
    train(model, optimizer, SAVED_AT, LOST_AT)
    if dist.get_rank() == LOST:
        lose_self(model, exchange, moment, signal_number)
    before = algorithm_state(exchange)
    kind, text = refusal(lambda: loss_of(model, LOST_AT).backward())
    if moment == "in the exchange":
        # the state is half a step on: it must not be saved, and no step be made from it
        for act in (exchange.state_dict, lambda: exchange._steps.run({})):
            assert refusal(act) == (
                "ClusterError",
                f"step {LOST_AT} failed half-way ({kind}: {text})" + RESTART,
            )
    else:
        assert same(algorithm_state(exchange), before)
    exchange.close()  # in a `finally:` it must not hide what went wrong
    return kind, text


def lose_self(model: Any, exchange: Any, moment: str, signal_number: int) -> None:
    """End this process when the last layers' gradients have been handed over, or in the second request."""
    if moment == "in backward":
        model.module.first.bias.register_hook(lambda _: os.kill(os.getpid(), signal_number))
        return
    collectives, calls = exchange._steps.rank.collectives, []
    gather = collectives.all_gather

    def gather_once(tensor: Tensor) -> Any:
        calls.append(tensor)
        if len(calls) > 1:  # the first agrees on the step
            os.kill(os.getpid(), signal_number)
        return gather(tensor)

    collectives.all_gather = gather_once


def resume(folder: Path) -> tuple[Tensor, Tensor]:
    results = []
    for first in (SAVED_AT, 0):
        model, exchange, optimizer = make()
        with closing(exchange):
            if first > 0:
                saved = torch.load(folder / f"rank{dist.get_rank()}.pt", weights_only=True)
                model.module.load_state_dict(saved["model"])
                exchange.load_state_dict(saved["exchange"])
            train(model, optimizer, first, LAST)
            results.append(flat_parameters(model))
    return results[0], results[1]


def make() -> Any:
    model = ddp(**SMALL_BUCKETS)
    exchange = regtopk.attach(model, regtopk.RegTopK(density=0.05))
    return model, exchange, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
