"""The code of docs/training.md and of the README's diff, on real ranks."""

import contextlib
import io
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import regtopk
from tests.distributed.ranks import Ranks

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", page, flags=re.DOTALL)


def what_is_yours() -> dict[str, Any]:
    """The names the guide leaves to its reader."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 3))
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(8, 16, 20, generator=generator)
    loader = [(rows, rows[:, :3].argmax(-1)) for rows in inputs]
    return {
        "__name__": "guide",
        "network": network,
        "loader": loader,
        "loss_function": nn.functional.cross_entropy,
        "device": torch.device("cpu"),
    }


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def follow(source: str, names: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        exec(compile(source, "guide", "exec"), names)
    return stdout.getvalue()


def follow_guide(sources: list[str], folder: Path) -> tuple[str, torch.Tensor]:
    names = what_is_yours()
    with inside(folder):
        printed = "".join(follow(source, names) for source in sources)
    return printed, nn.utils.parameters_to_vector(names["network"].parameters()).detach()


def test_guide_runs_and_ranks_stay_equal(two_ranks: Ranks, tmp_path: Path) -> None:
    sources = blocks(GUIDE, "python")
    (printed, parameters), (printed_elsewhere, parameters_elsewhere) = two_ranks.run(
        follow_guide, sources, tmp_path
    )
    assert re.search(r"regtopk: 8 steps on 2 workers; this rank:\n.*\n  dense .* times as much\n", printed)
    assert printed_elsewhere == ""
    assert torch.equal(parameters, parameters_elsewhere)
    assert (tmp_path / "checkpoint.pt").exists()


def follow_readme(diff: str, checkpoint: str, folder: Path) -> tuple[str, str, torch.Tensor, torch.Tensor]:
    """The loop before and after the diff, and a checkpoint of the latter."""
    before = "".join(line[2:] + "\n" for line in diff.splitlines() if not line.startswith("+"))
    after = "".join(line[2:] + "\n" for line in diff.splitlines()) + checkpoint
    results = []
    for source in (before, after):
        names = what_is_yours()
        names |= {"DistributedDataParallel": nn.parallel.DistributedDataParallel, "dist": dist}
        names |= {"os": os, "regtopk": regtopk, "torch": torch, "loss": names["loss_function"]}
        names["model"] = names["network"]
        names["optimizer"] = torch.optim.SGD(names["network"].parameters(), lr=0.1)
        with inside(folder):
            printed = follow(source, names)
        results.append((printed, nn.utils.parameters_to_vector(names["network"].parameters()).detach()))
    (printed_before, parameters_before), (printed_after, parameters_after) = results
    return printed_before, printed_after, parameters_before, parameters_after


def test_the_readmes_diff_runs(two_ranks: Ranks, tmp_path: Path) -> None:
    (diff,), (checkpoint,) = blocks(README, "diff"), blocks(README, "python ranks")
    assert sum(line.startswith("+") for line in diff.splitlines()) == 2
    printed_before, printed_after, before, after = two_ranks.run(follow_readme, diff, checkpoint, tmp_path)[0]
    assert printed_before == "" and "regtopk: 8 steps on 2 workers" in printed_after
    assert not torch.equal(before, after)


@pytest.mark.filterwarnings("default")  # what these libraries warn of is theirs
@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_recipe_runs(new_ranks: Ranks, tmp_path: Path, library: str) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install 'regtopk[recipes]'")
    (source,) = blocks(GUIDE, f"python {library}")
    (tmp_path / "recipe.py").write_text(source, encoding="utf-8")
    printed, printed_elsewhere = new_ranks.run_script(tmp_path / "recipe.py", timeout_s=300)
    summary = r"regtopk: 2[89] steps on 2 workers; this rank:\n.*\n  dense .* times as much\n"
    assert re.search(summary, printed)
    assert "regtopk:" not in printed_elsewhere
