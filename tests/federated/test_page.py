"""docs/federated.md shows the example as it is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_code_on_the_page_is_that_of_the_example() -> None:
    page = (ROOT / "docs/federated.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "examples/flower").rglob("*.py")]
    assert len(blocks) == 2
    for block in blocks:
        assert any(block in file for file in files), block
