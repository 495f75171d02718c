import pytest

from regtopk import Consensus, TopK
from tools.catalogue import PAGE, ask, catalogue, describe, use_of


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == catalogue(), "run python tools/catalogue.py"


def test_facts_are_asked_for() -> None:
    facts = ask(Consensus(density=0.001))
    assert facts.requests == ["Gather", "DenseSum"] and facts.num_rounds == 3
    assert "residual" in facts.fields


def test_a_section_holds_equations_and_state() -> None:
    section = describe("topk")
    assert section.startswith("## topk\n")
    assert "a_n = e_n + g_n" in section and "**Keeps**: residual (weighted sum)" in section
    assert section.count("Use it for") == 1


def test_differences_and_checks_are_points_of_their_own() -> None:
    points = [line for line in describe("strom").splitlines() if line.startswith("- ")]
    assert [point.split()[1] for point in points[-2:]] == ["Differs", "Checked"]
    assert "Differs from" not in describe("hard-threshold")
    assert "\n- Checked against the authors' loop" in describe("hard-threshold")


def test_an_algorithm_must_say_what_to_use_it_for() -> None:
    class Silent(TopK):
        """Top-k again."""

    with pytest.raises(ValueError, match=r"^the docstring of Silent must have a paragraph 'Use it for: ...'"):
        use_of(Silent)
