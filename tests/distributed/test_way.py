"""The ways of a gradient and of an update through the library, as the package's docstring tells them."""

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import regtopk
from tests.distributed.ranks import on_ranks
from tests.distributed.test_updates import updating
from tests.distributed.training import closing, ddp, loss_of

SOURCE = str(Path(regtopk.__file__).parent)
REGTOPK = regtopk.RegTopK(density=0.1)


@on_ranks(2)
def test_the_way_of_a_gradient() -> None:
    model = ddp()
    with closing(regtopk.attach(model, REGTOPK)):
        ways = ways_to_others(loss_of(model, 0).backward)
    assert ways == ["ddp step agreement collectives", "ddp step driver sparse_sum gather collectives"]


@on_ranks(2)
def test_the_way_of_an_update() -> None:
    with updating(algorithm=REGTOPK) as (net, optimizer, _):
        loss_of(net, 0).backward()
        ways = ways_to_others(optimizer.step)
    start = "exchange rounds rank_rounds step"
    assert ways == [f"{start} agreement collectives", f"{start} driver sparse_sum gather collectives"]


def ways_to_others(act: Callable[[], Any]) -> list[str]:
    """The files on the stack at each collective. No call leads back into a file that it came from."""
    ways: dict[str, None] = {}  # in order, each once

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(SOURCE):
            return
        way = stack(frame)
        here = [name for name in way if name.startswith("distributed/")]
        assert len(here) == len(set(here)), f"a file calls back into one it came from: {way}"
        if way[-1] == "distributed/transport/collectives.py":
            ways[" ".join(Path(name).stem for name in way)] = None

    sys.setprofile(look)
    try:
        act()
    finally:
        sys.setprofile(None)
    return list(ways)


def stack(frame: FrameType | None) -> list[str]:
    """The files of the library from the outermost call to this one; calls within a file count once."""
    found = []
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(SOURCE):
            found.append(Path(name).relative_to(SOURCE).as_posix())
        frame = frame.f_back
    return [name for name, _ in groupby(reversed(found))]
