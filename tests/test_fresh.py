"""What only a fresh process shows: what the library brings along, and what a kernel's first call does."""

import json
import subprocess
import sys
from typing import Any

import pytest

EXTRAS = [
    *("typer", "rich", "matplotlib", "sklearn", "numba", "scipy", "pandas", "PIL", "torchft", "flwr"),
    *("triton", "accelerate", "lightning", "ray", "tokenizers", "transformers"),
]
CODE = """
import json, sys, numpy, torch
before = set(sys.modules)
import regtopk
imported = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
from regtopk.kernels.cpu import selection as cpu
threads = []
for wanted in (1, 2, 3):
    torch.set_num_threads(wanted)
    cpu.take_largest_(torch.randn(1 << 18), torch.randn(1 << 18), 100)
    torch.randn(1 << 18).add_(1)
    threads.append(torch.get_num_threads())
print(json.dumps({"imported": imported, "threads": threads}))
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """One process for both tests: it takes seconds to import torch."""
    answer = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def test_plain_import_brings_no_extra(seen: dict[str, Any]) -> None:
    assert "regtopk" in seen["imported"]
    assert set(seen["imported"]) & set(EXTRAS) == set()


def test_the_first_call_leaves_torchs_number_of_threads_alone(seen: dict[str, Any]) -> None:
    assert seen["threads"] == [1, 2, 3]
