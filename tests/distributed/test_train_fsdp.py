"""examples/train_fsdp.py on 2 x 2 ranks: by updates, resumed, by gradients, and by torch's own HSDP."""

import math
from functools import partial
from pathlib import Path

from tests.distributed.ranks import Ranks
from tests.distributed.training import run_example, write_numbers

UNTRAINED = math.log(256)  # the loss of a model that knows nothing
SMALL = ("--layers", "1", "--width", "32", "--lr", "0.01", "--steps")
run_script = partial(run_example, "train_fsdp.py", *SMALL)


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
    write_numbers(tmp_path / "text.txt")
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
