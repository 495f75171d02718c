"""How many steps does each recorded method take to a loss, beside dense? What `regtopk plan` ranks by.

    python -m benchmarks.steps_to_target

reads the records below and writes src/regtopk/lab/plan/learned.json. Nothing is trained. Steps are those of
the first time that a curve crosses the target, on the line between two evaluations; a method's is the median
over its seeds, and its number is that over the median of dense. With SGD all methods have the paper's
learning rate. With AdamW each has its own, searched on a seed that is not counted, or a neighbour's.
torch's own hooks are in no simulator: theirs come from the records of real ranks, beside the dense of the
same ranks. PowerSGD has none with Muon.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from regtopk.lab.method import Method
from regtopk.lab.runs.reading import read_header, read_records

ROOT = Path(__file__).parents[1]
LEARNED = ROOT / "src/regtopk/lab/plan/learned.json"
HOOKS = {"fp16": "float16", "powersgd": "float32"}  # and how values travel
HOOK_WORKERS = 4  # in their records


class Task(NamedTuple):
    """Runs of many methods on one task, and what they race to."""

    about: str
    measure: str  # of a record
    runs: Mapping[float, tuple[str, ...]]  # by what they race to
    hooks: str  # a record of real ranks
    lr: float | None = None  # of all methods; None: each has its own
    optimizer: str = ""  # of the records that count; "": of all


class Key(NamedTuple):
    """A method as it is planned."""

    method: str  # in words, without what follows
    density: float
    value_code: str
    workers: int


TASKS = {
    "sgd": Task(
        about="ResNet-18 on CIFAR-10 with SGD, 8 workers, to an accuracy of 60 %; torch's hooks: a CNN on "
        "Fashion-MNIST, 4 workers, one seed",
        measure="accuracy",
        runs={60.0: ("fig3-paper", "fig3-paper-bytes", "fig3-paper-cap")},
        hooks="slow-network.json",
        lr=0.01,
    ),
    "adamw": Task(
        about="a GPT of 4.8 M parameters with AdamW, 8 workers, to a loss of 1.05; torch's hooks: a smaller "
        "GPT, 4 workers",
        measure="test_loss",
        runs={
            1.05: (
                *("gpt", "gpt-fragments", "gpt-delay", "gpt-delay-tried", "gpt-500-tried"),
                *("gpt-5000", "gpt-5000-fragments", "gpt-peers"),
            )
        },
        hooks="slow-network-gpt.json",
    ),
    "muon": Task(
        about="a GPT of 4.8 M parameters with Muon, 8, 16 or 32 workers, to the loss that dense has after "
        "half of its steps, 0.934 or on enwik8 1.338; torch's fp16 hook: a smaller GPT with AdamW, 4 workers",
        measure="test_loss",
        runs={
            0.934: ("gpt-muon", "gpt-muon-5000", "gpt-returned-8", "gpt-returned-32", "gpt-returned-64"),
            1.338: ("enwik8-8", "muloco-16", "enwik8-32"),
        },
        hooks="slow-network-gpt.json",
        optimizer="muon",
    ),
}
DENSE = Key("dense", 1.0, "float32", 8)


def make() -> dict[str, Any]:
    """All of the file."""
    return {name: {"about": task.about, "methods": rows(task)} for name, task in TASKS.items()}


def rows(task: Task) -> list[dict[str, Any]]:
    """One row per method; null where half of the seeds or more never reached the target."""
    relative: dict[Key, tuple[float, int]] = {}
    for target, names in task.runs.items():
        steps: dict[Key, list[float]] = {}
        for name in names:  # the first that has a method counts
            found = curves(ROOT / "docs/results" / name, task)
            steps = {key: [crossing(c, target) for c in found[key].values()] for key in found} | steps
        dense = median(steps.pop(DENSE))
        relative = {key: (median(steps[key]) / dense, len(steps[key])) for key in steps} | relative
    return [*hook_rows(task), *(row(key, *relative[key]) for key in sorted(relative))]


def row(key: Key, relative_steps: float, num_seeds: int) -> dict[str, Any]:
    """A method and what it took."""
    reached = None if relative_steps == inf else round(relative_steps, 3)
    return {**key._asdict(), "relative_steps": reached, "seeds": num_seeds}


def curves(folder: Path, task: Task) -> dict[Key, dict[int, list[tuple[float, float]]]]:
    """What was measured after how many steps, by method and seed."""
    found: dict[Key, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    config = read_header(folder)["config"]
    for record in read_records(folder):
        if task.lr in (None, record["lr"]) and task.optimizer in ("", record.get("optimizer")):
            key = key_of(record, config["value_code"], config["num_workers"])
            found[key][record["seed"]].append((record["step"], record[task.measure]))
    return found


def key_of(record: dict[str, Any], usual_code: str, num_workers: int) -> Key:
    """A record's method, with what a search picked where its words have alternatives, `every=8|16`.

    Older records do not tell the density and code of methods that name them.
    """
    read, picked = Method.read(record["method"]), (record.get("search") or {}).get("picked", {})
    chosen = [f"{name}={picked.get(name, text)}" for name, text in read.words]
    words = Method.parse(":".join([read.algorithm, *chosen]))
    told = {"lr", "optimizer", "weight_decay", "index_code", "density", "value_code"}
    kept = [f"{name}={text}" for name, text in words.words if name not in told]
    density: Any = words.options.get("density", record["density"])
    code = words.options.get("value_code") or record.get("value_code") or usual_code
    if words.algorithm == "dense" and "value_code" not in words.options:
        code = "float32"
    return Key(":".join([words.algorithm, *kept]), density or 1.0, str(code), num_workers)


def crossing(curve: list[tuple[float, float]], target: float) -> float:
    """The steps to the target, which may lie above or below the start; infinite if it is never reached."""
    points = sorted(curve)
    is_below = points[0][1] < target
    for (before, low), (after, high) in pairwise(points):
        if (high >= target) if is_below else (high <= target):
            return before + (after - before) * (target - low) / (high - low)
    return inf


def hook_rows(task: Task) -> Iterator[dict[str, Any]]:
    """torch's hooks, whose records say after how many steps each seed reached the target."""
    record = json.loads((ROOT / "benchmarks/results" / task.hooks).read_text())
    names = [name for name in HOOKS if (name, task.optimizer) != ("powersgd", "muon")]
    for name, code in ((name, HOOKS[name]) for name in names):
        dense, hook = (steps_of_ranks(record, method) for method in ("dense", name))
        yield row(Key(name, 1.0, code, HOOK_WORKERS), median(hook) / median(dense), len(hook))


def steps_of_ranks(record: dict[str, Any], method: str) -> list[float]:
    """The steps of each seed to the hardest target that all methods were given."""
    if "race" not in record:
        raced = [row for row in record["time_to_accuracy"] if row["bandwidth_bits_per_s"] is not None]
        return [row["steps"] for row in raced if row["method"] == method]
    reached = [row for row in record["summary"]["to_losses"] if row["method"] == method]
    return [steps or inf for steps in min(reached, key=lambda row: row["loss"])["steps_of_seeds"]]


def main() -> None:
    """Write the file, and print it."""
    learned = make()
    LEARNED.write_text(json.dumps(learned, indent=1) + "\n", encoding="utf-8")
    for task in learned.values():
        print(task["about"])
        for row in task["methods"]:
            print("   ", *row.values())


if __name__ == "__main__":
    main()
