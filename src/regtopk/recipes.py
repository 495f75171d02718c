"""What we advise, as plain options: print a recipe, change it, pass it on.

>>> recipe = regtopk.recipes.transformer(num_workers=8)
>>> print(recipe)
>>> exchange = regtopk.UpdateExchange(model, [muon, adamw], recipe.algorithm, **recipe.options)

docs/which-method.md says what was measured.
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
from regtopk.core.traffic import goes_directly
from regtopk.errors import ArgumentError
from regtopk.rounds import Outer

INDEX_CODE = "elias-fano"  # of what names none
MORE_FROM, MANY_FROM = 9, 17  # workers; 8, 16 and 32 are measured


@dataclass(frozen=True)
class ExchangeRecipe:
    """What to run on updates, and how often.

    Args:
        algorithm: what is run.
        steps: to the loss that dense training has after half of its steps, over dense's.
        every: local steps per round.
        fragments: parts of the model that are exchanged in turn.
        outer: of the SGD that applies the aggregate; None: it is applied as it is.
        index_code: how messages tell which entries they have.
        link: between ranks, if it is known: long messages then go the shorter way.
    """

    algorithm: TopK | Dense
    steps: float
    every: int
    fragments: int
    outer: Outer | None = None
    index_code: str = INDEX_CODE
    link: Link | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `UpdateExchange`."""
        outer = partial(torch.optim.SGD, **self.outer._asdict()) if self.outer else None
        told = {name: getattr(self, name) for name in ("every", "fragments", "index_code", "link")}
        return {**told, "outer": outer}

    def trips(self, numel: int, num_workers: int) -> float:
        """Latencies per step over gloo: two a hop, as receivers first say that they are ready."""
        others, found = num_workers - 1, [(0, False), *self._messages(numel, num_workers)]  # an agreement
        ring = others + (self.index_code == "rice" and others > 1)  # which must know the lengths before
        direct = (not for_all or goes_directly(size, num_workers, self.link) for size, for_all in found)
        hops = [min(1, others) if is_direct else ring for is_direct in direct]
        return 2 * sum(hops) * self.fragments / self.every

    def received_bytes(self, numel: int, num_workers: int) -> float:
        """What a rank receives per step of a model of J parameters."""
        each = sum(size for size, _ in self._messages(numel, num_workers))
        return (num_workers - 1) * each * self.fragments / self.every

    def _messages(self, numel: int, num_workers: int) -> list[tuple[int, bool]]:
        """The bytes of what is sent to each rank of one fragment, and whether all ranks get the same."""
        size, algorithm = math.ceil(numel / self.fragments), self.algorithm
        if isinstance(algorithm, Dense):
            both = algorithm.value_code, algorithm.sum_code
            parts, sums = (max(region_bytes(size, num_workers, (), torch.float32, code)) for code in both)
            return [(parts, False), (sums, True)]
        codes: Any = {"value_code": algorithm.value_code, "index_code": self.index_code}
        owned = size if algorithm.returned is None else num_owned(size, num_workers)
        shares: Any = [share for share in (algorithm.density, algorithm.returned) if share is not None]
        counts = [max(1, round(share * owned)) for share in shares]
        *sent, last = (full_message_bytes(k, owned, dtype=torch.float32, **codes) for k in counts)
        return [*((num_bytes, False) for num_bytes in sent), (last, True)]


def _signs(steps: float, outer_lr: float, momentum: float) -> ExchangeRecipe:
    algorithm = TopK(density=0.24, value_code="sign", returned=0.3)
    return ExchangeRecipe(algorithm, steps, 8, 8, Outer(outer_lr, momentum, nesterov=True), "rice")


_FEW = (
    _signs(1.12, 0.7, 0.2),  # and MuLoCo, in one piece for links with latency
    ExchangeRecipe(Dense(value_code="2bit", sum_code="2bit"), 1.19, 16, 1, Outer(0.7, 0.6, nesterov=True)),
)
_MORE = (_signs(1.295, 0.7, 0.2),)  # from here on MuLoCo in 2 bits has not run
_MANY = (_signs(1.59, 0.9, 0.4),)


def for_workers(num_workers: int) -> tuple[ExchangeRecipe, ...]:
    """What we advise for so many workers; what needs the fewest steps first."""
    return _FEW if num_workers < MORE_FROM else _MORE if num_workers < MANY_FROM else _MANY


def transformer(
    num_workers: int, *, numel: int | None = None, step_s: float | None = None, link: Link | None = None
) -> ExchangeRecipe:
    """What to exchange for a transformer whose matrices are trained by Muon and the rest by AdamW.

    Without a link it is the one that needs the fewest steps to a loss. With a link it is the one whose steps
    take the least time in all: computation, messages, and latency as gloo pays it. From 9 workers on
    there is one recipe, in eight fragments: over a link with latency measure it beside rounds in one piece.
    `regtopk plan` also counts the processor's work, plans for NCCL, and says whether any pays.

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
    time_s, sizes = replace(link, compute_s=step_s).time_s, (numel, num_workers)
    known = [replace(recipe, link=link) for recipe in recipes]
    return min(known, key=lambda r: r.steps * time_s(r.received_bytes(*sizes), r.trips(*sizes)))
