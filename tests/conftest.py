"""What tests of several folders need."""

import argparse
import gc
import inspect
import os
import signal
import tempfile
from collections.abc import Iterator

import pytest

# What the command prints depends on these; tests expect a terminal as it is without them.
_OF_TERMINALS = "COLUMNS LINES NO_COLOR FORCE_COLOR PY_COLORS GITHUB_ACTIONS TTY_COMPATIBLE TTY_INTERACTIVE"
for _name in _OF_TERMINALS.split():
    os.environ.pop(_name, None)
os.environ["TERM"] = "xterm"  # not dumb: rich draws no progress bar there

# The suite's parts share the cores: torch has one thread in each, and idle ones sleep.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

gc.disable()  # until all tests are imported: next to nothing of that is garbage

if len(tempfile.gettempdir()) > 70:  # a socket's path is 103 at most, and multiprocessing adds about 32
    tempfile.tempdir = "/tmp"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that the test starts take SIGINT: a background shell ignores it, and so would they."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs have a page without figures, which take a second to draw."""
    monkeypatch.setattr("regtopk.lab.report.page.draw_files", lambda *_: None)
    monkeypatch.setattr("regtopk.lab.report.page.draw_inline", lambda *_, **__: "")


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file that language models are trained on."""
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text(inspect.getsource(argparse)[:30_000])
    return str(path)


def pytest_collection_finish() -> None:
    """What is there by now never goes: garbage is looked for among the rest alone."""
    gc.freeze()
    gc.enable()
