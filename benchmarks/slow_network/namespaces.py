"""Network namespaces joined by a switch: N machines of their own, as far as the network goes.

    namespace NAME-0 [eth0] ---- [port0]
    namespace NAME-1 [eth0] ---- [port1]  bridge "switch" in the namespace NAME-switch
    ...

Every interface lives in a namespace made here, so nothing of the host's own network is touched. Names carry
the process id, so runs do not meet, and what a killed run left behind can be told from what is in use.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

PREFIX = "regtopk-slow"
NAME = re.compile(rf"{PREFIX}-(\d+)-(switch|\d+)")
INTERFACE = "eth0"
PATIENCE_S = 5.0


class NetworkError(Exception):
    """The namespaces cannot be made; the message says what to install or do."""


def check_possible() -> None:
    """Refuse where namespaces cannot be made.

    Raises:
        NetworkError: not Linux, no iproute2, or not root.
    """
    if not os.path.isdir("/proc/self/ns"):
        raise NetworkError("network namespaces need Linux: run this on a Linux machine, virtual or not")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NetworkError(
            f"iproute2 is needed, but there is no {' and no '.join(missing)}: apt install iproute2 (Debian, "
            "Ubuntu), dnf install iproute iproute-tc (Fedora)"
        )
    if os.geteuid() != 0:
        raise NetworkError("making network namespaces needs root: run the same command with sudo")


def command(*words: str) -> str:
    """Run ip or tc; what it printed.

    Raises:
        NetworkError: it failed; with its own words.
    """
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip()
        hint = " (in a container: run it with --privileged)" if "not permitted" in said else ""
        raise NetworkError(f"{' '.join(words)} failed: {said}{hint}")
    return done.stdout


class Namespaces:
    """The namespaces of one run.

    Args:
        num_workers: how many, N; the switch has one more.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.name = f"{PREFIX}-{os.getpid()}"
        self.switch = f"{self.name}-switch"
        self.workers = [f"{self.name}-{rank}" for rank in range(num_workers)]

    def address(self, rank: int) -> str:
        """The IP address of a worker."""
        return f"10.77.{rank // 250}.{1 + rank % 250}"

    def add(self) -> None:
        """Make the namespaces and the switch; `connect` makes the links."""
        for name in (self.switch, *self.workers):
            command("ip", "netns", "add", name)
            command("ip", "-n", name, "link", "set", "dev", "lo", "up")
        command("ip", "-n", self.switch, "link", "add", "name", "switch", "type", "bridge")
        command("ip", "-n", self.switch, "link", "set", "dev", "switch", "up")

    def add_veth(self) -> None:
        """A pair of interfaces from every worker to the switch."""
        for rank, worker in enumerate(self.workers):
            ends = ("name", f"port{rank}", "type", "veth", "peer", "name", INTERFACE, "netns", worker)
            command("ip", "-n", self.switch, "link", "add", *ends)

    def connect(self) -> None:
        """Give every worker its address and plug it into the switch; both interfaces are there by now."""
        for rank, worker in enumerate(self.workers):
            command("ip", "-n", self.switch, "link", "set", "dev", f"port{rank}", "master", "switch", "up")
            command("ip", "-n", worker, "addr", "add", f"{self.address(rank)}/16", "dev", INTERFACE)
            command("ip", "-n", worker, "link", "set", "dev", INTERFACE, "up")

    def remove(self) -> None:
        """End what still runs in the namespaces, and remove those that are there."""
        remove([self.switch, *self.workers])


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that what it made is removed."""
    names = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, _interrupt) for number in names}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def existing() -> list[str]:
    """The names of all namespaces of such runs."""
    names = [line.split()[0] for line in command("ip", "netns", "list").splitlines() if line.strip()]
    return [name for name in names if NAME.fullmatch(name)]


def left_behind() -> list[str]:
    """Those whose run is no more."""
    return [name for name in existing() if not os.path.exists(f"/proc/{_process_of(name)}")]


def _process_of(name: str) -> str:
    match = NAME.fullmatch(name)
    assert match is not None
    return match.group(1)


def remove(names: Sequence[str]) -> None:
    """End the processes in namespaces made here, and remove the namespaces."""
    there = [name for name in existing() if name in names]
    for name in there:
        _end_processes(name)
    for name in there:
        command("ip", "netns", "del", name)


def _end_processes(name: str) -> None:
    """Ask everything that runs in a namespace to end, and insist a little later."""
    deadline = time.monotonic() + PATIENCE_S
    while pids := command("ip", "netns", "pids", name).split():
        number = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), number)
        time.sleep(0.1)
