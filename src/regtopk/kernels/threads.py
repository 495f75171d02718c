"""Runs loops that release the GIL on several threads, as many as torch uses.

They are torch's own threads where it uses OpenMP: after each of torch's operations those wait for the next
one in a busy loop, for milliseconds, and threads of ours would have to share the cores with them.
"""

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

_Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def side_by_side(function: Callable[..., Result], tasks: Sequence[Iterable[Any]]) -> list[Result]:
    """Call a function with each task's arguments, several at a time; the results, in order."""
    if len(tasks) == 1:
        return [function(*tasks[0])]
    results: list[Any] = [None] * len(tasks)
    errors: list[BaseException] = []
    todo = iter(range(len(tasks)))  # shared: each thread takes the next task when it is done with one

    def work(_: Any = None) -> None:
        for n in todo:
            try:
                results[n] = function(*tasks[n])
            except BaseException as error:  # must not end in a thread that nobody looks at
                errors.append(error)

    _on_threads(work, min(len(tasks), torch.get_num_threads()))
    if errors:
        raise errors[0]
    return results


def over_rows(function: Callable[[int, int], None], num_rows: int) -> None:
    """Call a function with every row and the number of threads it may use itself.

    Enough rows go to the threads whole; of a few, the threads share each one.
    """
    num_threads = torch.get_num_threads()
    if num_rows < num_threads:
        for row in range(num_rows):
            function(row, num_threads)
    else:
        side_by_side(function, [(row, 1) for row in range(num_rows)])


def _on_threads(work: Callable[[Any], None], num_threads: int) -> None:
    """Call `work` once on each of so many threads, this one among them."""
    openmp = _openmp()
    if openmp is not None:
        openmp(_Work(work), None, num_threads, 0)
        return
    pool = _pool(os.getpid(), num_threads - 1)
    others = [pool.submit(work, None) for _ in range(num_threads - 1)]
    work(None)
    for other in others:
        other.result()


@cache
def _openmp() -> Any:
    """The runtime's entry for a parallel region, if torch has loaded one with GNU's interface."""
    if not torch.backends.openmp.is_available():
        return None
    return getattr(ctypes.CDLL(None), "GOMP_parallel", None)


@cache
def _pool(pid: int, num_threads: int) -> ThreadPoolExecutor:
    """Kept from call to call; a forked process has none of its parent's threads and gets its own."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="regtopk")
