"""The documentation is complete in its index, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

import regtopk

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*/*.md")]
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    """A page without its blocks of code, which may hold what looks like headings and links."""
    return CODE.sub("", page.read_text(encoding="utf-8"))


def anchors_of(page: Path) -> set[str]:
    """The names that GitHub and the site give to headings: in lower case, without signs, with hyphens."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    names = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    before = [names[:place].count(name) for place, name in enumerate(names)]
    return {f"{name}-{count}" if count else name for name, count in zip(names, before, strict=True)}


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", text_of(page)):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        if not linked.exists() or (anchor and anchor not in anchors_of(linked)):
            broken.append(target)
    return broken


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / path).resolve() for path in re.findall(r"\]\(([\w/.-]+\.md)\)", text_of(index))}
    assert linked == set(PAGES) - {index}


def test_the_reference_has_every_public_name() -> None:
    reference = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = set(re.findall(r":: (?:regtopk\.)?(?:algorithms\.)?(\w+)$", reference, re.MULTILINE))
    in_the_text = {"__version__", "ALGORITHMS", "RegtopkError"}  # the last is one of regtopk.errors
    assert set(regtopk.__all__) - in_the_text <= shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One `name`, and more\n# Twice\n# Twice\n")
    page = tmp_path / "page.md"
    good, bad = ["other.md#one-name-and-more", "other.md#twice-1"], ["#none", "gone.md", "other.md#none"]
    page.write_text(" ".join(f"[text]({target})" for target in good + bad))
    assert broken_links(page) == bad
