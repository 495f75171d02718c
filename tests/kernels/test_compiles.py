"""The Triton programs compile for a GPU, on any machine."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROGRAMS = "regtopk.kernels.cuda.programs"
# what programs call, and nobody launches
PARTS = {
    "key_of", "lead_of", "start_of", "is_enough", "next_prefix", "leading_bits_of_rank", "offset_of_sample",
    "count_below", "key_of_sample", "first_of_tile", "load_damped", "put", "exchange", "bounds_of",
    "load_tile", "store_tile", "keys_of",
}  # fmt: skip


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton's compiler is for Linux")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests on the GPU compile them too")
def test_every_program_compiles(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.kernels.compile_for_gpu"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = import_module(PROGRAMS).__path__
    modules = [import_module(f"{PROGRAMS}.{module.name}") for module in iter_modules(folder)]
    programs = {
        name
        for module in modules
        for name, value in vars(module).items()
        if hasattr(value, "arg_names") and not name.startswith("_")
    }
    assert programs - PARTS == set(done.stdout.split())
