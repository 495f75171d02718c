"""The guide's scripts for other frameworks, run by two ranks, killed, and run again."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.distributed.ranks import Ranks

GUIDE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
# what each rank ends with, as a line of its own
TELL = """
import hashlib, torch
_bits = b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in {model}.state_dict().values())
print("bits", hashlib.sha256(_bits).hexdigest())
"""
DIE = """
def _die(rank):
    if rank == 1:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
"""


def needs(package: str, extra: str) -> pytest.MarkDecorator:
    """Skip tests where a package is missing; it is looked for, not imported."""
    reason = f"{package} is not installed: pip install 'regtopk[{extra}]', or make test-integrations"
    return pytest.mark.skipif(find_spec(package) is None, reason=reason)


def script_of(framework: str) -> str:
    """The guide's script."""
    (source,) = re.findall(rf"```python {framework}\n(.*?)```", GUIDE, flags=re.DOTALL)
    assert isinstance(source, str)
    return source


def replaced(source: str, old: str, new: str) -> str:
    """The source with one part replaced, which must be there."""
    assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
    return source.replace(old, new)


def run(ranks: Ranks, source: str, folder: Path) -> list[str]:
    """What each rank prints."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(source, encoding="utf-8")
    with ranks:  # which no other function may follow
        return ranks.run_script(folder / "train.py", timeout_s=300)


def bits_of(printed: list[str]) -> list[str]:
    """What the ranks ended with."""
    return [line for text in printed for line in text.splitlines() if line.startswith("bits ")]


def run_and_kill(ranks: Ranks, source: str, deadly: str, folder: Path) -> list[str]:
    """What each rank prints in the end, if rank 1 is killed at first."""
    try:
        run(ranks, deadly, folder)
    except (AssertionError, EOFError, OSError) as error:  # a rank is gone, or the other has noticed
        assert "rank 0" in str(error) or not isinstance(error, AssertionError), error
    else:
        raise AssertionError("no rank was killed")
    return run(ranks, source, folder)
