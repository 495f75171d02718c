import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from regtopk.errors import ClusterError
from regtopk.lab.experiments.ranks.launch import _paths, launch
from tests.lab.experiments import ranks
from tests.processes import ended

ROOT = Path(__file__).parents[2]
CALLER = """
from regtopk.lab.experiments.ranks.launch import _paths, launch
from tests.lab.experiments import ranks
for record in launch(ranks.sleep, {}, 2):
    print(record["pid"], flush=True)
"""


def wait_until_gone(pids: list[int], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"one of {pids} is still there"
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks import this folder's tests, which they find by PYTHONPATH alone."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(ClusterError, match=r"rank 1 failed: ValueError: no luck here\nTraceback") as failure:
        list(launch(ranks.fail, {"rank": 1}, 2))
    assert "ranks.py" in str(failure.value)


def test_a_rank_that_is_killed_is_named() -> None:
    with pytest.raises(ClusterError, match=r"rank 1 failed: ended by SIGKILL"):
        list(launch(ranks.die, {"rank": 1}, 2))


def test_the_current_folder_is_no_path_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # as `python -c` has it; `python -m` has the folder's name
    assert str(tmp_path) not in _paths() and str(ROOT) in _paths()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert str(tmp_path) in _paths()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_that_join_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They listen on loopback alone, import nothing from the current folder, and end when nobody listens."""
    (tmp_path / "html.py").write_text("raise RuntimeError('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    records = launch(ranks.listen, {"word": "hello"}, 2)
    heard = [next(records), next(records)]
    assert sorted(record.pop("rank") for record in heard) == [0, 1]
    pids = [record.pop("pid") for record in heard]
    assert all(Path(record.pop("html")).parent != tmp_path for record in heard)
    addresses = [record.pop("addresses") for record in heard]
    assert all(addresses) and {address for of_rank in addresses for address in of_rank} == {"0100007F"}
    assert heard == [{"num_workers": 2, "word": "hello"}] * 2
    records.close()
    wait_until_gone(pids)


def test_ranks_end_with_their_caller() -> None:
    with ended(
        subprocess.Popen([sys.executable, "-c", CALLER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    ) as caller:
        assert caller.stdout is not None
        pids = [int(caller.stdout.readline()) for _ in range(2)]
        caller.kill()
    wait_until_gone(pids)
