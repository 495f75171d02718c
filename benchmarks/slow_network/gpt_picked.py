"""What is raced: methods of recorded comparisons (`regtopk compare gpt`), with all that was picked for them.

A folder holds each method's learning rate, searched on a seed of its own, and its test loss by step.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.steps_to_target import crossing
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.compare.config import CompareConfig
from regtopk.lab.experiments.compare.results import finished_curves
from regtopk.lab.method import Method
from regtopk.lab.runs import Record
from regtopk.lab.runs.reading import read_header, read_records

# settings that all folders must share
SHARED = (
    "task", "num_workers", "num_steps", "batch_size", "tokens", "num_layers", "width", "context", "precision",
    "split", "text_sha256",
)  # fmt: skip
Curve = list[tuple[int, float]]  # steps and test loss


class Picked(NamedTuple):
    """A method as it was recorded."""

    label: str
    words: str  # with the learning rate, the density, and whatever else a search picked
    curves: dict[int, Curve]  # by seed

    @property
    def method(self) -> Method:
        """What the words say."""
        return Method.parse(self.words)

    @property
    def is_plain(self) -> bool:
        """Whether it is DDP as it is: all gradients, in every step."""
        return self.method.algorithm == "dense" and not self.method.rounds.has_updates

    def steps_to(self, target: float, seed: int) -> float:
        """After how many steps a seed's curve reaches a loss; infinite if it does not."""
        return crossing([*self.curves[seed]], target)


class Recorded(NamedTuple):
    """Comparisons of one training: its settings, the hash of its text, and all methods."""

    config: CompareConfig
    text_sha256: str
    methods: list[Picked]

    def target(self, label: str, share: float) -> float:
        """The loss that a method has after a share of its steps, the mean over its seeds."""
        found = [picked for picked in self.methods if picked.label == label]
        if not found:
            labels = [picked.label for picked in self.methods]
            raise ArgumentError(f"target-of must be a recorded method, one of {labels}, got {label!r}")
        return fmean(loss_at(curve, share * self.config.num_steps) for curve in found[0].curves.values())


def read_picked(folders: Sequence[Path]) -> Recorded:
    """All finished methods of some folders; of one that two hold, the first counts."""
    methods: dict[str, Picked] = {}
    settings: list[dict[str, Any]] = []
    for folder in folders:
        settings.append(read_header(folder)["config"])
        for name in SHARED:
            one, other = settings[0].get(name), settings[-1].get(name)
            if one != other:
                raise ArgumentError(f"picked must share {name}, got {one!r} and {other!r} in {folder}")
        for picked in _methods(config_of(settings[-1]), read_records(folder)):
            methods.setdefault(picked.words, picked)
    config = config_of(settings[0])
    if config.task != "gpt":
        raise ArgumentError(f"picked must be comparisons of gpt, got {config.task!r}")
    return Recorded(config, settings[0]["text_sha256"], list(methods.values()))


def loss_at(curve: Curve, step: float) -> float:
    """On the line between two evaluations."""
    after = min(bisect([at for at, _ in curve], step), len(curve) - 1)
    (first, before), (last, loss) = curve[after - 1], curve[after]
    return before + (loss - before) * min(1.0, (step - first) / (last - first))


def config_of(settings: dict[str, Any]) -> CompareConfig:
    """Settings as JSON has them; what is no setting any more is left out."""
    known = {field.name for field in fields(CompareConfig)}
    given: dict[str, Any] = {name: x for name, x in settings.items() if name in known}
    lists: dict[str, Any] = {name: tuple(x) for name, x in given.items() if isinstance(x, list)}
    return CompareConfig(**{**given, **lists, "device": "cpu"})


def _methods(config: CompareConfig, records: Sequence[Record]) -> list[Picked]:
    found = []
    for (label, _), curves in finished_curves(config, records).items():
        last = next(iter(curves.values()))[-1]
        if not any(curve[-1]["diverged"] for curve in curves.values()):
            losses = {seed: [(r["step"], r["test_loss"]) for r in curve] for seed, curve in curves.items()}
            found.append(Picked(label, _words(config, label, last), losses))
    return found


def _words(config: CompareConfig, label: str, record: Record) -> str:
    """A method's words with one value for each option, and all that the settings add."""
    read, picked = Method.read(label), (record.get("search") or {}).get("picked", {})
    chosen = {key: str(picked.get(key, text)) for key, text in read.words}
    method = config.complete(
        Method.parse(":".join([read.algorithm, *(f"{k}={x}" for k, x in chosen.items())]))
    )
    if method.takes_density:
        chosen["density"] = str(record["density"])
    chosen |= {"lr": str(record["lr"]), "optimizer": method.optimizer, "index_code": method.index_code}
    algorithm = method.build(density=record["density"], value_code=config.value_code)
    if hasattr(algorithm, "value_code"):
        chosen["value_code"] = algorithm.value_code
    return ":".join([read.algorithm, *(f"{key}={text}" for key, text in chosen.items())])
