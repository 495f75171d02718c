"""Runs loops that release the GIL on several threads, as many as torch uses.

Plain threads, because nothing else leaves torch alone: numba's threading layers reset torch's number of
threads, or refuse to be called from two threads at once. After an operation torch's own threads wait for the
next one in a busy loop, for milliseconds, so ours may get half a core, or none for a while. Work is therefore
cut into small pieces: a thread takes the next one when it is ready, and nobody waits for one that took none.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def side_by_side(function: Callable[..., Result], tasks: Sequence[Iterable[Any]]) -> list[Result]:
    """Call a function with each task's arguments, several at a time; the results, in order."""
    results: list[Any] = [None] * len(tasks)
    todo = iter(range(len(tasks)))  # shared by all threads

    def work() -> None:
        for n in todo:
            results[n] = function(*tasks[n])

    num_others = min(len(tasks), torch.get_num_threads()) - 1
    pool = _pool(os.getpid(), torch.get_num_threads()) if num_others > 0 else None
    others = [pool.submit(work) for _ in range(num_others)] if pool else []
    try:
        work()
    finally:
        late = [other for other in others if not other.cancel()]
    for other in late:
        other.result()
    return results


def over_rows(function: Callable[[int, int], None], num_rows: int) -> None:
    """Call a function with every row and the number of threads it may use itself.

    If there are at least as many rows as threads, each row goes to one thread; else all threads share it.
    """
    num_threads = torch.get_num_threads()
    if num_rows < num_threads:
        for row in range(num_rows):
            function(row, num_threads)
    else:
        side_by_side(function, [(row, 1) for row in range(num_rows)])


@cache
def _pool(pid: int, num_threads: int) -> ThreadPoolExecutor:
    """The threads, kept from call to call; a forked process has none of its parent's, and gets its own."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="regtopk")
