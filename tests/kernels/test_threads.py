import threading

import pytest
import torch

from regtopk.kernels.cpu.threads import over_rows, side_by_side


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def test_results_in_order() -> None:
    assert side_by_side(lambda a, b: a * b, [(n, 2) for n in range(50)]) == [2 * n for n in range(50)]
    assert side_by_side(lambda n: n, []) == []


def test_tasks_run_at_the_same_time() -> None:
    all_here = threading.Barrier(3, timeout=30)
    side_by_side(all_here.wait, [(), (), ()])


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


@pytest.mark.parametrize(("num_rows", "threads_each"), [(1, 3), (2, 3), (3, 1), (10, 1)])
def test_few_rows_are_shared_and_many_are_not(num_rows: int, threads_each: int) -> None:
    calls: list[tuple[int, int]] = []
    over_rows(lambda row, num_threads: calls.append((row, num_threads)), num_rows)
    assert sorted(calls) == [(row, threads_each) for row in range(num_rows)]
