"""docs/federated.md shows the example as it is, and what was measured."""

import json
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_code_on_the_page_is_that_of_the_example() -> None:
    page = (ROOT / "docs/federated.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "examples/flower").rglob("*.py")]
    assert len(blocks) == 2
    for block in blocks:
        assert any(block in file for file in files), block


def test_accuracies_on_the_page_are_those_recorded() -> None:
    page = (ROOT / "docs/federated.md").read_text(encoding="utf-8")
    runs = json.loads((ROOT / "benchmarks/results/federated.json").read_text(encoding="utf-8"))["claiming"]
    for method in {run["method"] for run in runs}:
        found = [run["test"] for run in runs if run["method"] == method]
        mean, spread = statistics.mean(found), statistics.stdev(found)
        extent = f"{min(found):.1f} to {max(found):.1f}"
        (lr,) = {run["lr"] for run in runs if run["method"] == method}
        assert f"| {method} | {lr} | {mean:.1f} ± {spread:.1f} ({extent}) |" in page
    for num_rounds in (28, 6):
        file = ROOT / f"benchmarks/results/federated-fedavg-{num_rounds}-rounds.json"
        found = [run["test"] for run in json.loads(file.read_text(encoding="utf-8"))["claiming"]]
        mean, spread = statistics.mean(found), statistics.stdev(found)
        assert f"| {mean:.1f} ± {spread:.1f} in {num_rounds} rounds |" in page
