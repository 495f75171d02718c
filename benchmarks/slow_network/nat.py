"""Does training go through two routers that hide their machines, as those of homes do? By WireGuard.

    machine 0 [eth0 192.168.1.2] -- [home 192.168.1.1] router 0 [eth0 10.77.0.1] --+
    machine 1 [eth0 192.168.1.2] -- [home 192.168.1.1] router 1 [eth0 10.77.0.2] --+ switch

A router masquerades, and drops what nobody at home has asked for. Router 0 alone passes a port on, UDP 51820.
torchrun starts examples/train_elastic.py on both machines, as docs/wan.md says. After the first checkpoint
the link is dead for a while. The run must end with the bits of one on loopback.

    sudo .venv/bin/python -m benchmarks.slow_network.nat [--stall-s 20] [--timeout-s 300] [--out FILE]

It needs what `benchmarks.slow_network` does, and nftables and wireguard-tools; and wireguard-go where the
kernel has no WireGuard.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import failures
from benchmarks.slow_network.namespaces import (
    INTERFACE,
    Namespaces,
    NetworkError,
    check_possible,
    command,
    remove,
    signals_raise,
)
from regtopk.distributed.checkpoints.files import saves_in

ROUTER, MACHINE = "192.168.1.1", "192.168.1.2"
SURROUNDINGS = {
    "GLOO_SOCKET_IFNAME": "wg0",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "OMP_NUM_THREADS": "1",
}
WORDS = ("--updates", "--delay", "1", "--steps", "100", "--save-every", "20")
RULES = """
table ip nat {
    chain out {
        type nat hook postrouting priority srcnat
        oifname "eth0" masquerade
    }
}
table ip filter {
    chain pass {
        type filter hook forward priority filter; policy drop
        ct state established,related accept
        iifname "home" accept
        ct status dnat accept
    }
}
"""
PASSED_ON = """
table ip nat {
    chain in {
        type nat hook prerouting priority dstnat
        iifname "eth0" udp dport 51820 dnat to 192.168.1.2
    }
}
"""
TUNNELS = (
    """
[Interface]
Address = 10.9.0.1/24
ListenPort = 51820
PrivateKey = {private}

[Peer]
PublicKey = {public}
AllowedIPs = 10.9.0.2/32
""",
    """
[Interface]
Address = 10.9.0.2/24
PrivateKey = {private}

[Peer]
PublicKey = {public}
AllowedIPs = 10.9.0.1/32
Endpoint = 10.77.0.1:51820
PersistentKeepalive = 25
""",
)


class Homes:
    """Two machines, each behind a router of its own.

    Args:
        folder: for the files of nftables and WireGuard.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outside = Namespaces(2)  # the routers, and the internet between them
        self.machines = [f"{self.outside.name}-{number}" for number in (2, 3)]

    def add(self) -> None:
        """Make the routers and the machines; `join` makes the tunnel."""
        self.outside.add()
        self.outside.add_veth()
        self.outside.connect()
        for number, (router, machine) in enumerate(zip(self.outside.workers, self.machines, strict=True)):
            command("ip", "netns", "add", machine)
            ends = ("name", "home", "type", "veth", "peer", "name", INTERFACE, "netns", machine)
            command("ip", "-n", router, "link", "add", *ends)
            for name, device, address in ((router, "home", ROUTER), (machine, INTERFACE, MACHINE)):
                command("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
                command("ip", "-n", name, "link", "set", "dev", device, "up")
            command("ip", "-n", machine, "link", "set", "dev", "lo", "up")
            command("ip", "-n", machine, "route", "add", "default", "via", ROUTER)
            rules = self.folder / f"{number}.nft"
            rules.write_text(RULES + PASSED_ON * (number == 0), encoding="utf-8")
            forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
            command("ip", "netns", "exec", router, "sh", "-ec", f"{forward}; nft -f {rules}")

    def join(self) -> None:
        """Lay the tunnel, as wg-quick does on two real machines: by the kernel or by wireguard-go."""
        keys = [command("wg", "genkey").strip() for _ in self.machines]
        publics = [
            subprocess.run(["wg", "pubkey"], input=key, capture_output=True, text=True, check=True).stdout
            for key in keys
        ]
        for number, machine in enumerate(self.machines):
            tunnel = self.folder / str(number) / "wg0.conf"
            tunnel.parent.mkdir()
            tunnel.touch(mode=0o600)
            other = publics[1 - number].strip()
            tunnel.write_text(TUNNELS[number].format(private=keys[number], public=other), encoding="utf-8")
            # wireguard-go keeps a socket there by the interface's name, which is the same on both machines
            apart = "mkdir -p /run/wireguard; mount -t tmpfs none /run/wireguard"
            command("ip", "netns", "exec", machine, "sh", "-ec", f"{apart}; wg-quick up {tunnel}")

    def let_pass(self, is_on: bool) -> None:
        """Whether router 0 is connected: frames are lost in silence where it is not."""
        state = "3" if is_on else "0"  # forwarding, or disabled
        command("bridge", "-n", self.outside.switch, "link", "set", "dev", "port0", "state", state)

    def remove(self) -> None:
        """Remove all of it, and what runs in it; works half-way too."""
        remove([self.outside.switch, *self.outside.workers, *self.machines])


@contextlib.contextmanager
def homes() -> Iterator[Homes]:
    """Two machines behind routers, joined by a tunnel; removed whatever happens.

    Raises:
        NetworkError: this machine cannot make them; the message says what it lacks.
    """
    check_possible()
    missing = [tool for tool in ("nft", "wg", "wg-quick") if shutil.which(tool) is None]
    if missing:
        raise NetworkError(f"there is no {' and no '.join(missing)}: apt install nftables wireguard-tools")
    with tempfile.TemporaryDirectory(prefix="regtopk-nat-") as folder:
        made = Homes(Path(folder))
        try:
            made.add()
            made.join()
            yield made
        finally:
            made.remove()


def start(made: Homes, number: int, folder: Path, timeout_s: float) -> "subprocess.Popen[bytes]":
    """torchrun on one of the machines, as docs/wan.md says; the folder is that machine's disk."""
    words = ["--nnodes", "2", "--nproc_per_node", "1", "--max-restarts", "3", "--rdzv_backend", "c10d"]
    words += ["--rdzv_endpoint", "10.9.0.1:29500", "--local_addr", f"10.9.0.{number + 1}"]
    words += ["--rdzv_conf", f"is_host={int(number == 0)},read_timeout=600"]
    script = [str(failures.EXAMPLE), *WORDS, "--timeout-s", str(timeout_s)]
    inside = ["ip", "netns", "exec", made.machines[number], sys.executable, "-m", "torch.distributed.run"]
    folder.mkdir()
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            [*inside, *words, *script, "--checkpoints", str(folder / "checkpoints")],
            env={**os.environ, **SURROUNDINGS},
            stdout=said,
            stderr=subprocess.STDOUT,
        )


def train(made: Homes, folder: Path, stall_s: float, timeout_s: float = 300.0) -> dict[str, Any]:
    """A run on both machines whose link is dead for a while; what came of it."""
    disks = [folder / f"machine-{number}" for number in range(2)]
    runs = [start(made, number, disk, timeout_s) for number, disk in enumerate(disks)]
    saved = disks[0] / "checkpoints"
    failures.wait_for("checkpoint", lambda: saves_in(saved) or runs[0].poll() is not None)
    made.let_pass(False)
    time.sleep(stall_s)
    stalled_after = max((save.step for save in saves_in(saved)), default=0)
    made.let_pass(True)
    said = []
    for number, run in enumerate(runs):
        run.wait(failures.TIMEOUT_S)
        said.append((disks[number] / "said").read_text(encoding="utf-8"))
        if run.returncode != 0:
            raise NetworkError(f"machine {number} failed:\n{said[-1][-4000:]}")
    failures.run_example(folder / "loopback", 2, *WORDS)
    last_step, files = failures.last_state(disks[0])
    files |= failures.last_state(disks[1])[1]
    return {
        "stall_s": stall_s,
        "timeout_s": timeout_s,
        "stalled_after_step": stalled_after,
        "last_step": last_step,
        "num_starts": said[0].count("ranks go on from step"),
        "has_loopback_bits": failures.same(files, failures.last_state(folder / "loopback")[1]),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stall-s", type=float, default=20.0)
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of the process group")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    try:
        with signals_raise(), homes() as made, tempfile.TemporaryDirectory() as folder:
            found = train(made, Path(folder), arguments.stall_s, arguments.timeout_s)
    except NetworkError as error:
        print(f"nat: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
