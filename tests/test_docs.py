"""The documentation is complete in its index, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def test_the_index_names_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs/README.md").read_text(encoding="utf-8")))
    assert linked == {path.name for path in ROOT.glob("docs/*.md")} - {"README.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []
