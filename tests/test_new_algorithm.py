"""A new algorithm is one file and its entry in one list.

The algorithm of docs/add-an-algorithm.md is added to a copy of the library as the guide says. Everything
that goes over all algorithms must then work with it, with no further change.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs Python with a copy of the library that has the guide's algorithm, and returns what it prints."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "src" / "regtopk", folder / "src" / "regtopk")
    shutil.copytree(ROOT / "tools", folder / "tools")
    guide = (ROOT / "docs" / "add-an-algorithm.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)[0]
    algorithms = folder / "src" / "regtopk" / "algorithms"
    (algorithms / "round_robin.py").write_text(f'"""Round robin: the entries in turn."""\n\n{code}')
    table = algorithms / "__init__.py"
    before, listed, after = table.read_text(encoding="utf-8").partition('"GlobalTopK",\n')
    head, line, rest = before.partition("from regtopk.core import")
    imported = "from regtopk.algorithms.round_robin import RoundRobin\n"
    table.write_text(f'{head}{imported}{line}{rest}{listed}    "RoundRobin",\n{after}', encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}

    def run(*arguments: str, cwd: Path = folder) -> str:
        command = [sys.executable, *arguments]
        answer = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return answer.stdout

    return run


def test_it_is_exported_and_in_the_catalogue(run: Run) -> None:
    code = """
import regtopk, tools.catalogue
assert list(regtopk.ALGORITHMS.items())[-1] == ("round-robin", regtopk.RoundRobin)
print(tools.catalogue.describe("round-robin"))
"""
    assert run("-c", code).startswith("## round-robin\n\n`RoundRobin`: Send the entries in turn.")


def test_it_keeps_the_contract(run: Run) -> None:
    tests = "tests/algorithms/test_contract.py"
    printed = run("-m", "pytest", "-q", "-p", "no:cacheprovider", tests, "-k", "round-robin", cwd=ROOT)
    assert int(re.findall(r"(\d+) passed", printed)[0]) > 30
