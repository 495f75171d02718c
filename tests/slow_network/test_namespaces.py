"""Namespaces and links are made, shaped and removed; nothing else is touched."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.slow_network.__main__ import main
from benchmarks.slow_network.links import KernelLinks, links_of, why_no_kernel_links
from benchmarks.slow_network.namespaces import PREFIX, Namespaces, command, existing, left_behind
from tests.processes import ended

# a container's root may lack the right, a kernel the modules
reason = why_no_kernel_links(latency_s=0.0)
needs_namespaces: Callable[..., Any] = pytest.mark.skipif(reason is not None, reason=str(reason))
REPOSITORY = Path(__file__).parents[2]
ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listening", flush=True)
    caller, _ = server.accept()
    while said := caller.recv(100):
        caller.sendall(said)
"""
CALL = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as caller:
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    start = time.perf_counter()
    caller.sendall(b"?")
    assert caller.recv(1) == b"?"
    print(time.perf_counter() - start)
"""


def interfaces() -> set[str]:
    """The host's own network interfaces."""
    return {line.split(": ")[1] for line in command("ip", "-o", "link").splitlines()}


def own() -> list[str]:
    """The namespaces of this process."""
    return [name for name in existing() if name.startswith(f"{PREFIX}-{os.getpid()}-")]


def round_trip_s(namespaces: Namespaces) -> float:
    """How long the first worker waits for an echo from the second."""
    inside = [["ip", "netns", "exec", worker, sys.executable, "-c"] for worker in namespaces.workers]
    address = namespaces.address(1)
    with ended(subprocess.Popen([*inside[1], ECHO, address], stdout=subprocess.PIPE, text=True)) as echo:
        assert echo.stdout is not None and echo.stdout.readline() == "listening\n"
        call = subprocess.run([*inside[0], CALL, address], capture_output=True, text=True, check=True)
    return float(call.stdout)


@needs_namespaces
def test_links_are_shaped_and_removed() -> None:
    before = interfaces()
    with links_of(2, shaper="tc") as links:
        assert isinstance(links, KernelLinks) and len(own()) == 3
        for bandwidth in (1e8, None, 1e7):
            links.shape(bandwidth)
            for worker in links.namespaces.workers:
                shown = command("tc", "-n", worker, "qdisc", "show", "dev", "eth0")
                assert ("tbf" in shown) == (bandwidth is not None)
        for rank in range(2):
            shown = command("tc", "-n", links.namespaces.switch, "qdisc", "show", "dev", f"port{rank}")
            assert "rate 10Mbit" in shown
        assert round_trip_s(links.namespaces) > 0
        assert interfaces() == before
    assert own() == [] and interfaces() == before


@needs_namespaces
def test_clean_removes_dead_runs_only(capsys: pytest.CaptureFixture[str]) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    dead, other = f"{PREFIX}-{gone.pid}-0", f"regtopk-test-{os.getpid()}"
    with links_of(2, shaper="tc"):
        command("ip", "netns", "add", dead)
        command("ip", "netns", "add", other)
        sleep = ["ip", "netns", "exec", dead, "sleep", "1000"]
        try:
            with ended(subprocess.Popen(sleep, start_new_session=True, text=True)) as lost:
                while not _is_used(dead):  # `ip` has not entered it yet, and would be missed
                    time.sleep(0.05)
                assert dead in left_behind()
                assert main(["clean"]) == 0
                assert dead in capsys.readouterr().out
                assert dead not in existing() and len(own()) == 3
                assert lost.wait() == -signal.SIGTERM
            assert other in command("ip", "netns", "list")
        finally:
            command("ip", "netns", "del", other)


@needs_namespaces
def test_a_signal_removes_what_was_made() -> None:
    """SIGTERM, which takes the way of Ctrl-C after a handler of its own."""
    words = [sys.executable, "-m", "benchmarks.slow_network", "steps", "--workers", "2", "--shaper", "tc"]
    with ended(
        subprocess.Popen(
            [*words, "--model", "small"],
            cwd=REPOSITORY,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    ) as run:
        mine = f"{PREFIX}-{run.pid}-"
        while run.poll() is None and not any(_is_used(name) for name in existing() if name.startswith(mine)):
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        said = run.communicate()[1]
    assert run.returncode == 130
    assert said.endswith("interrupted; the namespaces are removed\n")
    assert not [name for name in existing() if name.startswith(mine)]


def _is_used(name: str) -> bool:
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    return bool(done.stdout.strip())
