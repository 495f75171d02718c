"""Per-worker state for other ranks or other weights than it was saved with."""

from typing import Any

import torch
from torch import Tensor

from regtopk.core.state import OnResize


def resized_worker(
    saved: dict[str, Any], weights: list[float], rank: int, rules: dict[str, OnResize]
) -> dict[str, Any]:
    """What a new rank starts from, by each field's rule: sum_n w_n e_n stays what it was.

    weighted_sum   e'_m = sum of w_n e_n over the old workers n given to m, over w'_m
    shared         copied
    reset          left out, so it starts anew

    Old ranks go, in order and evenly, to the new ranks that have weight.

    Args:
        saved: a state dict with all old ranks.
        weights: w'_m of all new ranks.
        rank: m.
        rules: of each state field.
    """
    old_weights = saved["weights"]
    old = [saved["workers"][str(n)] for n in range(len(old_weights))]
    heirs = [m for m, weight in enumerate(weights) if weight > 0]
    given = [n for n in range(len(old)) if heirs[n * len(heirs) // len(old)] == rank]

    def weighted_sum(name: str, field: str, like: Tensor) -> Tensor:
        total = torch.zeros_like(like, dtype=torch.float64)
        for n in given:
            total += old_weights[n] * old[n]["entries"][name][field].double() / weights[rank]
        return total

    entries = {
        name: {
            field: first if rules[field] == "shared" else weighted_sum(name, field, first)
            for field, first in parts.items()
        }
        for name, parts in old[0]["entries"].items()
    }
    groups = tuple(
        {field: tensor for field, tensor in group.items() if rules[field] == "shared"}
        for group in old[0]["groups"]
    )
    return {
        "entries": entries,
        "groups": groups,
        "report": old[0]["report"],
    }  # rank 0's is the one that counts
