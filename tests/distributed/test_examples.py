"""The examples of language models on ranks that are there: by updates, resumed, dense, with Muon, sharded."""

import math
import runpy
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.ranks import Ranks
from tests.distributed.training import run_example, write_numbers
from tests.test_readme import commands

GPT = str(Path(__file__).parents[2] / "examples" / "train_gpt.py")


def run_script(*words: str) -> str:
    of_readme = commands("torchrun")[1][3:]  # made smaller by the words that follow
    small = [*of_readme, "--layers", "1", "--width", "32", "--batch", "4", "--lr", "0.02", "--steps"]
    return run_example("train_gpt.py", *small, *words)


def run_four_times(folder: Path) -> list[str]:
    text = ["--data", str(folder / "text.txt")]
    file = [*text, "--checkpoints", str(folder / "run")]
    muon = [*text, "--checkpoints", str(folder / "muon"), "--optimizer", "muon"]
    return [
        run_script("5", *file), run_script("30", *file),
        run_script("30", *file, "--dense"), run_script("30", *muon),
    ]  # fmt: skip


def test_it_trains_by_updates_goes_on_and_trains_dense(two_ranks: Ranks, tmp_path: Path) -> None:
    write_numbers(tmp_path / "text.txt")
    printed, silent = two_ranks.run(run_four_times, tmp_path)
    begun, resumed, dense, muon = printed
    assert begun.startswith("0 of 5 steps are done; ") and "\n5 steps: test loss " in begun
    assert resumed.startswith("5 of 30 steps are done; ") and "\n30 steps: " in resumed
    for printed_last, counts in ((begun, "5 steps, 3"), (resumed, "30 steps, 16"), (muon, "30 steps, 8")):
        assert f"topk: after {counts} rounds on 2 workers" in printed_last  # the last of them in finish()
    assert dense.count("\n") == 2 and silent == ["", "", "", ""]
    losses = [float(out.split("test loss ")[1].split()[0]) for out in printed]
    assert max(losses[1:]) < losses[0] - 0.5 and losses[3] != losses[1], losses


def test_it_refuses_a_short_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("too short")
    with pytest.raises(SystemExit, match="the text must have at least 100,000 characters, got 9"):
        runpy.run_path(GPT)["read_text"](tmp_path / "text.txt")


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


def test_it_trains_in_each_of_its_ways(four_ranks: Ranks, tmp_path: Path) -> None:
    write_numbers(tmp_path / "text.txt")
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
