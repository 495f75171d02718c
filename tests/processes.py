"""Processes that tests start, and that end with them: a test that fails leaves none behind for the next."""

import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def ended(process: "subprocess.Popen[str]") -> Iterator["subprocess.Popen[str]"]:
    """The process, ended and reaped with its pipes closed, however the block is left."""
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()  # first: torchrun's ranks are in sessions of their own, and it ends them
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()


def run_all(commands: Sequence[Sequence[str]], folder: Path, timeout_s: float = 300) -> list[str]:
    """What each of the commands prints, run side by side; the first that fails is shown and ends the others.

    Not one after another: launchers that work together wait minutes for one that has failed.
    """
    printed = [folder / f"printed-{number}" for number in range(len(commands))]
    said = [folder / f"said-{number}" for number in range(len(commands))]
    with ExitStack() as stack:
        running = []
        for words, out, err in zip(commands, printed, said, strict=True):
            with out.open("w") as stdout, err.open("w") as stderr:
                process = subprocess.Popen(words, stdout=stdout, stderr=stderr, text=True)
            running.append(stack.enter_context(ended(process)))
        deadline = time.monotonic() + timeout_s
        while None in (codes := [process.poll() for process in running]):
            for code, err in zip(codes, said, strict=True):
                assert not code, err.read_text()
            assert time.monotonic() < deadline, "\n".join(err.read_text() for err in said)
            time.sleep(0.05)
        for process, err in zip(running, said, strict=True):
            assert process.returncode == 0, err.read_text()
    return [out.read_text() for out in printed]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port
