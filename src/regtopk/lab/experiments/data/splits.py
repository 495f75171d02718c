"""How training examples are divided among workers, how workers weigh, and the order each draws them in."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from regtopk.core.options import did_you_mean, read_number
from regtopk.errors import ArgumentError

RULE = "split must be iid, sorted[:SHARDS >= 1] or dirichlet[:ALPHA > 0]"
DEFAULTS = {"iid": 0.0, "sorted": 2.0, "dirichlet": 0.5}  # of the number after the colon


def check_split(split: str) -> tuple[str, float]:
    """Read "iid", "sorted", "sorted:SHARDS" or "dirichlet:ALPHA"."""
    kind, _, text = split.partition(":")
    try:
        number = read_number(float, text) if text else DEFAULTS.get(kind, 0.0)
    except ValueError:
        number = -1.0
    is_fine = (
        split == "iid"
        or (kind == "sorted" and number >= 1 and number.is_integer())
        or (kind == "dirichlet" and 0 < number < float("inf"))
    )
    if not is_fine:
        raise ArgumentError(f"{RULE}, got {split!r}{did_you_mean(kind, DEFAULTS)}")
    return kind, number


def divide(labels: Tensor, num_workers: int, split: str, seed: int) -> list[Tensor]:
    """Which examples each worker has: N lists of indices, on the CPU.

    iid: the examples are shuffled and cut evenly. sorted: they are sorted by label and cut into SHARDS N
    pieces, and each worker draws SHARDS. dirichlet: each class is divided by a draw from Dirichlet(ALPHA), so
    sizes differ too.
    """
    kind, number = check_split(split)
    least = num_workers * (int(number) if kind == "sorted" else 1)
    if len(labels) < least:
        raise ArgumentError(
            f"num_workers={num_workers} and split={split!r} need at least {least} examples, got {len(labels)}"
        )
    generator = torch.Generator().manual_seed(seed)
    labels = labels.cpu()
    shuffled = torch.randperm(len(labels), generator=generator)
    if kind == "iid":
        return list(shuffled.tensor_split(num_workers))
    by_label = shuffled[labels[shuffled].sort(stable=True).indices]
    if kind == "sorted":
        shards = by_label.tensor_split(int(number) * num_workers)
        order = torch.randperm(len(shards), generator=generator).tensor_split(num_workers)
        return [torch.cat([shards[i] for i in chosen.tolist()]) for chosen in order]
    return _dirichlet(by_label, labels, num_workers, number, generator)


def weights_of(parts: Sequence[Tensor], split: str) -> list[float]:
    """w_n = D_n / D where sizes differ by intention, 1/N where they only differ by a remainder."""
    if check_split(split)[0] != "dirichlet":
        return [1 / len(parts)] * len(parts)
    total = sum(len(part) for part in parts)
    return [len(part) / total for part in parts]


def _dirichlet(
    by_label: Tensor, labels: Tensor, num_workers: int, alpha: float, generator: torch.Generator
) -> list[Tensor]:
    by_class = []
    for label in labels.unique().tolist():
        members = by_label[labels[by_label] == label]
        cuts = (dirichlet_shares(num_workers, alpha, generator).cumsum(0) * len(members)).round().long()[:-1]
        by_class.append(members.tensor_split(cuts))
    divided = [torch.cat(pieces) for pieces in zip(*by_class, strict=True)]
    for worker in range(num_workers):  # a worker without examples cannot train
        if len(divided[worker]) == 0:
            donor = max(range(num_workers), key=lambda n: len(divided[n]))
            divided[worker], divided[donor] = divided[donor][:1], divided[donor][1:]
    return divided


def dirichlet_shares(num: int, alpha: float, generator: torch.Generator) -> Tensor:
    """One draw of `num` shares that sum to one, by logarithms: of a small alpha the gammas underflow.

    Gamma(alpha) = Gamma(alpha + 1) · U^(1 / alpha) with U uniform.
    """
    gamma = torch._standard_gamma(torch.full((num,), alpha + 1, dtype=torch.float64), generator=generator)
    uniform = torch.rand(num, dtype=torch.float64, generator=generator)
    return (gamma.log() + uniform.log() / alpha).softmax(0)


def batch_order(parts: list[Tensor], batch_size: int, num_steps: int, seed: int) -> Tensor:
    """The examples of every step, (T, N, B): each worker shuffles its own anew for every pass over them."""
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    columns, num = [], num_steps * batch_size
    for part in parts:
        passes = range(math.ceil(num / len(part)))
        drawn = torch.cat([part[torch.randperm(len(part), generator=generator)] for _ in passes])
        columns.append(drawn[:num].view(num_steps, batch_size))
    return torch.stack(columns, dim=1)
