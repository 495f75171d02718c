"""The code of docs/training.md, faq.md, migration.md, sharded.md, README's diffs and the tutorial, run."""

import contextlib
import io
import json
import os
import re
import runpy
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import regtopk
from tests.distributed.ranks import Ranks
from tools.notebook import TUTORIAL, run_cells

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
FAQ, MIGRATION = ((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("faq", "migration"))
SHARDED = (ROOT / "docs" / "sharded.md").read_text(encoding="utf-8")
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
        "is_good_enough": dist.get_rank() == 1,
    }


def follow(source: str, names: dict[str, Any], folder: Path) -> str:
    """What the code prints, run in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            exec(compile(source, "guide", "exec"), names)
    finally:
        os.chdir(before)
    return stdout.getvalue()


def follow_guide(sources: list[str], folder: Path) -> tuple[str, torch.Tensor]:
    names = what_is_yours()
    printed = "".join(follow(source, names, folder) for source in sources)
    assert len(list(names["batches"])) == len(names["loader"]) - 1  # rank 0 has stopped with rank 1
    return printed, nn.utils.parameters_to_vector(names["network"].parameters()).detach()


def test_guide_runs_and_ranks_stay_equal(two_ranks: Ranks, tmp_path: Path) -> None:
    sources = blocks(GUIDE, "python") + blocks(FAQ, "python")
    (printed, parameters), (silent, parameters_elsewhere) = two_ranks.run(follow_guide, sources, tmp_path)
    assert printed.startswith("consensus: 8 steps on 2 workers; this rank:\n") and silent == ""
    assert re.search(r"\n  dense .* times as much", printed)
    assert torch.equal(parameters, parameters_elsewhere)
    assert {path.name.split("-")[1] for path in tmp_path.glob("out/*/step-*")} == {"0000000008"}


def follow_sharded(sources: list[str], folder: Path) -> tuple[str, torch.Tensor]:
    names = what_is_yours()
    summaries = []
    for source in sources:
        follow(source, names, folder)
        summaries.append(names["exchange"].summary().splitlines()[0])
    parameters = [p.detach().full_tensor().flatten() for p in names["network"].parameters()]
    return " ".join(summaries), torch.cat(parameters)


def test_the_guides_sharded_model_trains_and_replicas_stay_equal(four_ranks: Ranks, tmp_path: Path) -> None:
    results = four_ranks.run(follow_sharded, blocks(SHARDED, "python sharded"), tmp_path)
    for told, parameters in results:
        of_gradients = "regtopk: 8 steps on 2 workers; this rank:"
        assert told == f"topk: after 8 steps, 4 rounds on 2 workers; this rank: {of_gradients} {of_gradients}"
        assert torch.equal(parameters, results[0][1]) and parameters.isfinite().all()


def sides_of(diff: str) -> list[str]:
    """The code before and after a diff."""
    return ["".join(line[2:] + "\n" for line in diff.splitlines() if line[0] != sign) for sign in "+-"]


def follow_readme(sources: list[str], folder: Path) -> list[tuple[str, torch.Tensor]]:
    """What each printed, and the parameters that it ended with."""
    results = []
    for source in sources:
        names = what_is_yours()
        names |= {"DistributedDataParallel": nn.parallel.DistributedDataParallel, "dist": dist}
        names |= {"os": os, "regtopk": regtopk, "torch": torch, "loss": names["loss_function"]}
        first, *others = names["network"]
        deeper = nn.Sequential(first, nn.Linear(40, 40), nn.Linear(40, 40), *others)  # for eight fragments
        names["network"] = names["model"] = nn.Sequential(OrderedDict(blocks=deeper))
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
        printed = follow(source, names, folder)
        results.append((printed, nn.utils.parameters_to_vector(names["network"].parameters()).detach()))
    return results


def test_the_readmes_diffs_run(two_ranks: Ranks, tmp_path: Path) -> None:
    diffs = blocks(README, "diff")
    assert [sum(line.startswith("+") for line in diff.splitlines()) for diff in diffs] == [3, 7]
    (before, attached), (_, updates) = map(sides_of, diffs)
    loop = re.sub(r"optimizer\.(\w+)\(\)", r"muon.\1(); adamw.\1()", attached[attached.index("for x, y") :])
    updates = re.sub(r"^\.\.\. .*$", loop, updates, flags=re.M)
    assert updates.index("for x, y") < updates.index("exchange.finish()")
    here, elsewhere = two_ranks.run(follow_readme, [before, attached, updates], tmp_path)
    assert [printed[:39] for printed, _ in here] == [
        "",
        "consensus: 8 steps on 2 workers; this r",
        "topk: after 8 steps, 1 round on 2 worke",
    ]
    for (_, parameters), (_, parameters_elsewhere) in zip(here[1:], elsewhere[1:], strict=True):
        assert torch.equal(parameters, parameters_elsewhere) and not torch.equal(parameters, here[0][1])


def test_the_ways_from_other_tools_run(two_ranks: Ranks, tmp_path: Path) -> None:
    *hooks, diloco = (sides_of(diff)[1] for diff in blocks(MIGRATION, "diff"))
    step = "for x, y in loader: loss(model(x), y).backward()\nprint(exchange.summary())\n"
    wrapped = "model = DistributedDataParallel(model)\n"
    adamw = "adamw = torch.optim.AdamW(model.parameters())\n"
    sources = [*(f"{wrapped}{hook}{step}" for hook in hooks), f"{adamw}{diloco}{step}exchange.finish()\n"]
    here, _ = two_ranks.run(follow_readme, sources, tmp_path)
    assert [printed.split(":")[0] for printed, _ in here] == ["consensus", "consensus", "dense"]


TORCHRUN = ["torchrun", "--nproc_per_node", "2"]


def run_command(words: list[str], folder: Path) -> str:
    """`python SCRIPT` in this process, and `torchrun SCRIPT` on two ranks that are started quickly."""
    if words[0] == "python":
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(folder / words[1]))
        return printed.getvalue()
    assert words[:3] == TORCHRUN
    with Ranks(2) as ranks:
        first, second = ranks.run_script(folder / words[3], *words[4:])
    assert second == ""
    return first


def test_the_tutorial_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    cells = json.loads(TUTORIAL.read_text(encoding="utf-8"))["cells"]
    try:
        printed = run_cells(cells, tmp_path, lambda words: run_command(words, tmp_path))
    finally:
        sys.modules.pop("digits", None)
    outputs = [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]
    shown = ["".join(output["text"]) for each in outputs for output in each]
    assert [without_numbers(text) for text in printed if text] == [without_numbers(text) for text in shown]
    accuracies = [float(found) for found in re.findall(r"([\d.]+) % of the test digits", "".join(printed))]
    assert len(accuracies) == 5 and min(accuracies) > 70, accuracies
    dense_s, sparse_s = (float(found) for found in re.findall(r"take ([\d.]+) s more", "".join(printed)))
    assert 0 < sparse_s < dense_s / 100
    assert [text.splitlines()[0] for text in printed[-2:]] == ["begins at step 0", "begins at step 60"]


def without_numbers(text: str) -> str:
    """What does not depend on the machine: a summary also names a rank that is slow, if there is one."""
    return re.sub(r"\d[\d.]*( [kM]?B)?", "#", re.sub(r"  slowest .*\n", "", text))
