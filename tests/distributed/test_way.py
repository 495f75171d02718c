"""The way of a gradient through the files of the library, as the package's docstring tells it."""

import sys
import threading
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import regtopk
from regtopk.distributed.options import Scope
from tests.distributed.ranks import Ranks
from tests.distributed.training import closing, ddp, loss_of

SOURCE = str(Path(regtopk.__file__).parent)
HERE = "distributed/"
STARTS: dict[Scope, str] = {"model": "ddp", "bucket": "background bucket_queue"}


@pytest.mark.parametrize("scope", STARTS)
def test_the_way_of_a_gradient(two_ranks: Ranks, scope: Scope) -> None:
    for to_the_others, files in two_ranks.run(trace_a_step, scope):
        assert to_the_others == [
            f"{STARTS[scope]} step agreement collectives",
            f"{STARTS[scope]} step driver sparse_sum gather collectives",
        ]
        assert len(files) <= 15, files  # with those called along the way


def trace_a_step(scope: Scope) -> tuple[list[str], list[str]]:
    """The files on the stack at each collective, and all files of the package that were entered."""
    ways: dict[str, None] = {}  # in order, each once
    files: dict[str, None] = {}

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(SOURCE):
            return
        way = stack(frame)
        here = [name for name in way if name.startswith(HERE)]
        assert len(here) == len(set(here)), f"a file calls back into one it came from: {way}"
        files.update(dict.fromkeys(here))
        if way[-1] == HERE + "collectives.py":
            ways[" ".join(Path(name).stem for name in way)] = None

    model = ddp()
    with closing(regtopk.attach(model, regtopk.RegTopK(density=0.1), scope=scope)):
        loss = loss_of(model, 0)
        threading.setprofile(look)  # the queue's thread starts with the first bucket
        sys.setprofile(look)
        try:
            loss.backward()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return list(ways), list(files)


def stack(frame: FrameType | None) -> list[str]:
    """The files of the library from the outermost call to this one; calls within a file count once."""
    found = []
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(SOURCE):
            found.append(Path(name).relative_to(SOURCE).as_posix())
        frame = frame.f_back
    return [name for name, _ in groupby(reversed(found))]
