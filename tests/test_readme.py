"""The Python code of the README and of the guides runs, and prints what they say."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```(python|text)\n(.*?)```", flags=re.DOTALL)


def run_page(page: Path) -> list[tuple[str, str]]:
    """Run the page's Python blocks in order, in one namespace: what they printed, and what is shown."""
    names: dict[str, Any] = {"__name__": "page"}
    pairs = []
    printed = ""
    for language, content in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "text":
            pairs.append((printed, content))
            continue
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            exec(compile(content, str(page), "exec"), names)
        printed = stdout.getvalue()
    return pairs


@pytest.mark.parametrize("page", ["README.md", "docs/add-an-algorithm.md"])
def test_code_prints_what_the_page_shows(page: str) -> None:
    pairs = run_page(ROOT / page)
    assert pairs
    for printed, shown in pairs:
        assert printed == shown


def test_a_page_that_is_wrong_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    assert run_page(page) == [("1\n", "2\n")]
