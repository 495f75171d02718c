"""The methods that are planned, and the words they are asked for with."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

from regtopk import recipes
from regtopk.core.algorithm import check_density
from regtopk.core.codes import is_lossless
from regtopk.core.options import MOST, check_choice, check_integer
from regtopk.errors import ArgumentError
from regtopk.lab.method import Method
from regtopk.recipes import INDEX_CODE
from regtopk.rounds import ADVISED_UPDATES, EXCHANGES, GRADIENTS, Rounds

CODES = ("float32", "4bit")  # of values, tried unless told; their costs are measured
COSTS_OF = {"2bit": "4bit", "sign": "4bit", "bfloat16": "float32"}  # codes that are taken to cost the same
DENSITIES = (0.001, 0.01, 0.1)
PLANNED = ("topk", "regtopk", "consensus", "dgc", "dense")  # whose work a calibration can tell
CHOSEN = (*PLANNED[:3], "dgc:density=0.005:value_code=4bit")  # tried unless told: DGC as it is advised
UPDATES_DENSITIES = (0.01, 0.025, 0.05)  # of updates, unless told: rarer rounds need more entries
RETURNED_UPDATES = "topk:density=0.01:returned=0.01:value_code=4bit"  # for many workers: docs/returned.md
MOST_FRAGMENTS = 8
SLOWER_UPDATES = f"{ADVISED_UPDATES}:density=0.0008:exchange=updates:every=2:fragments=2"  # a tenth
# what docs/which-method.md advises, beside the recipes for Muon; a test compares
ADVISED = {
    "sgd": ("consensus:density=0.01:value_code=4bit",),
    "adamw": (
        f"{ADVISED_UPDATES}:density=0.01:exchange=updates:every=2:fragments=2",
        f"{ADVISED_UPDATES}:density=0.01:exchange=updates:every=2",
    ),
}


class PlannedMethod(NamedTuple):
    """A way to exchange gradients or updates."""

    name: str  # an algorithm, with its other options: "topk:impute=0.35"
    density: float
    value_code: str
    rounds: Rounds = GRADIENTS
    index_code: str = INDEX_CODE

    @classmethod
    def of(cls, words: Method, density: float, value_code: str) -> "PlannedMethod":
        """What words ask for, with this density and this code in place of theirs."""
        index_code = words.index_code or INDEX_CODE
        told = {*words.options, *(() if index_code == INDEX_CODE else ("index_code",))}
        own = [f"{key}={text}" for key, text in words.words if key in told - {"density", "value_code"}]
        return cls(":".join([words.algorithm, *own]), density, value_code, words.rounds, index_code)

    @property
    def algorithm(self) -> str:
        """The name alone."""
        return self.name.partition(":")[0]

    @property
    def options(self) -> Mapping[str, Any]:
        """The algorithm's other options, such as impute and sum_code."""
        return Method.read(self.name).options

    @property
    def returned(self) -> float | None:
        """The part of J that comes back of a sum, where owners of entries add these up."""
        return self.options.get("returned")

    @property
    def label(self) -> str:
        """The name in tables and figures: `dense` is DDP alone, not this library's coded exchange of it."""
        if not self.rounds.has_updates:
            return "dense, coded" if self.name == DENSE.name and self != DENSE else self.name
        is_diloco = self.algorithm == "dense" and self.rounds.outer == "nesterov"
        name = self.name.replace("dense", "DiLoCo") if is_diloco else f"{self.name} updates"
        return ", ".join([name, *(f"{key} {value}" for key, value in self.turns.items())])

    @property
    def turns(self) -> dict[str, int]:
        """When updates are exchanged: every, and a delay and fragments where there are any."""
        told = {name: getattr(self.rounds, name) for name in ("delay", "fragments")}
        given = {name: value for name, value in told.items() if value != getattr(GRADIENTS, name)}
        return {"every": self.rounds.every, **given}


DENSE = PlannedMethod("dense", 1.0, "float32")
FP16 = PlannedMethod("fp16", 1.0, "float16")
POWERSGD = PlannedMethod("powersgd", 1.0, "float32")
TORCH = (DENSE, FP16, POWERSGD)
UNCOMPRESSED = (DENSE, FP16)  # what a compressed method must beat


def planned_methods(
    densities: Sequence[float] | None = None,
    labels: Sequence[str] | None = None,
    *,
    exchange: str = "gradients",
    every: int | None = None,
    optimizer: str = "",
    num_workers: int = 2,
) -> list[PlannedMethod]:
    """DDP, torch's hooks, and methods in words, with every density and code that those leave open."""
    check_choice("exchange", exchange, EXCHANGES)
    if exchange == "updates":
        if labels is None and optimizer == "muon":
            if densities:
                raise ArgumentError(f"density must stand in --algorithms with Muon, got {list(densities)}")
            labels = [words_of(recipe, every) for recipe in recipes.for_workers(num_workers)]
        densities, labels = densities or UPDATES_DENSITIES, _update_labels(labels, every)
    elif every is not None:
        raise ArgumentError(f"every must be given with exchange 'updates' alone, got {every}")
    parsed = [Method.parse(label) for label in labels or (PLANNED[:-1] if densities else CHOSEN)]
    ours = [method for words in parsed for method in _ways(words, densities or DENSITIES)]
    return list(dict.fromkeys([*TORCH, *ours]))


@cache
def advised_with(optimizer: str) -> frozenset[PlannedMethod]:
    """What docs/which-method.md advises."""
    few, many = recipes.for_workers(2), recipes.for_workers(recipes.MANY_FROM)
    labels = ADVISED.get(optimizer, map(words_of, (*few, *many)))
    return frozenset(each for label in labels for each in _ways(Method.parse(label), ()))


def words_of(recipe: recipes.ExchangeRecipe, every: int | None = None) -> str:
    """A recipe in words, in rounds of its own length or of another."""
    algorithm, num_steps, outer = recipe.algorithm, every or recipe.every, recipe.outer
    parts = 1 if recipe.fragments == 1 else min(num_steps, MOST_FRAGMENTS)
    told = {f.name: x for f in fields(algorithm) if (x := getattr(algorithm, f.name)) != f.default}
    told |= {"exchange": "updates", "every": num_steps, "fragments": parts, "index_code": recipe.index_code}
    told |= {"outer": "nesterov", "outer_lr": outer.lr, "outer_momentum": outer.momentum} if outer else {}
    return ":".join([algorithm.name, *(f"{name}={value}" for name, value in told.items())])


def _update_labels(labels: Sequence[str] | None, every: int | None) -> list[str]:
    """Methods on updates, in rounds of `every` steps or of several lengths; by default, what we advise."""
    if every is not None:
        check_integer("every", every, at_least=1, at_most=MOST)
    if labels is None:
        found = [f"dense:exchange=updates:every={every or 16}:outer=nesterov:value_code=float32"]
        for n in [every] if every else (1, 2, 4, 8):
            words = f"{ADVISED_UPDATES}:exchange=updates:every={n}:fragments="
            found += [f"{words}{parts}" for parts in sorted({1, min(n, MOST_FRAGMENTS)})]
        found += [SLOWER_UPDATES] if every is None else []
        n = every or 4
        return [*found, f"{RETURNED_UPDATES}:exchange=updates:every={n}:fragments={min(n, MOST_FRAGMENTS)}"]
    found = [label for label in labels if "exchange=" in label]
    for name, colon, rest in (label.partition(":") for label in labels if label not in found):
        found += [f"{name}:exchange=updates:every={n}{colon}{rest}" for n in ([every] if every else (1, 2))]
    return found


def _ways(words: Method, densities: Sequence[float]) -> list[PlannedMethod]:
    """An algorithm at every density and with every code that its words leave open."""
    check_choice("a planned algorithm", words.algorithm, PLANNED)
    if words.residual_dtype or "k" in words.options:
        raise ArgumentError(f"a planned method has a density and no k or residual_dtype, got {words.label!r}")
    codes: Sequence[str] = CODES
    if "value_code" in words.options:
        codes = [str(words.options["value_code"])]
        check_choice("value_code of a planned method", codes[0], (*CODES, *COSTS_OF))
    if words.algorithm == "dense":
        densities = [1.0]
        if not words.rounds.has_updates:
            codes = [code for code in codes if not is_lossless(code)]  # DDP sends the others anyway
    elif "density" in words.options:
        densities = [check_density(words.options["density"])]
    return [PlannedMethod.of(words, density, code) for code in codes for density in densities]
