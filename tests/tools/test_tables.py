"""Tables in docs/deep-networks.md are those of the recorded runs."""

from dataclasses import fields
from pathlib import Path

import pytest

from regtopk.lab.experiments.paper.fig3_config import DeepConfig
from tools.tables import as_markdown

DOCS = Path(__file__).parents[2] / "docs"
FOLDERS = sorted(path.parent for path in DOCS.glob("results/fig3-*/summary.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_document_holds_the_recorded_table(folder: Path) -> None:
    # python tools/tables.py docs/results/FOLDER
    assert as_markdown(folder) in (DOCS / "deep-networks.md").read_text(encoding="utf-8")


def test_some_runs_are_recorded() -> None:
    assert FOLDERS


def test_the_document_names_every_setting() -> None:
    text = (DOCS / "deep-networks.md").read_text(encoding="utf-8")
    names = [field.name for field in fields(DeepConfig)]
    assert [name for name in names if f"| `{name}` |" not in text and f"--{name}" not in text] == []
