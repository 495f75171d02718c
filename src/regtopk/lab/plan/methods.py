"""The methods that are planned, and the words they are asked for with."""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from regtopk.core.algorithm import check_density
from regtopk.core.codes import is_lossless
from regtopk.core.options import check_choice
from regtopk.errors import ArgumentError
from regtopk.lab.method import Method
from regtopk.lab.plan.workload import POWERSGD_RANK
from regtopk.rounds import ADVISED_UPDATES, GRADIENTS, Rounds

CODES = ("float32", "4bit")  # of values
DENSITIES = (0.001, 0.01, 0.1)
CHOSEN = ("topk", "regtopk", "consensus", "dgc")  # what one would try first
PLANNED = (*CHOSEN, "dense")  # whose work a calibration can tell
UPDATES_DENSITIES = (0.01, 0.025, 0.05)  # of updates, unless told: rarer rounds need more entries
EVERY = (1, 2)  # steps of a round of updates, unless told
ADVISED_EVERY = (1, 2, 4, 8)  # of `ADVISED_UPDATES`, whole and in as many fragments
DILOCO = "dense:exchange=updates:every={}:outer=nesterov:value_code=float32"
DILOCO_EVERY = 16
MOST_FRAGMENTS = 8


class PlannedMethod(NamedTuple):
    """A way to exchange gradients or updates."""

    name: str  # an algorithm, with its other options: "topk:impute=0.35"
    density: float
    value_code: str
    rounds: Rounds = GRADIENTS

    @property
    def algorithm(self) -> str:
        """The name alone."""
        return self.name.partition(":")[0]

    @property
    def imputes(self) -> bool:
        """Whether workers must know who sent each entry."""
        return "impute" in Method.read(self.name).options

    @property
    def sends_less(self) -> bool:
        """Whether it is meant to send less than DDP without a hook and torch's fp16 hook."""
        return self not in (DENSE, FP16)

    @property
    def kind(self) -> str:
        """The name without the number of steps between exchanges."""
        if self.rounds.has_updates:
            is_diloco = self.name == "dense" and self.rounds.outer == "nesterov"
            return "DiLoCo" if is_diloco else f"{self.name} updates"
        return "dense, coded" if self.name == DENSE.name and self != DENSE else self.name

    @property
    def label(self) -> str:
        """The name in tables and figures: `dense` is DDP alone, not this library's coded exchange of it."""
        if not self.rounds.has_updates:
            return self.kind
        return f"{self.kind}, {', '.join(f'{name} {value}' for name, value in self.turns.items())}"

    @property
    def turns(self) -> dict[str, int]:
        """When updates are exchanged: every, and a delay and fragments where there are any."""
        rounds = self.rounds
        given = {"delay": rounds.delay, "fragments": rounds.fragments}
        told = {name: value for name, value in given.items() if value != getattr(GRADIENTS, name)}
        return {"every": rounds.every, **told}

    @property
    def amount(self) -> str:
        """How much of the gradient it sends."""
        return f"rank {POWERSGD_RANK}" if self == POWERSGD else f"{self.density:g}"


DENSE = PlannedMethod("dense", 1.0, "float32")
FP16 = PlannedMethod("fp16", 1.0, "float16")
POWERSGD = PlannedMethod("powersgd", 1.0, "float32")
TORCH = (DENSE, FP16, POWERSGD)


def planned_methods(
    densities: Sequence[float] = DENSITIES, labels: Sequence[str] = CHOSEN
) -> list[PlannedMethod]:
    """DDP, torch's hooks, and algorithms at every density and with every code that their words leave open.

    Args:
        densities: for the algorithms whose words have none.
        labels: the algorithms, in words as `regtopk compare` takes them.
    """
    ours = [method for label in labels for method in _ways(Method.parse(label), densities)]
    return list(dict.fromkeys([*TORCH, *ours]))


def update_labels(labels: Sequence[str] | None, every: int | None) -> list[str]:
    """Methods on updates: every so many steps, or every few if not told; the words of some may tell.

    Args:
        labels: None for DiLoCo and what was measured best, whole and in fragments.
        every: steps of a round; None: several.
    """
    if labels is None:
        own = [(n, parts) for n in _steps(every, ADVISED_EVERY) for parts in {1, min(n, MOST_FRAGMENTS)}]
        ours = [f"{ADVISED_UPDATES}:exchange=updates:every={n}:fragments={parts}" for n, parts in sorted(own)]
        return [DILOCO.format(every or DILOCO_EVERY), *ours]
    told = [label for label in labels if "exchange=" in label]
    split = [label.partition(":") for label in labels if label not in told]
    return told + [
        f"{name}:exchange=updates:every={n}{colon}{rest}"
        for name, colon, rest in split
        for n in _steps(every, EVERY)
    ]


def _steps(every: int | None, usual: Sequence[int]) -> Sequence[int]:
    return usual if every is None else [every]


def _ways(words: Method, densities: Sequence[float]) -> list[PlannedMethod]:
    """An algorithm at every density and with every code that its words leave open."""
    check_choice("a planned algorithm", words.algorithm, PLANNED)
    if words.residual_dtype or words.index_code or "k" in words.options:
        raise ArgumentError(
            f"a planned method has a density, and no k, index_code or residual_dtype, got {words.label!r}"
        )
    options = dict(words.options)
    density, code = options.pop("density", None), options.pop("value_code", None)
    if code is not None:
        check_choice("value_code of a planned method", code, CODES)
    name = ":".join([words.algorithm, *(f"{key}={text}" for key, text in words.words if key in options)])
    codes = CODES if code is None else [str(code)]
    shares = densities if density is None else [check_density(density)]
    if words.algorithm == "dense":
        shares = [1.0]
        if not words.rounds.has_updates:
            codes = [code for code in codes if not is_lossless(code)]  # DDP sends the others anyway
    return [PlannedMethod(name, share, code, words.rounds) for code, share in product(codes, shares)]
