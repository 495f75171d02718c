"""The script to copy: on two machines (here two launchers), and resumed on one."""

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

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
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
print("left:", [name for name in names if "gloo" in name])
"""


def test_script_trains_on_two_machines_and_resumes_on_one(new_ranks: Ranks, tmp_path: Path) -> None:
    threads = tmp_path / "threads.py"
    threads.write_text(THREADS)
    scripts = [str(EXAMPLE)]
    if sys.platform == "linux":
        scripts.insert(0, str(threads))  # it looks into /proc
    folder = ["--checkpoints", str(tmp_path / "run")]
    meet = f"--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint localhost:{free_port()}"
    printed = run_launchers([*meet.split(), *scripts, *folder, "--epochs", "1"], tmp_path)
    assert sorted("23 steps on 2 workers" in out for out in printed) == [False, True]
    assert sys.platform != "linux" or all(out.endswith("left: []\n") for out in printed)
    assert len(list((tmp_path / "run").glob("step-0000000001-*/rank-*.json"))) == 2
    of_readme = commands("torchrun")[0]
    assert of_readme[:2] == ["--nproc_per_node", "2"] and ROOT / of_readme[2] == EXAMPLE
    printed_again, _ = new_ranks.run_script(EXAMPLE, *of_readme[3:], *folder, "--epochs", "4")
    told, resumed = printed_again.split("\n", 1)
    assert told.startswith("goes on after epoch 1 of 4, from ")
    assert "consensus: 92 steps on 2 workers" in resumed
    accuracy = float(resumed.split(" %")[0])
    assert accuracy > 88  # 90.8 as this was written


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
