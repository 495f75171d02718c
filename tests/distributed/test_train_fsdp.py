"""examples/train_fsdp.py on 2 x 2 ranks: by updates, resumed, by gradients, and by torch's own HSDP."""

import contextlib
import io
import math
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from tests.distributed.ranks import Ranks

UNTRAINED = math.log(256)  # the loss of a model that knows nothing
SCRIPT = str(Path(__file__).parents[2] / "examples" / "train_fsdp.py")


def run_script(*words: str) -> str:
    """What the script prints in a process that is in a group, and stays in it."""
    small = ["--layers", "1", "--width", "32", "--lr", "0.01", "--steps"]
    with (
        patch.object(sys, "argv", [SCRIPT, *small, *words]),
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        runpy.run_path(SCRIPT, run_name="__main__")
    return printed.getvalue()


def run_all(folder: Path) -> list[str]:
    file = ["--data", str(folder / "text.txt"), "--density", "0.05", "--checkpoint"]
    run = [*file, str(folder / "run")]  # one folder for all ways
    return [
        run_script("2", *run),
        run_script("6", *run, "--resume"),
        run_script("2", *run, "--gradients", "--lr", "1"),
        run_script("4", *run, "--gradients", "--lr", "1", "--resume"),
        run_script("4", *run, "--dense"),
    ]


def test_it_trains_in_each_of_its_ways(four_ranks: Ranks, tmp_path: Path) -> None:
    lines = [f"{number} is followed by {number + 1}.\n" for number in range(5000)]
    (tmp_path / "text.txt").write_text("".join(lines))
    printed, *others = four_ranks.run(run_all, tmp_path)
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
