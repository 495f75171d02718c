"""What tests ask of the machine: processes that end with the test, a port, and a disk that is full."""

import resource
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


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
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def no_file_longer_than(num_bytes: int) -> Iterator[None]:
    """What a full disk does: a write fails in the middle."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
