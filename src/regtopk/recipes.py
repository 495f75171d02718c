"""What we advise, as plain options: print a recipe, change it, pass it on.

>>> recipe = regtopk.recipes.transformer(num_workers=8)
>>> print(recipe)
>>> exchange = regtopk.UpdateExchange(model, [muon, adamw], recipe.algorithm, **recipe.options)

docs/transformers.md, docs/returned.md and docs/comparisons.md say what was measured.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from regtopk.algorithms import Dense, TopK
from regtopk.core.codes import full_message_bytes
from regtopk.core.link import Link
from regtopk.core.options import check_integer, check_positive
from regtopk.core.owners import num_owned
from regtopk.core.regions import region_bytes
from regtopk.errors import ArgumentError
from regtopk.rounds import Outer

INDEX_CODE = "elias-fano"  # of what names none
# Workers: with Muon it is level or a little ahead with 8, far ahead with 32 and 64. 16 is not measured.
RETURNED_FROM = 17


@dataclass(frozen=True)
class ExchangeRecipe:
    """What to run on updates, and how often.

    Args:
        algorithm: what is run.
        steps: to a loss that dense training has after a third of its steps, over dense's.
        every: local steps per round.
        fragments: parts of the model that are exchanged in turn.
        outer: of the SGD that applies the aggregate; None: it is applied as it is.
        index_code: how messages tell which entries they have.
    """

    algorithm: TopK | Dense
    steps: float
    every: int
    fragments: int
    outer: Outer | None = None
    index_code: str = INDEX_CODE

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `UpdateExchange`."""
        told = {} if self.index_code == INDEX_CODE else {"index_code": self.index_code}
        outer = {"outer": partial(torch.optim.SGD, **self.outer._asdict())} if self.outer else {}
        return {"every": self.every, "fragments": self.fragments, **told, **outer}

    @property
    def trips(self) -> float:
        """Latencies per step: two a collective, as gloo's receivers first say that they are ready."""
        is_gathered = isinstance(self.algorithm, TopK) and self.algorithm.returned is None
        return 2 * (2 if is_gathered else 3) * self.fragments / self.every  # an agreement is one of them

    def received_bytes(self, numel: int, num_workers: int) -> float:
        """What a rank receives per step of a model of J parameters."""
        size, algorithm = math.ceil(numel / self.fragments), self.algorithm

        def message(part: Any, of: int) -> int:
            codes = {"value_code": algorithm.value_code, "index_code": self.index_code}
            return full_message_bytes(max(1, round(part * of)), of, dtype=torch.float32, **codes)

        if isinstance(algorithm, Dense):
            codes = algorithm.value_code, algorithm.sum_code
            each = sum(max(region_bytes(size, num_workers, (), torch.float32, code)) for code in codes)
        elif algorithm.returned is None:
            each = message(algorithm.density, size)
        else:
            size = num_owned(size, num_workers)
            each = message(algorithm.density, size) + message(algorithm.returned, size)
        return (num_workers - 1) * each * self.fragments / self.every


def _recipe(steps: float, every: int, **options: Any) -> ExchangeRecipe:
    return ExchangeRecipe(TopK(value_code="2bit", **options), steps, every, fragments=every)


_SIGNS = TopK(density=0.24, value_code="sign", returned=0.3)
# The third is MuLoCo, in one piece for links with latency.
_FEW = (
    _recipe(1.17, 4, density=0.026, impute=0.15),
    ExchangeRecipe(_SIGNS, 1.22, 8, 8, Outer(0.7, 0.2, nesterov=True), "rice"),
    ExchangeRecipe(Dense(value_code="2bit", sum_code="2bit"), 1.3, 16, 1, Outer(0.7, 0.6, nesterov=True)),
)
SLOWER = _recipe(2.55, 8, density=0.0041, impute=0.1)  # a tenth of the bytes; ends far behind, so not chosen
_MANY = (
    ExchangeRecipe(_SIGNS, 1.84, 8, 8, Outer(0.9, 0.4, nesterov=True), "rice"),
    _recipe(2.01, 4, density=0.03, returned=0.03),
)


def for_workers(num_workers: int) -> tuple[ExchangeRecipe, ...]:
    """What we advise for so many workers; what needs the fewest steps first."""
    return _MANY if num_workers >= RETURNED_FROM else _FEW


def transformer(
    num_workers: int, *, numel: int | None = None, step_s: float | None = None, link: Link | None = None
) -> ExchangeRecipe:
    """What to exchange for a transformer whose matrices are trained by Muon and the rest by AdamW.

    Without a link it is the one that needs the fewest steps to a loss. With a link it is the one whose steps
    take the least time in all: computation, messages and latency.

    Args:
        num_workers: N.
        numel: the model's parameters; with a link only.
        step_s: seconds that a step computes; with a link only.
        link: between ranks, with its latency one way.
    """
    check_integer("num_workers", num_workers, at_least=1)
    recipes = for_workers(num_workers)
    if link is None:
        if numel is not None or step_s is not None:
            raise ArgumentError(f"link must be given with numel and step_s, got {numel} and {step_s} alone")
        return recipes[0]
    if not isinstance(link, Link):
        raise ArgumentError(f"link must be a regtopk.Link, got {link!r}")
    check_integer("numel", numel, at_least=1)
    check_positive("step_s", step_s)
    assert numel is not None and step_s is not None
    time_s = replace(link, compute_s=step_s).time_s
    return min(recipes, key=lambda r: r.steps * time_s(r.received_bytes(numel, num_workers), r.trips))
