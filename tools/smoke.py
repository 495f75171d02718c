"""Does an installed regtopk work, with the extras that are there, and name those that are not?

    python -I smoke.py VERSION EXTRA

in an empty folder of an empty environment, which `python -m tools.check_release` makes. What the extra brings
must be there; an empty EXTRA stands for none.
"""

import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from platform import machine

import torch
import torch._dynamo  # here once; DDP would import it on each rank
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import regtopk
from regtopk import kernels
from regtopk.errors import MissingExtraError
from regtopk.lab.experiments.data.images import load_images

EXTRAS = {  # what each must bring, as it is imported
    "cli": "rich typer",
    "plots": "matplotlib",
    "experiments": "PIL sklearn",
    "kernels": "numba",
    "text": "tokenizers",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "huggingface": "accelerate transformers",
    "ray": "ray.train",
    "integrations": "accelerate lightning ray.train transformers",
    "torchft": "torchft",
    "docs": "furo myst_parser sphinx",
    "flower": "flwr",
    "all": "PIL matplotlib numba rich sklearn typer",
    "dev": "accelerate hypothesis lightning mypy pre_commit pytest ruff tokenizers zstandard",
}
INTEGRATIONS = {
    "huggingface": ("transformers", "regtopk.integrations.huggingface"),
    "lightning": ("lightning", "regtopk.integrations.lightning"),
    "torchft": ("torchft", "regtopk.integrations.torchft"),
    "flower": ("flwr", "regtopk.integrations.flower.app"),
}
IS_EMPTY = {  # extras that bring nothing where there is no wheel, as pyproject.toml says
    "torchft": (sys.platform, machine()) != ("linux", "x86_64") or sys.version_info >= (3, 14),
    "flower": sys.version_info < (3, 11),
}


def is_there(*packages: str) -> bool:
    """Whether all of them can be imported."""
    return all(find_spec(package) for package in packages)


def train_on_rank(rank: int, folder: str) -> None:
    """Three steps of DDP on two ranks, with a sparse exchange."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(100, 100))
    exchange = regtopk.attach(model, regtopk.Consensus(density=0.01, value_code="4bit"))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 100)).square().mean().backward()
        optimizer.step()
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    if rank == 0:
        print(exchange.summary())
    exchange.close()
    del model
    dist.destroy_process_group()


def check_command(version: str) -> None:
    """The command prints its version and trains, or says in one line what is missing."""
    command = str(Path(sys.executable).with_name("regtopk"))
    shown = subprocess.run([command, "--version"], capture_output=True, text=True)
    assert (shown.returncode, shown.stdout) == (0, f"regtopk {version}\n"), shown
    trained = subprocess.run([command, "train", "--steps", "5"], capture_output=True, text=True)
    if is_there("sklearn", "matplotlib"):
        assert trained.returncode == 0 and list(Path().glob("out/*/index.html")), trained
    else:
        is_command = is_there("typer", "rich")
        extra = "plots" if is_command and is_there("sklearn") else "experiments" if is_command else "all"
        assert trained.returncode == 2, trained
        assert f"pip install 'regtopk[{extra}]'" in trained.stderr.splitlines()[-1], trained


def check_modules() -> None:
    """What needs a package that is there works; else it names the extra."""
    for extra, (package, module) in INTEGRATIONS.items():
        if is_there(package):
            import_module(module)
        else:
            assert f"pip install 'regtopk[{extra}]'" in refusal(partial(import_module, module))
    if is_there("sklearn"):
        load_images("digits", None, "cpu")
    else:
        assert "pip install 'regtopk[experiments]'" in refusal(partial(load_images, "digits", None, "cpu"))
    choice = kernels.describe("cpu")
    expected = "numba" if is_there("numba") else "pip install 'regtopk[kernels]'"
    assert expected in choice.reason and (choice.kernel == "cpu") == is_there("numba"), choice


def refusal(call: Callable[[], object]) -> str:
    """What the call is refused with."""
    try:
        call()
    except MissingExtraError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def main(version: str, extra: str) -> None:
    """Check all that is there; end with the first failure."""
    assert regtopk.__version__ == version, regtopk.__version__
    assert "site-packages" in Path(regtopk.__file__).parts, regtopk.__file__
    if IS_EMPTY.get(extra):
        print(f"{extra} has no wheel for this platform")
    elif extra:
        for package in EXTRAS[extra].split():
            import_module(package)
    multiprocessing.set_forkserver_preload(["regtopk", "torch._dynamo"])  # which has no threads yet
    start_processes(train_on_rank, (str(Path.cwd()),), nprocs=2, start_method="forkserver")
    check_command(version)
    check_modules()


if __name__ == "__main__":
    main(*sys.argv[1:])
