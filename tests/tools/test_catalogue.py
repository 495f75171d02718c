import pytest

from regtopk import TopK
from tools.catalogue import PAGE, catalogue, describe, use_of


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == catalogue(), "run python tools/catalogue.py"


def test_a_section_holds_equations_options_and_differences() -> None:
    section = describe("ef21")
    assert section.startswith("## ef21\n\n`EF21`: ")
    assert "h_n := h_n + c_n" in section
    assert "- `eta=1.0`: weight of the new gradient in the running mean, in (0, 1]." in section
    assert section.endswith(
        "Differs from the paper: h and v start at zero, not at a first gradient sent in full.\n"
    )


def test_an_algorithm_must_say_what_to_use_it_for() -> None:
    class Silent(TopK):
        """Top-k again."""

    with pytest.raises(ValueError, match=r"^the docstring of Silent must have a paragraph 'Use it for: ...'"):
        use_of(Silent)
