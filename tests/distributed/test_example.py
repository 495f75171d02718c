"""The scripts to copy: on two ranks, resumed, and on two machines (here two launchers)."""

import io
import math
import os
import runpy
import sys
from contextlib import redirect_stdout
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
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


# Language models on ranks that are there: by updates, resumed, dense, with Muon, sharded.

# which a small model learns soon
NUMBERS = "".join(f"{number} is followed by {number + 1}.\n" for number in range(5000))


def run_example(name: str, *words: str) -> str:
    """What a script of examples/ prints in a process that is in a group, and stays in it."""
    script = str(ROOT / "examples" / name)
    with (
        patch.object(sys, "argv", [script, *words]),
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
        redirect_stdout(io.StringIO()) as printed,
    ):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def train_gpt(*words: str) -> str:
    of_readme = commands("torchrun")[1][3:]  # made smaller by the words that follow
    small = [*of_readme, "--layers", "1", "--width", "32", "--batch", "4", "--lr", "0.02", "--steps"]
    return run_example("train_gpt.py", *small, *words)


def run_four_times(folder: Path) -> list[str]:
    text = ["--data", str(folder / "text.txt")]
    file = [*text, "--checkpoints", str(folder / "run")]
    muon = [*text, "--checkpoints", str(folder / "muon"), "--optimizer", "muon"]
    return [
        train_gpt("5", *file), train_gpt("30", *file),
        train_gpt("30", *file, "--dense"), train_gpt("30", *muon),
    ]  # fmt: skip


def test_a_gpt_trains_by_updates_goes_on_and_trains_dense(two_ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(NUMBERS)
    printed, silent = two_ranks.run(run_four_times, tmp_path)
    begun, resumed, dense, muon = printed
    assert begun.startswith("0 of 5 steps are done; ") and "\n5 steps: test loss " in begun
    assert resumed.startswith("5 of 30 steps are done; ") and "\n30 steps: " in resumed
    for printed_last, counts in ((begun, "5 steps, 3"), (resumed, "30 steps, 16"), (muon, "30 steps, 4")):
        assert f"topk: after {counts} rounds on 2 workers" in printed_last  # the last of them in finish()
    assert dense.count("\n") == 2 and silent == ["", "", "", ""]
    losses = [float(out.split("test loss ")[1].split()[0]) for out in printed]
    assert max(losses[1:]) < losses[0] - 0.5 and losses[3] != losses[1], losses


def test_a_short_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("too short")
    with pytest.raises(SystemExit, match="the text must have at least 100,000 characters, got 9"):
        runpy.run_path(str(ROOT / "examples" / "train_gpt.py"))["read_text"](tmp_path / "text.txt")


UNTRAINED = math.log(256)  # the loss of a model that knows nothing
SMALL = ("--layers", "1", "--width", "32", "--lr", "0.01", "--steps")
run_sharded = partial(run_example, "train_fsdp.py", *SMALL)


def run_sharded_ways(folder: Path) -> list[str]:
    file = ["--data", str(folder / "text.txt"), "--density", "0.05", "--checkpoint"]
    run = [*file, str(folder / "run")]  # one folder for all ways
    return [
        run_sharded("2", *run),
        run_sharded("6", *run, "--resume"),
        run_sharded("2", *run, "--gradients", "--lr", "1"),
        run_sharded("4", *run, "--gradients", "--lr", "1", "--resume"),
        run_sharded("4", *run, "--dense"),
    ]


def test_a_sharded_gpt_trains_in_each_of_its_ways(four_ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(NUMBERS)
    printed, *others = four_ranks.run(run_sharded_ways, tmp_path)
    assert others == [[""] * 5] * 3
    begun, resumed, _, gradients, dense = printed
    assert begun.startswith("0 of 2 steps are done\n2 steps: test loss ")
    assert "topk: after 2 steps, 1 round on 2 workers" in begun
    assert resumed.startswith("2 of 6 steps are done\n6 steps: ")
    assert "topk: after 6 steps, 3 rounds on 2 workers" in resumed
    assert gradients.startswith("2 of 4 steps are done\n4 steps: ")
    assert "topk: 4 steps on 2 workers" in gradients
    assert dense.startswith("0 of 4 steps are done\n4 steps: ") and dense.count("\n") == 2
    losses = [float(out.split("test loss ")[1].split()[0]) for out in printed]
    assert losses[1] < losses[0] < UNTRAINED and max(losses[1:]) < UNTRAINED - 0.3, losses
