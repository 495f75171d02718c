import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from regtopk.errors import GradientError
from regtopk.lab.experiments.paper import side_by_side as module
from regtopk.lab.experiments.paper.side_by_side import side_by_side
from tests.processes import ended


@pytest.fixture(params=["forked", "in turn"], autouse=True)
def is_forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    forked: bool = request.param == "forked"
    if forked and not hasattr(os, "fork"):
        pytest.skip("needs fork")
    monkeypatch.setattr(module, "_can_fork", lambda: forked)
    return forked


def count(to: int, error: Exception | None = None) -> Iterator[tuple[int, int]]:
    for number in range(to):
        yield number, os.getpid()
    if error is not None:
        raise error


def test_values_come_together_and_in_order(is_forked: bool) -> None:
    values = list(side_by_side([partial(count, 300)] * 3))
    assert [[number for number, _ in found] for found in values] == [[n] * 3 for n in range(300)]
    assert all(found[0][1] == os.getpid() for found in values)  # the first part runs here
    assert len({pid for _, pid in values[0]}) == (3 if is_forked else 1)


@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_part_raises_is_raised_here(failing: int) -> None:
    parts = [partial(count, 2), partial(count, 2)]
    parts[failing] = partial(count, 1, GradientError("grads of worker 3 must be finite"))
    found = side_by_side(parts)
    assert [number for number, _ in next(found)] == [0, 0]
    with pytest.raises(GradientError, match="grads of worker 3 must be finite"):
        next(found)


def test_torch_works_in_both() -> None:
    large = torch.randn(300, 300)  # made before, by all threads

    def product() -> Iterator[list[float]]:
        yield (large @ large).sum(0).tolist()

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ((here, there),) = side_by_side([product, product])
    finally:
        torch.set_num_threads(before)
    assert here == there


def test_a_caller_that_stops_ends_the_processes(is_forked: bool) -> None:
    if not is_forked:
        pytest.skip("no process to end")
    found = side_by_side([partial(count, 10**9), partial(count, 10**9)])
    _, (_, pid) = next(found)
    found.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


CALLER = """
import itertools, os, time
import torch
from regtopk.lab.experiments.paper.side_by_side import side_by_side
torch.set_num_threads(1)
def pids():
    while True:
        yield os.getpid()
        time.sleep(0.01)
for here, there in side_by_side([pids, pids]):
    print(there, flush=True)
"""


def test_a_caller_that_is_killed_takes_the_processes_with_it(is_forked: bool) -> None:
    if not is_forked or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("no process to end")
    with ended(subprocess.Popen([sys.executable, "-c", CALLER], stdout=subprocess.PIPE, text=True)) as caller:
        assert caller.stdout is not None
        process = Path(f"/proc/{int(caller.stdout.readline())}")
        assert process.exists()
        caller.kill()
    deadline = time.monotonic() + 30
    while process.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not process.exists()


def test_processes_are_forked_only_where_that_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert not module._can_fork()  # a fork has no other threads
        torch.set_num_threads(1)
        is_possible = sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1
        assert module._can_fork() == (is_possible and not torch.cuda.is_initialized())
    finally:
        torch.set_num_threads(before)
