import threading

import pytest
import torch

from regtopk.kernels import threads
from regtopk.kernels.threads import over_rows, side_by_side


@pytest.fixture(params=["openmp", "pool"])
def three_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's own threads, and on a pool, which is used where torch has no OpenMP."""
    if request.param == "pool":
        monkeypatch.setattr(threads, "_openmp", lambda: None)
    elif threads._openmp() is None:
        pytest.skip("torch has no OpenMP here")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


@pytest.mark.usefixtures("three_threads")
def test_results_in_order() -> None:
    assert side_by_side(lambda a, b: a * b, [(n, 2) for n in range(50)]) == [2 * n for n in range(50)]


@pytest.mark.usefixtures("three_threads")
def test_tasks_run_at_the_same_time() -> None:
    all_here = threading.Barrier(3, timeout=30)
    side_by_side(all_here.wait, [(), (), ()])


@pytest.mark.usefixtures("three_threads")
def test_an_error_comes_back() -> None:
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda n: 1 // n, [(1,), (2,), (0,), (3,)])


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(("num_rows", "threads_each"), [(1, 3), (2, 3), (3, 1), (10, 1)])
def test_few_rows_are_shared_and_many_are_not(num_rows: int, threads_each: int) -> None:
    calls: list[tuple[int, int]] = []
    over_rows(lambda row, num_threads: calls.append((row, num_threads)), num_rows)
    assert sorted(calls) == [(row, threads_each) for row in range(num_rows)]
