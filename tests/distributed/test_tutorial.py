"""The tutorial's cells run in their order, and print what it shows but for the numbers."""

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.distributed.ranks import Ranks
from tools.notebook import TUTORIAL, run_cells

TORCHRUN = ["torchrun", "--nproc_per_node", "2"]


def run_command(words: list[str], folder: Path) -> str:
    """`python SCRIPT` in this process, and `torchrun SCRIPT` on two ranks that are started quickly."""
    if words[0] == "python":
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(folder / words[1]))
        return printed.getvalue()
    assert words[:3] == TORCHRUN
    ranks = Ranks(2)
    try:
        first, second = ranks.run_script(folder / words[3], *words[4:])
    finally:
        ranks.stop()
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
