"""Tables in docs/deep-networks.md are those of the recorded runs."""

from pathlib import Path

import pytest

from tools.tables import as_markdown

DOCS = Path(__file__).parents[2] / "docs"
FOLDERS = sorted(path.parent for path in DOCS.glob("results/fig3-*/summary.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_document_holds_the_recorded_table(folder: Path) -> None:
    # python tools/tables.py docs/results/FOLDER
    assert as_markdown(folder) in (DOCS / "deep-networks.md").read_text(encoding="utf-8")


def test_some_runs_are_recorded() -> None:
    assert FOLDERS
