"""Replicas of torchft that are killed: when do the others go on, and is everybody equal when one is back?

Three processes on this machine exchange updates by regtopk.integrations.torchft with torchft's own
lighthouse and managers. One of them is killed (SIGKILL) at a random moment, and started anew when the others
have made three rounds without it. After every round each writes down a checksum of theta_start, buffers and
outer momentum, and what it holds. One is never killed: do its memory, threads and files stay as they were?
Then the lighthouse is killed, and started again on the same port after some seconds.

    python benchmarks/torchft_kills.py [--json] [--out FILE] [--times N] [--seed S] [--heartbeat-ms T]
        [--fragments F] [--outages 2,45]
"""

import hashlib
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from reporting import give, parser_for
from soak import resources
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

REPLICAS, SPARED, PAUSE, QUORUM_S = 3, 2, 2, 30.0  # PAUSE: steps from one fragment's turn to the next one's
GROUP_S = 4.0  # the timeout of collectives
PATIENCE_S = 120.0
LIGHTHOUSE = """import sys
from importlib.util import find_spec

sys.path += find_spec("torchft").submodule_search_locations
from _torchft import lighthouse_main

lighthouse_main()
"""
_forks = mp.get_context("forkserver")


def run_replica(lighthouse: str, number: int, log: str, fragments: int) -> None:
    """Train until somebody kills the process."""
    from torchft import Manager, ProcessGroupGloo

    import regtopk.integrations.torchft

    os.environ.setdefault("TORCHFT_QUORUM_RETRIES", "30")  # as docs/elastic.md advises
    torch.set_num_threads(1)
    torch.manual_seed(number)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=GROUP_S)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        use_async_quorum=False,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=QUORUM_S),
        connect_timeout=timedelta(seconds=5),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{number}",
    )
    model = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Tanh(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    exchange = regtopk.integrations.torchft.TorchftExchange(
        manager,
        model,
        optimizer,
        regtopk.RegTopK(density=0.05),
        every=PAUSE * fragments,
        fragments=fragments,
        outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True),
    )
    with open(log, "a", buffering=1) as file:
        while True:
            seen, state = {"time": time.time(), "weights": exchange.weights}, exchange.state_dict()
            told = {"round": state["num_rounds"], "failed": exchange.num_failed, "bits": checksum_of(state)}
            file.write(json.dumps({**seen, **told, **resources()}) + "\n")
            for _ in range(PAUSE):
                optimizer.zero_grad()
                x, y = torch.randn(32, 64), torch.randint(10, (32,))
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()


def checksum_of(state: dict[str, Any]) -> str:
    """Of theta_start, buffers and outer momentum, which all replicas have alike after a round."""
    momentum = [part["momentum_buffer"] for part in state["outer"]["state"].values()]
    found = hashlib.sha256()
    for tensor in (*state["start"].values(), *state["buffers"]["start"].values(), *momentum):
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


class Lighthouse:
    """torchft's own, as a process on a port that stays the same.

    It reads the process's own arguments, from the first after the script's name on: so a script starts it.
    That one leaves the rest of torchft alone, which would take seconds.
    """

    def __init__(self, folder: Path, heartbeat_ms: int) -> None:
        with socket.create_server(("", 0)) as taken:
            self._port = taken.getsockname()[1]
        self.address = f"http://localhost:{self._port}"
        told = {"bind": f"[::]:{self._port}", "min_replicas": 2, "join_timeout_ms": 20_000}
        told["heartbeat_timeout_ms"] = heartbeat_ms
        script, self._log = folder / "lighthouse.py", folder / "lighthouse.log"
        script.write_text(LIGHTHOUSE)
        self._command = [sys.executable, str(script)]
        self._command += [word for name, value in told.items() for word in (f"--{name}", str(value))]
        self.start()

    def start(self) -> None:
        """Return when it listens."""
        with self._log.open("a") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        while self._process.poll() is None:
            with suppress(ConnectionRefusedError):
                return socket.create_connection(("localhost", self._port)).close()
            time.sleep(0.02)
        raise SystemExit(f"the lighthouse ended: {self._log.read_text()}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Replicas:
    """The processes, and what they write down."""

    def __init__(self, folder: Path, lighthouse: str, fragments: int) -> None:
        self.folder, self.lighthouse, self.fragments = folder, lighthouse, fragments
        self.processes: list[ForkServerProcess] = []

    def start(self) -> int:
        """A new one; its number."""
        number = len(self.processes)
        log = str(self.folder / f"{number}.jsonl")
        told = self.lighthouse, number, log, self.fragments
        process = _forks.Process(target=run_replica, args=told, daemon=True)
        process.start()
        self.processes.append(process)
        return number

    def seen(self, number: int) -> list[dict[str, Any]]:
        """One entry when it has joined, and one after every round."""
        log = self.folder / f"{number}.jsonl"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for(
        self, numbers: list[int], count: int, since: float = 0.0, replicas: int | None = None
    ) -> None:
        """Until each of them has made so many rounds, among so many replicas."""
        deadline = time.time() + PATIENCE_S
        while any(len(self.rounds(number, since, replicas)) < count for number in numbers):
            ended = [number for number in numbers if not self.processes[number].is_alive()]
            if ended or time.time() > deadline:
                raise SystemExit(f"replicas {ended or numbers} ended or do not go on: {self.folder}")
            time.sleep(0.02)

    def rounds(self, number: int, since: float, replicas: int | None) -> list[dict[str, Any]]:
        """Its rounds since a moment, that counted."""
        seen = self.seen(number)
        done = max((entry["round"] for entry in seen if entry["time"] <= since), default=-1)
        later = [entry for entry in seen if entry["time"] > since and entry["round"] > done]
        return [entry for entry in later if replicas in (None, len(entry["weights"]))]

    def held(self, number: int) -> dict[str, list[int]]:
        """The most that a replica held in each fifth of its life."""
        seen = self.seen(number)
        fifths = [seen[n * len(seen) // 5 : (n + 1) * len(seen) // 5] for n in range(5)]
        return {name: [max(e[name] for e in fifth) for fifth in fifths] for name in resources()}

    def differing(self) -> tuple[int, list[int]]:
        """How many rounds were seen on several replicas, and in which of them their bits differ."""
        bits: dict[int, dict[int, str]] = defaultdict(dict)
        for number in range(len(self.processes)):
            for entry in self.seen(number):
                bits[entry["round"]].setdefault(number, entry["bits"])
        compared = {number: found for number, found in bits.items() if len(found) > 1}
        return len(compared), [number for number, found in compared.items() if len(set(found.values())) > 1]


def kill_one(replicas: Replicas, alive: list[int], draw: random.Random) -> dict[str, Any]:
    """Kill one, wait for the others, and start another in its place."""
    doomed = draw.choice([number for number in alive if number != SPARED])
    alive.remove(doomed)
    time.sleep(draw.uniform(0.2, 3.0))
    failed = [replicas.seen(number)[-1]["failed"] for number in alive]
    pid, moment = replicas.processes[doomed].pid, time.time()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    replicas.wait_for(alive, 3, moment, REPLICAS - 1)
    first = [replicas.rounds(number, moment, REPLICAS - 1)[0] for number in alive]
    new = replicas.start()
    replicas.wait_for([new], 6)
    joined = replicas.seen(new)
    alive.append(new)
    return {
        "next_commit_s": [round(entry["time"] - moment, 2) for entry in first],
        "failed_rounds": [entry["failed"] - before for entry, before in zip(first, failed, strict=True)],
        "rounds_of_the_new_one": [entry["round"] for entry in joined[:6]],
    }


def lose_lighthouse(
    replicas: Replicas, alive: list[int], lighthouse: Lighthouse, gone_s: float
) -> dict[str, Any]:
    """Kill the lighthouse, start it again, and wait for the replicas."""
    failed = [replicas.seen(number)[-1]["failed"] for number in alive]
    lighthouse.kill()
    gone = time.time()
    time.sleep(gone_s)
    lighthouse.start()
    moment = time.time()
    replicas.wait_for(alive, 3, moment, REPLICAS)
    first = [replicas.rounds(number, moment, REPLICAS)[0] for number in alive]
    return {
        "gone_s": round(moment - gone, 1),
        "next_commit_s": [round(entry["time"] - moment, 2) for entry in first],
        "failed_rounds": [entry["failed"] - before for entry, before in zip(first, failed, strict=True)],
    }


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heartbeat-ms", type=int, default=2000, help="after which a replica is lost")
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--outages", default="2,45", help="seconds that the lighthouse is gone, with commas")
    arguments = parser.parse_args()
    _forks.set_forkserver_preload(["torch", "torchft", "regtopk"])
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        lighthouse = Lighthouse(Path(folder), arguments.heartbeat_ms)
        replicas = Replicas(Path(folder), lighthouse.address, arguments.fragments)
        try:
            alive = [replicas.start() for _ in range(REPLICAS)]
            replicas.wait_for(alive, 5, replicas=REPLICAS)
            kills = []
            for number in range(arguments.times):
                kills.append(kill_one(replicas, alive, draw))
                print(f"kill {number + 1}: {kills[-1]}", flush=True)
            outages = []
            for gone_s in map(float, filter(None, arguments.outages.split(","))):
                outages.append(lose_lighthouse(replicas, alive, lighthouse, gone_s))
                print(f"lighthouse gone: {outages[-1]}", flush=True)
            held = replicas.held(SPARED)
            num_compared, differing = replicas.differing()
            have_stayed = all(replicas.processes[number].is_alive() for number in alive)
        finally:
            for process in replicas.processes:
                process.kill()
            lighthouse.kill()
    report = {
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
        "torch": torch.__version__,
        "heartbeat_timeout_s": arguments.heartbeat_ms / 1000,
        "quorum_timeout_s": QUORUM_S,
        "group_timeout_s": GROUP_S,
        "fragments": arguments.fragments,
        "kills": kills,
        "outages": outages,
        "worst_next_commit_s": max(s for kill in kills for s in kill["next_commit_s"]),
        "held_by_one_that_stays": held,
        "rounds_compared": num_compared,
        "rounds_that_differ": differing,
        "survivors_are_alive": have_stayed,
    }
    give(report, arguments, show)


def show(report: dict[str, Any]) -> None:
    """What a person wants to know."""
    print(
        f"{len(report['kills'])} kills: the others' next round counted within "
        f"{report['worst_next_commit_s']} s (a replica is lost after {report['heartbeat_timeout_s']} s); "
        f"{report['rounds_compared']} rounds compared, {len(report['rounds_that_differ'])} differ; "
        f"one that stays held, in fifths of its life: {report['held_by_one_that_stays']}"
    )


if __name__ == "__main__":
    main()
