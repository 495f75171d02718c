"""Owners of entries: who adds up an entry where sums come back in part.

Entry j belongs to worker j mod A of the A workers that have weight, and is entry j // A of what it owns. So
every owner has as many entries of each layer as any other, and about as many bytes to receive. `for_owners_`
deals them out, and `entries_of` says where they came from.
"""

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from regtopk.core.codes import quantise
from regtopk.core.sparse import SparseGradient


def entries_of(owners: Tensor | int, places: Tensor, num_owners: int) -> Tensor:
    """Where entries that owners have at some places are in the vector."""
    return places * num_owners + owners


def num_owned(numel: int, num_owners: int) -> int:
    """How many entries an owner has; some have one less, whose place stays empty."""
    return -(-numel // num_owners)


def num_returned(returned: float, numel: int, num_owners: int) -> int:
    """How many entries an owner sends back: its share of max(1, round(returned J)), rounded up."""
    return -(-max(1, round(returned * numel)) // num_owners)


def for_owners_(residual: Tensor, sent: SparseGradient, num_owners: int, code: str) -> SparseGradient:
    """What is sent, (..., k), uncoded, as a message for each owner, (..., A, m), in a value code.

    The residual gets back what the code loses.
    """
    owner = sent.indices % num_owners
    order = owner.to(torch.int16 if num_owners < 1 << 15 else torch.int32).argsort(dim=-1, stable=True)
    count = owner.new_zeros(*owner.shape[:-1], num_owners).scatter_add_(-1, owner, torch.ones_like(owner))
    first = count.cumsum(-1) - count
    place = torch.arange(max(1, int(count.max())), device=owner.device)
    is_valid = place < count.unsqueeze(-1)
    at = order.gather(-1, (first.unsqueeze(-1) + place).where(is_valid, 0).flatten(-2))
    indices, values = (t.gather(-1, at).view(is_valid.shape) for t in (sent.indices, sent.values))
    indices, values = indices.where(is_valid, 0), values.where(is_valid, 0)
    coded = quantise(values, code, count)
    residual.scatter_add_(-1, indices.flatten(-2), (values - coded).flatten(-2))
    return SparseGradient(indices // num_owners, coded, num_owned(sent.numel, num_owners), count, code)


def owed_to(fields: Container[str]) -> str:
    """The field of a state that takes up what an owner owed, or a code lost.

    It is the residual, which is sent later. EF21 has none, and takes it out of its estimate instead.
    """
    return "residual" if "residual" in fields else "unarrived"


def owed_by(rank: int, owed: Tensor, weights: Sequence[float], numel: int) -> Tensor:
    """What a rank owes, (L,), as a part of its residual, (J,) float64: over its weight."""
    owners = [n for n, weight in enumerate(weights) if weight > 0]
    part = owed.new_zeros(len(owners) * owed.shape[-1], dtype=torch.float64)
    if rank in owners:
        places = torch.arange(owed.shape[-1], device=owed.device)
        part[entries_of(owners.index(rank), places, len(owners))] = owed.double() / weights[rank]
    return part[:numel]
