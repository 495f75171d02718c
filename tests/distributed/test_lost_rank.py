"""A rank is lost in the middle of a step, or ends with an error: all say so, and none hangs."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.ranks import Ranks, fork_process
from tests.distributed.test_checkpoint import Training
from tests.distributed.training import algorithm_state, flat_parameters, loss_of, made, refusal, same
from tests.processes import ended

LOST, SAVED_AT, LOST_AT, LAST = 2, 4, 6, 9
RESTART = ": restart all ranks from the last checkpoint"
STOPPED = (
    "a rank has stopped, perhaps before the others (see stop_when), is unreachable or is slower than the"
)


@pytest.mark.parametrize(
    ("moment", "signal_number"),
    [("in the exchange", signal.SIGKILL), ("in backward", signal.SIGSTOP)],
    ids=str,
)
def test_others_fail_clearly_and_a_restart_goes_on(
    four_ranks: Ranks, tmp_path: Path, moment: str, signal_number: int
) -> None:
    with Ranks(4, timeout_s=10) as ranks:
        started = ranks.start(lose_one, tmp_path, moment, signal_number)
        answers = ranks.wait_for([rank for rank in started if rank != LOST])
    for kind, text in answers:
        assert kind == "ClusterError"
        assert f" failed: {STOPPED} process group's timeout; restart" in text and "The backend says: " in text
    for resumed, straight in four_ranks.run(resume, tmp_path):
        assert torch.equal(resumed, straight)


def lose_one(folder: Path, moment: str, signal_number: int) -> tuple[str, str]:
    """What the step in which a rank is lost ends with."""
    training = Training("regtopk")
    model, exchange = training.model, training.exchange
    training.train_until(SAVED_AT)
    training.save(folder / f"rank{dist.get_rank()}.pt")
    training.train_until(LOST_AT)
    if dist.get_rank() == LOST:
        lose_self(model, exchange, moment, signal_number)
    before = algorithm_state(exchange)
    kind, text = refusal(lambda: loss_of(model, LOST_AT).backward())
    if moment == "in the exchange":
        # the state is half a step on: it must not be saved, and no step be made from it
        told = f"step {LOST_AT} failed half-way ({kind}: {text}){RESTART}"
        for act in (exchange.state_dict, lambda: exchange._steps.run({})):
            assert refusal(act) == ("ClusterError", told)
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
        with made(Training, "regtopk") as (training, _):
            if first > 0:
                training.load(folder / f"rank{dist.get_rank()}.pt")
            training.train_until(LAST)
            results.append(flat_parameters(training.model))
    return results[0], results[1]


SCRIPT = """
import sys
import torch
import torch.distributed as dist
import regtopk
from tests.distributed.training import loss_of, make_net

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
net = make_net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
exchange = regtopk.UpdateExchange(net, optimizer, regtopk.TopK(density=0.1), every=2, delay=1)
for step in range(2):
    loss_of(net, step).backward()
    optimizer.step()
net.first.bias.register_hook(lambda grad: 1 / 0)
loss_of(net, 2).backward()
"""


def test_an_error_in_backward(tmp_path: Path) -> None:
    """One rank is a process of its own, whose end is looked at; the other is there for it."""
    store = str(tmp_path / "store")
    other, _ = fork_process(run_as_the_other, store)
    try:
        words = [sys.executable, "-c", SCRIPT, "0", store]
        with ended(subprocess.Popen(words, stderr=subprocess.PIPE, text=True)) as process:
            _, said = process.communicate(timeout=300)
    finally:
        other.kill()
        other.join()
    assert process.returncode == 1, said  # -6 if the exchange's thread outlived Python
    assert "ZeroDivisionError" in said


def run_as_the_other(pipe: Connection, store: str) -> None:
    sys.argv = ["-c", "1", store]
    with suppress(ZeroDivisionError):
        exec(SCRIPT, {})
