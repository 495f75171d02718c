import threading

import pytest
import torch

from regtopk.kernels.cpu.threads import side_by_side


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def test_results_in_order() -> None:
    assert side_by_side(lambda a, b: a * b, [(n, 2) for n in range(50)]) == [2 * n for n in range(50)]
    assert side_by_side(lambda n: n, []) == []


def test_never_more_than_torchs_threads() -> None:
    running, most = set(), []

    def task(n: int) -> None:
        running.add(n)
        most.append(len(running))
        threading.Event().wait(0.002)
        running.remove(n)

    side_by_side(task, [(n,) for n in range(30)])
    assert max(most) <= 3


@pytest.mark.parametrize("num_tasks", [1, 30])
def test_an_error_comes_back(num_tasks: int) -> None:
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda n: 1 // n, [(n,) for n in range(num_tasks)])
