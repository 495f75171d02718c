"""The table of jumps in docs/paper-vs-code.md is that of the recorded runs."""

from pathlib import Path

from tools.jumps import as_markdown

DOCS = Path(__file__).parents[2] / "docs"


def test_the_document_holds_the_recorded_table() -> None:
    # python tools/jumps.py docs/results/fig2-settings/*
    folders = sorted((DOCS / "results" / "fig2-settings").iterdir())
    assert len(folders) == 12
    assert as_markdown(folders) in (DOCS / "paper-vs-code.md").read_text(encoding="utf-8")


def test_a_row_says_who_follows_and_who_jumps() -> None:
    row = as_markdown([DOCS / "results" / "fig2-settings" / "20-float64-ours"]).splitlines()[-1]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:5] == ["20", "0.6", "half, zero", "float64", "0-9"]
    assert cells[5:] == ["10", "0", "0", "37 on 10", "10", "10", "10", "0"]


def test_unseen_seeds_stay_with_a_cap() -> None:
    folders = sorted((DOCS / "results" / "fig2-unseen").iterdir())
    rows = as_markdown(folders).splitlines()[2:]
    assert len(rows) == 12 and all(row.endswith("| 10 | 10 | 10 | 0 |") for row in rows)
