from contextlib import suppress

import torch

from regtopk.core.timer import Timer


def test_an_inner_phase_does_not_count_twice() -> None:
    times = iter([0.0, 1.0, 3.0, 10.0, 20.0, 21.5])
    timer = Timer(torch.device("cpu"), lambda: next(times))
    with timer.phase("outer"), timer.phase("inner"):
        pass
    assert timer.seconds() == {"outer": 1.0 + 7.0, "inner": 2.0}
    with timer.phase("outer"):  # what lies between is nobody's
        pass
    assert timer.seconds() == timer.seconds() == {"outer": 9.5, "inner": 2.0}
    assert timer.seconds()["never"] == 0.0


def test_a_block_that_fails_is_counted() -> None:
    times = iter([0.0, 2.0])
    timer = Timer(torch.device("cpu"), lambda: next(times))
    with suppress(ValueError), timer.phase("work"):
        raise ValueError
    assert timer.seconds() == {"work": 2.0}
