"""Generators that run at the same time, one of them here and the others in processes of their own.

For loops of many small tensors, which one core works on. A process is forked, so it starts at once and has
all that was made before; that is safe as long as it needs no thread of its parent: see `_can_fork`.
"""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def side_by_side(parts: Sequence[Callable[[], Iterator[T]]]) -> Iterator[tuple[T, ...]]:
    """Yield the first values of all parts, then the second, and so on; what a part raises is raised here.

    Where processes cannot be forked the parts run here in turn, with the same values.

    Args:
        parts: at least one, yielding equally often; what they yield must pickle.
    """
    here, *others = parts
    with ExitStack() as processes:
        streams = [_forked(part, processes) if _can_fork() else part() for part in others]
        yield from zip(here(), *streams, strict=True)


def _can_fork() -> bool:
    """On Linux with a core to spare, if torch may use one thread only and no GPU: a fork has no others."""
    is_linux = sys.platform == "linux"  # macOS has fork, but its libraries do not survive it
    is_alone = torch.get_num_threads() == 1 and not torch.cuda.is_initialized()
    return is_linux and is_alone and len(os.sched_getaffinity(0)) > 1


def _forked(part: Callable[[], Iterator[T]], processes: ExitStack) -> Iterator[T]:
    """Start a process for a part now, and end it with the stack at the latest."""
    receiver, sender = get_context("fork").Pipe(duplex=False)
    process = get_context("fork").Process(target=_send_all, args=(part, sender, receiver), daemon=True)
    with warnings.catch_warnings():  # Python 3.12 warns of threads, here torch's and a progress bar's
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    processes.callback(process.join)
    processes.callback(process.kill)
    processes.callback(receiver.close)
    sender.close()
    return _received(receiver)


def _send_all(part: Callable[[], Iterator[Any]], sender: Connection, receiver: Connection) -> None:
    """The process: send what the part yields, then None, or what it raised."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends us
    receiver.close()  # so that sending fails, and we end, when the parent is gone
    try:
        for value in part():
            sender.send((value, None))
        sender.send(None)
    except BrokenPipeError:
        pass
    except Exception as error:
        sender.send((None, error))


def _received(receiver: Connection) -> Iterator[Any]:
    while (message := receiver.recv()) is not None:
        value, error = message
        if error is not None:
            raise error
        yield value
