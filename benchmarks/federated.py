"""Federated averaging with sparse frames against dense FedAvg: accuracy, and bytes in both directions.

Fashion-MNIST sorted by label and cut into 40 pieces, two for each of 20 clients. 5 of them, drawn at random,
take part in a round: each makes 20 steps of SGD with batches of 50 from the server's model on. The network
has one hidden layer of 64, 50,890 parameters.

Our clients and our server are `regtopk.integrations.flower`'s, with the clients' memories on a disk; there is
no Flower in between. Bytes are those of payload: of frames and models,
and 16 more for each frame that the server passes on. Flower's own records come on top.

The learning rate is searched for each method by itself, on 5,000 training images that no client has, with the
seeds of --pick. Then the method runs with the seeds of --claim, and the test images are looked at.

    python benchmarks/federated.py [--jobs 2] [--rounds 100] [--journal FILE] [--json] [--out FILE]
"""

import argparse
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from reporting import give, parser_for
from torch import Tensor, nn
from torch.nn import functional as F

from regtopk import RegTopK, TopK
from regtopk.core import Algorithm
from regtopk.integrations.flower.client import Client
from regtopk.integrations.flower.messages import Model, PastRound
from regtopk.integrations.flower.server import Server
from regtopk.lab.experiments.data.images import Images, load_images, standardised
from regtopk.lab.experiments.data.splits import divide

NUM_CLIENTS, NUM_SAMPLED = 20, 5
NUM_STEPS, BATCH = 20, 50
NUM_HELD_OUT = 5_000
METHODS: dict[str, Algorithm[Any] | None] = {
    "FedAvg": None,
    "Top-k 10 %, 4 bits": TopK(density=0.1, value_code="4bit"),
    "Top-k 1 %, 4 bits": TopK(density=0.01, value_code="4bit"),
    "RegTop-k 1 %, 4 bits": RegTopK(density=0.01, value_code="4bit"),
    "Top-k 0.1 %, 4 bits": TopK(density=0.001, value_code="4bit"),
}


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


class Task:
    """The examples of every client, and how it trains."""

    def __init__(self, images: Images, seed: int, lr: float) -> None:
        self.images, self.lr, self.seed = images, lr, seed
        shuffled = torch.randperm(len(images.train_labels), generator=torch.Generator().manual_seed(12345))
        self.held_out, rest = shuffled[:NUM_HELD_OUT], shuffled[NUM_HELD_OUT:]
        parts = divide(images.train_labels[rest], NUM_CLIENTS, "sorted", seed)
        self.parts = [rest[part] for part in parts]
        self.model = make_model(seed)

    def weight(self, client: int) -> int:
        return len(self.parts[client])

    def train(self, client: int, round: int, model: Model) -> Model:
        self.model.load_state_dict(model)
        parameters: list[Tensor] = list(self.model.parameters())
        part = self.parts[client]
        draw = torch.Generator().manual_seed(1_000_000 * self.seed + 1_000 * round + client)
        for batch in part[torch.randperm(len(part), generator=draw)[: NUM_STEPS * BATCH]].split(BATCH):
            loss = F.cross_entropy(self.model(self.images.train[batch]), self.images.train_labels[batch])
            grads = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, grads, alpha=-self.lr)
        return {name: array.clone() for name, array in self.model.state_dict().items()}

    @torch.no_grad()
    def accuracies(self, model: Model) -> dict[str, float]:
        self.model.load_state_dict(model)
        images = self.images

        def right(x: Tensor, labels: Tensor) -> float:
            return 100 * float((self.model(x).argmax(1) == labels).float().mean())

        return {
            "held_out": right(images.train[self.held_out], images.train_labels[self.held_out]),
            "test": right(images.test, images.test_labels),
        }


class Dense:
    """FedAvg: every sampled client gets the model and returns one."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.up_bytes = self.down_bytes = 0

    def round(self, number: int, sampled: list[int], task: Task) -> None:
        total = sum(task.weight(client) for client in sampled)
        mean = {name: torch.zeros_like(array) for name, array in self.model.items()}
        for client in sampled:
            for name, array in task.train(client, number, self.model).items():
                mean[name] += task.weight(client) / total * array
        self.model = mean
        size = sum(4 * array.numel() for array in mean.values())
        self.up_bytes += len(sampled) * size
        self.down_bytes += len(sampled) * size


class Sparse:
    """Our server and clients; a client's number is its node's."""

    def __init__(self, model: Model, algorithm: Algorithm[Any], folder: Path) -> None:
        self.model = model
        self.server = Server()
        self.clients = [
            Client(algorithm, folder / f"{name}.pt", name=f"{name:02}") for name in range(NUM_CLIENTS)
        ]
        self.up_bytes = self.down_bytes = 0

    def round(self, number: int, sampled: list[int], task: Task) -> None:
        self.server.begin(number, self.model)
        replies = {}
        for node in sampled:
            told, client = self.server.instruction(node), self.clients[node]
            model = client.model_of(told)
            reply = client.reply(told, model, task.train(node, number, model))
            replies[node] = reply, float(task.weight(node))
            self.up_bytes += len(reply.frame)
            self.down_bytes += (
                sum(4 * array.numel() for array in told.arrays.values())
                if told.missed is None
                else sum(past.num_bytes for past in told.missed)
            )
        refused = self.server.finish(replies)
        assert refused == {}
        self.model = self.server.model


def run(method: str, lr: float, seed: int, num_rounds: int, images: Images) -> dict[str, Any]:
    task = Task(images, seed, lr)
    start = {name: array.clone() for name, array in make_model(seed).state_dict().items()}
    draw = random.Random(seed)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        algorithm = METHODS[method]
        parts = Dense(start) if algorithm is None else Sparse(start, algorithm, Path(folder))
        found = []
        for number in range(1, num_rounds + 1):
            parts.round(number, draw.sample(range(NUM_CLIENTS), NUM_SAMPLED), task)
            if number > num_rounds - max(1, num_rounds // 10):  # the mean of these counts
                found.append(task.accuracies(parts.model))
    return {
        "method": method,
        "lr": lr,
        "seed": seed,
        "rounds": num_rounds,
        **{name: statistics.mean(each[name] for each in found) for name in ("held_out", "test")},
        "up_bytes": parts.up_bytes,
        "down_bytes": parts.down_bytes,
        "seconds": time.perf_counter() - begun,
    }


Job = tuple[str, float, int, int]  # method, learning rate, seed, number of rounds
_images: Images | None = None


def run_here(job: Job) -> dict[str, Any]:
    global _images
    torch.set_num_threads(1)
    if _images is None:
        _images = standardised(load_images("fashion-mnist", None, "cpu"))
        # All clients are in one process here: what a round changed is decoded once, not by each of them.
        PastRound.aggregate = lru_cache(maxsize=64)(PastRound.aggregate)  # type: ignore[method-assign]
    return run(*job, _images)


class Runs:
    """Makes runs side by side; those in the journal are not made again."""

    def __init__(self, pool: ProcessPoolExecutor, num_rounds: int, journal: Path | None) -> None:
        self.pool, self.num_rounds, self.journal = pool, num_rounds, journal
        lines = journal.read_text().splitlines() if journal is not None and journal.exists() else []
        self.made = {job_of(one): one for one in map(json.loads, lines)}

    def __call__(self, settings: list[tuple[str, float, int]]) -> list[dict[str, Any]]:
        jobs = [(*setting, self.num_rounds) for setting in settings]
        for one in self.pool.map(run_here, [job for job in jobs if job not in self.made]):
            self.made[job_of(one)] = one
            if self.journal is not None:
                with self.journal.open("a") as file:
                    print(json.dumps(one), file=file)
        return [self.made[job] for job in jobs]


def job_of(one: dict[str, Any]) -> Job:
    return one["method"], one["lr"], one["seed"], one["rounds"]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    lrs, methods = arguments.lrs, arguments.methods
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
        runs = Runs(pool, arguments.rounds, arguments.journal)
        picking = runs([(method, lr, seed) for method in methods for lr in lrs for seed in arguments.pick])
        best = {}
        for method in methods:
            found = {
                lr: [x["held_out"] for x in picking if (x["method"], x["lr"]) == (method, lr)] for lr in lrs
            }
            best[method] = max(lrs, key=lambda lr: statistics.mean(found[lr]))
        claiming = runs([(method, best[method], seed) for method in methods for seed in arguments.claim])
    return {"lrs": lrs, "torch": torch.__version__, "picking": picking, "claiming": claiming}


def show(report: dict[str, Any]) -> None:
    print("| method | learning rate | test accuracy | sent to the server | sent to clients | together |")
    print("|---|---|---|---|---|---|")
    dense = [one for one in report["claiming"] if one["method"] == "FedAvg"]
    for method in dict.fromkeys(one["method"] for one in report["claiming"]):
        runs = [one for one in report["claiming"] if one["method"] == method]
        accuracy = [one["test"] for one in runs]
        sizes = []
        for kinds in (("up_bytes",), ("down_bytes",), ("up_bytes", "down_bytes")):
            mean, mean_dense = (
                statistics.mean(sum(one[kind] for kind in kinds) for one in some)
                for some in (runs, dense or runs)
            )
            times = mean_dense / mean
            sizes.append(
                f"{mean / 1e6:.3g} MB" + ("" if times == 1 else f", 1/{times:.{0 if times > 9 else 1}f}")
            )
        spread = f"± {statistics.stdev(accuracy):.1f} ({min(accuracy):.1f} to {max(accuracy):.1f})"
        print(
            f"| {method} | {runs[0]['lr']} | {statistics.mean(accuracy):.1f} {spread} | {' | '.join(sizes)} |"
        )


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.025, 0.05, 0.1, 0.2])
    parser.add_argument("--pick", type=int, nargs="+", default=[100, 101])
    parser.add_argument("--claim", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--journal", type=Path, help="keep every run in this file, and make none of it again")
    arguments = parser.parse_args()
    give(measure(arguments), arguments, show)


if __name__ == "__main__":
    main()
