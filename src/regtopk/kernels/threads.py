"""Plain threads for loops that release the GIL, as many as torch uses itself."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def side_by_side(function: Callable[..., Result], tasks: Sequence[Iterable[Any]]) -> list[Result]:
    """Call a function with each task's arguments, at the same time; the first in this thread."""
    if len(tasks) == 1:
        return [function(*tasks[0])]
    pool = _pool(os.getpid(), len(tasks) - 1)
    others = [pool.submit(function, *task) for task in tasks[1:]]
    return [function(*tasks[0]), *(other.result() for other in others)]


def over_rows(function: Callable[[int, int], None], num_rows: int) -> None:
    """Call a function with every row and the threads it may use itself.

    Enough rows go to the threads whole; the threads share each of a few.
    """
    num_threads = torch.get_num_threads()
    if num_rows < num_threads:
        for row in range(num_rows):
            function(row, num_threads)
        return

    def every_nth(first: int) -> None:
        for row in range(first, num_rows, num_threads):
            function(row, 1)

    side_by_side(every_nth, [(first,) for first in range(num_threads)])


@cache
def _pool(pid: int, num_threads: int) -> ThreadPoolExecutor:
    """Kept from call to call; a forked process has none of its parent's threads and gets its own."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="regtopk")
