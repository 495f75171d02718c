"""The scripts to copy: on two machines (here two launchers), resumed on one, and beside DDP."""

import runpy
import socket
import sys
from pathlib import Path

import pytest

from tests.processes import run_all

ROOT = Path(__file__).parent.parent
EXAMPLE = str(ROOT / "examples" / "train_ddp.py")
GPT = str(ROOT / "examples" / "train_gpt.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


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


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


def test_script_trains_on_two_machines_and_resumes_on_one(tmp_path: Path) -> None:
    threads = tmp_path / "threads.py"
    threads.write_text(THREADS)
    scripts = [str(threads), EXAMPLE] if sys.platform == "linux" else [EXAMPLE]  # the first looks into /proc
    folder = ["--checkpoint", str(tmp_path)]
    meet = f"--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint localhost:{free_port()}"
    printed = run_all([[*TORCHRUN, *meet.split(), *scripts, *folder, "--epochs", "1"]] * 2, tmp_path)
    assert sorted("23 steps on 2 workers" in out for out in printed) == [False, True]
    assert sys.platform != "linux" or all(out.endswith("left: []\n") for out in printed)
    assert (tmp_path / "checkpoint.pt").exists()
    again = [*TORCHRUN, "--standalone", "--nproc_per_node", "2", EXAMPLE, *folder, "--resume"]
    (resumed,) = run_all([again], tmp_path)
    for page in ("README.md", "docs/training.md"):
        shown = (ROOT / page).read_text(encoding="utf-8")
        for line in resumed.splitlines():
            if line.split()[0] in ("regtopk:", "sent", "dense"):
                assert line in shown, page
    accuracy = float(resumed.split(" %")[0])
    assert accuracy > 94  # 96.9 as this was written


def ranks_of_gpt(*words: str) -> list[list[str]]:
    """The commands of two ranks; without a launcher, which takes as long to start as they do."""
    small = ["--layers", "1", "--width", "32", "--batch", "4", "--every", "3"]
    meet = ["MASTER_ADDR=localhost", f"MASTER_PORT={free_port()}", "WORLD_SIZE=2", "OMP_NUM_THREADS=1"]
    return [
        ["env", *meet, f"RANK={n}", f"LOCAL_RANK={n}", sys.executable, GPT, *small, *words] for n in (0, 1)
    ]


def test_gpt_trains_by_updates_goes_on_and_trains_dense(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} is followed by {number + 1}.\n" for number in range(5000)))
    file = ["--data", str(text), "--checkpoint", str(tmp_path / "checkpoint.pt")]
    both = [*ranks_of_gpt(*file, "--steps", "5"), *ranks_of_gpt(*file, "--steps", "60", "--dense")]
    begun, _, dense, _ = run_all(both, tmp_path)
    assert begun.startswith("6 steps: test loss ") and "topk: 2 rounds of 3 steps on 2 workers" in begun
    resumed, silent = run_all(ranks_of_gpt(*file, "--steps", "60", "--resume"), tmp_path)
    assert "topk: 20 rounds of 3 steps on 2 workers" in resumed and silent == ""
    losses = [float(out.split("test loss ")[1].split()[0]) for out in (begun, resumed, dense)]
    assert 5 < losses[0] < 6 and losses[1] < 4.5 and losses[2] < 4.5, losses


def test_gpt_refuses_a_short_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("too short")
    with pytest.raises(SystemExit, match="the text must have at least 100,000 characters, got 9"):
        runpy.run_path(GPT)["read_text"](tmp_path / "text.txt")
