"""A new algorithm is one file and its entry in one list.

The algorithm of docs/add-an-algorithm.md is added to a copy of the library as the guide says. Everything
that goes over all algorithms must then work with it, with no further change.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


class Copy:
    """A copy of the library to which the guide's algorithm was added."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
        shutil.copytree(ROOT / "src" / "regtopk", folder / "src" / "regtopk")
        shutil.copytree(ROOT / "tools", folder / "tools")
        guide = (ROOT / "docs" / "add-an-algorithm.md").read_text(encoding="utf-8")
        code = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)[0]
        algorithms = folder / "src" / "regtopk" / "algorithms"
        (algorithms / "round_robin.py").write_text(f'"""Round robin: the entries in turn."""\n\n{code}')
        table = algorithms / "__init__.py"
        imported = "from regtopk.algorithms.round_robin import RoundRobin\n"
        before, listed, after = table.read_text(encoding="utf-8").partition('"GlobalTopK",\n')
        assert listed
        head, line, rest = before.partition("from regtopk.core import")
        table.write_text(f'{head}{imported}{line}{rest}{listed}    "RoundRobin",\n{after}', encoding="utf-8")

    def run(self, *arguments: str, cwd: Path | None = None) -> str:
        """What Python prints with these arguments and the copy's library; a failure fails the test."""
        answer = subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd or self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return answer.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("copy"))


def test_it_is_exported_and_in_the_catalogue(copy: Copy) -> None:
    code = """
import regtopk, tools.catalogue
assert list(regtopk.ALGORITHMS.items())[-1] == ("round-robin", regtopk.RoundRobin)
print(regtopk.__file__)
print(tools.catalogue.describe("round-robin"))
"""
    file, _, section = copy.run("-c", code).partition("\n")
    assert Path(file).is_relative_to(copy.folder)
    assert section.startswith("## round-robin\n\n`RoundRobin`: Send the entries in turn.")


def test_it_keeps_the_contract(copy: Copy) -> None:
    tests = "tests/algorithms/test_contract.py"
    printed = copy.run("-m", "pytest", "-q", "-p", "no:cacheprovider", tests, "-k", "round-robin", cwd=ROOT)
    assert int(re.findall(r"(\d+) passed", printed)[0]) > 30
