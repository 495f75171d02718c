"""The script to copy: on two ranks, resumed, and on two machines (here two launchers)."""

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed.run import main as torchrun

from tests.distributed.ranks import Ranks, fork_process
from tests.processes import free_port
from tests.test_readme import commands

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_ddp.py"


# Runs the script, then prints the threads of the process group that are left. One that lets go of a tensor
# as Python exits aborts its rank, now and then, on a busy machine.
THREADS = """
import runpy, sys
from pathlib import Path
from typing import Any
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
print("left:", [name for name in names if "gloo" in name])
"""


def test_it_trains_leaves_no_thread_and_goes_on(tmp_path: Path) -> None:
    of_readme = commands("torchrun")[0]
    assert of_readme[:2] == ["--nproc_per_node", "2"] and ROOT / of_readme[2] == EXAMPLE
    words = [*of_readme[3:], "--checkpoints", str(tmp_path / "run"), "--epochs"]
    script, *rest = scripts_in(tmp_path)
    check_first_epoch(run(script, *rest, *words, "1"), tmp_path)
    printed_again, _ = run(EXAMPLE, *words, "4")
    told, resumed = printed_again.split("\n", 1)
    assert told.startswith("goes on after epoch 1 of 4, from ")
    assert "consensus: 92 steps on 2 workers" in resumed
    accuracy = float(resumed.split(" %")[0])
    assert accuracy > 88  # 90.8 as this was written


def test_it_trains_on_two_machines(tmp_path: Path) -> None:
    """By torchrun, whose ranks are processes anew: of the test above, what another launcher may change."""
    meet = f"--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint localhost:{free_port()}"
    script = [*map(str, scripts_in(tmp_path)), "--checkpoints", str(tmp_path / "run"), "--epochs", "1"]
    check_first_epoch(run_launchers([*meet.split(), *script], tmp_path), tmp_path)


def scripts_in(folder: Path) -> list[Any]:
    """The example, and before it the script that looks for threads, in /proc."""
    threads = folder / "threads.py"
    threads.write_text(THREADS)
    return [threads, str(EXAMPLE)] if sys.platform == "linux" else [EXAMPLE]


def check_first_epoch(printed: list[str], folder: Path) -> None:
    assert sorted("23 steps on 2 workers" in out for out in printed) == [False, True]
    assert sys.platform != "linux" or all(out.endswith("left: []\n") for out in printed)
    assert len(list((folder / "run").glob("step-0000000001-*/rank-*.json"))) == 2


def run(script: Path, *words: str) -> list[str]:
    """What two new ranks print."""
    with Ranks(2) as ranks:
        return ranks.run_script(script, *words)


def run_launchers(words: list[str], folder: Path) -> list[str]:
    """What two launchers and their ranks print, side by side."""
    printed = [folder / f"printed-{number}" for number in range(2)]
    launchers = [fork_process(launch, words, out)[0] for out in printed]
    try:
        for launcher, out in zip(launchers, printed, strict=True):
            launcher.join(timeout=300)
            assert launcher.exitcode == 0, out.with_suffix(".err").read_text()
    finally:
        for launcher in launchers:
            launcher.terminate()  # it ends its ranks
            launcher.join()
    return [out.read_text() for out in printed]


def launch(pipe: Connection, words: list[str], out: Path) -> None:
    """`torchrun` with these words, in a process that has imported torch; its ranks are processes anew."""
    for number, path in ((1, out), (2, out.with_suffix(".err"))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ["REGTOPK_KERNELS"] = "reference"  # a rank need not import numba, which takes seconds
    torchrun(words)
