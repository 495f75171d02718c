"""What we advise, as plain options: print a recipe, change it, pass it on.

>>> recipe = regtopk.recipes.transformer(num_workers=8)
>>> print(recipe)
>>> exchange = regtopk.UpdateExchange(model, [muon, adamw], recipe.algorithm, **recipe.options)

docs/transformers.md and docs/returned.md say what was measured. The second recipe with `returned`, for links
that are slower still, was not.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from regtopk.algorithms import TopK
from regtopk.core.codes import full_message_bytes
from regtopk.core.link import Link
from regtopk.core.options import check_integer, check_positive
from regtopk.core.owners import num_owned
from regtopk.errors import ArgumentError

# Workers: with Muon and as many bytes it is level or a little ahead with 8 (two texts), and far ahead with 32
# and 64. 16 is not measured, and nothing is with AdamW alone.
RETURNED_FROM = 17


@dataclass(frozen=True)
class ExchangeRecipe:
    """What to run on updates, and how often.

    Args:
        algorithm: what is run.
        every: local steps per round.
        fragments: parts of the model that are exchanged in turn.
    """

    algorithm: TopK
    every: int
    fragments: int

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `UpdateExchange`."""
        return {"every": self.every, "fragments": self.fragments}

    @property
    def trips(self) -> float:
        """How often messages cross the network per step."""
        per_exchange = 1 if self.algorithm.returned is None else 2
        return per_exchange * self.fragments / self.every

    def received_bytes(self, numel: int, num_workers: int) -> float:
        """What a rank receives per step of a model of J parameters."""
        size, others = math.ceil(numel / self.fragments), num_workers - 1
        density, returned = self.algorithm.density, self.algorithm.returned
        assert isinstance(density, float)

        def message(part: float, of: int) -> int:
            codes = {"value_code": self.algorithm.value_code, "index_code": "elias-fano"}
            return full_message_bytes(max(1, round(part * of)), of, dtype=torch.float32, **codes)

        if returned is None:
            per_exchange = message(density, size)
        else:
            size = num_owned(size, num_workers)
            per_exchange = message(density, size) + message(returned, size)
        return others * per_exchange * self.fragments / self.every


def _recipe(every: int, **options: Any) -> ExchangeRecipe:
    return ExchangeRecipe(TopK(value_code="2bit", **options), every, fragments=every)


# In the order of their bytes, most first.
_GATHERED = (_recipe(4, density=0.026, impute=0.15), _recipe(8, density=0.0041, impute=0.1))
_RETURNED = (_recipe(4, density=0.03, returned=0.03), _recipe(8, density=0.005, returned=0.005))


def for_workers(num_workers: int) -> tuple[ExchangeRecipe, ...]:
    """What we advise for so many workers, the most bytes first."""
    return _RETURNED if num_workers >= RETURNED_FROM else _GATHERED


def transformer(
    num_workers: int, *, numel: int | None = None, step_s: float | None = None, link: Link | None = None
) -> ExchangeRecipe:
    """What to exchange for a transformer whose matrices are trained by Muon and the rest by AdamW.

    Without a link it is the one with the most bytes. With a link it is the first, from the most bytes to the
    fewest, whose messages take at most as long as the computation of a step, latency included.

    Args:
        num_workers: N.
        numel: the model's parameters; with a link only.
        step_s: seconds that a step computes; with a link only.
        link: what is known of the link between ranks.
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
    alone = replace(link, compute_s=0.0)
    for recipe in recipes:
        if alone.time_s(recipe.received_bytes(numel, num_workers), recipe.trips) <= step_s:
            return recipe
    return recipes[-1]
