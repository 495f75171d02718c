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

ROOT = Path(__file__).parents[1]
CODE = """
import sys
import pytest, regtopk, tools.catalogue
assert list(regtopk.ALGORITHMS.items())[-1] == ("round-robin", regtopk.RoundRobin)
print(tools.catalogue.describe("round-robin"))
words = "-q -p no:cacheprovider tests/algorithms/test_contract.py -k round-robin"
sys.exit(pytest.main(words.split()))
"""


def test_it_is_exported_in_the_catalogue_and_keeps_the_contract(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src" / "regtopk", tmp_path / "regtopk")
    guide = (ROOT / "docs" / "add-an-algorithm.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)[0]
    algorithms = tmp_path / "regtopk" / "algorithms"
    (algorithms / "round_robin.py").write_text(f'"""Round robin: the entries in turn."""\n\n{code}')
    table = algorithms / "__init__.py"
    before, listed, after = table.read_text(encoding="utf-8").partition('"GlobalTopK",\n')
    head, line, rest = before.partition("from regtopk.core import")
    imported = "from regtopk.algorithms.round_robin import RoundRobin\n"
    table.write_text(f'{head}{imported}{line}{rest}{listed}    "RoundRobin",\n{after}', encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", CODE]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.startswith("## round-robin\n\n`RoundRobin`: Send the entries in turn.")
    assert int(re.findall(r"(\d+) passed", answer.stdout)[0]) > 30
