from pathlib import Path

from regtopk.algorithms import ALGORITHMS, Consensus
from regtopk.report.catalogue import WHEN, ask, catalogue, describe

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_every_algorithm_says_when_to_use_it() -> None:
    assert list(WHEN) == list(ALGORITHMS)


def test_the_page_is_up_to_date() -> None:
    # python -m regtopk.report.catalogue > docs/algorithms.md
    assert PAGE.read_text(encoding="utf-8") == catalogue()


def test_facts_are_asked_for() -> None:
    facts = ask(Consensus(density=0.001))
    assert facts.requests == ["Gather", "DenseSum"] and facts.num_rounds == 3
    assert "residual" in facts.fields


def test_a_section_holds_equations_and_state() -> None:
    section = describe("topk")
    assert section.startswith("## topk\n")
    assert "a_n = e_n + g_n" in section and "**Keeps**: residual (weighted sum)" in section
