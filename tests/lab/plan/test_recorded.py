"""The planner against recorded step times on shaped links: nothing is timed here."""

from pathlib import Path

import pytest

from benchmarks.slow_network import against_plan

PAGE = Path(__file__).parents[2] / "docs" / "when-it-pays.md"
ROWS = against_plan.compare()


def describe(row: dict[str, object]) -> str:
    link = row["bandwidth_bits_per_s"] or "unshaped"
    return (
        f"{row['workers']}-{link}-{row['latency_s']}-{row['method']}-{row['value_code']}-{row['collective']}"
    )


@pytest.mark.parametrize("row", ROWS, ids=describe)
def test_predicted_within_30_percent(row: dict[str, float]) -> None:
    assert row["predicted_s"] == pytest.approx(row["step_s"], rel=0.3)


def test_all_links_and_methods_were_measured() -> None:
    assert {row["workers"] for row in ROWS} == {2, 4}
    assert {row["bandwidth_bits_per_s"] for row in ROWS} == {1e7, 1e8, 1e9, None}
    assert {row["method"] for row in ROWS} >= {
        "dense",
        "fp16",
        "powersgd",
        "peer-topk",
        "topk",
        "regtopk",
        "dgc",
    }


def test_the_page_shows_what_was_recorded() -> None:
    page = PAGE.read_text(encoding="utf-8")
    blocks = against_plan.tables(ROWS)
    assert set(against_plan.BLOCK.findall(page)) == set(blocks)
    assert against_plan.put_into(page, blocks) == page, (
        "python -m benchmarks.slow_network.against_plan --into docs/when-it-pays.md"
    )
