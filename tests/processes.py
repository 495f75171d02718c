"""What tests ask of the machine: processes that end with the test, a port, a full disk; checks by hand."""

import resource
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


def passes(name: str, check: Callable[[], Any]) -> bool:
    """Run a check without pytest, and print how it ended."""
    began = time.monotonic()
    try:
        check()
    except Exception:  # what fails is shown, and the others run
        traceback.print_exc()
        print(f"FAIL  {name}", flush=True)
        return False
    print(f"pass  {name}, {time.monotonic() - began:.1f} s", flush=True)
    return True


@contextmanager
def no_file_longer_than(num_bytes: int) -> Iterator[None]:
    """What a full disk does: a write fails in the middle."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
