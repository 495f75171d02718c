"""How training examples are divided among workers, and the order each worker draws them in."""

from difflib import get_close_matches

import torch
from torch import Tensor

from regtopk.errors import ArgumentError

SPLITS = ("iid", "sorted", "dirichlet")


def check_split(split: str) -> tuple[str, float]:
    """Read "iid", "sorted", "sorted:SHARDS" or "dirichlet:ALPHA"."""
    kind, _, text = split.partition(":")
    default = {"iid": 0.0, "sorted": 2.0, "dirichlet": 0.5}
    if kind not in default:
        nearest = get_close_matches(kind, SPLITS, n=1, cutoff=0.0)[0]
        raise ArgumentError(
            f"split must be iid, sorted[:SHARDS] or dirichlet[:ALPHA], got {split!r} "
            f"(did you mean {nearest!r}?)"
        )
    try:
        number = float(text) if text else default[kind]
    except ValueError:
        number = -1.0
    is_fine = number > 0 if kind == "dirichlet" else number == 0 if kind == "iid" else number >= 1
    if not is_fine or (kind == "sorted" and number != int(number)):
        raise ArgumentError(
            f"split must be iid, sorted[:SHARDS >= 1] or dirichlet[:ALPHA > 0], got {split!r}"
        )
    return kind, number


def divide(labels: Tensor, num_workers: int, split: str, seed: int) -> list[Tensor]:
    """Which examples each worker has: N lists of indices, on the CPU.

    iid: a shuffle cut evenly. sorted: by label, cut into SHARDS N pieces, SHARDS of them a worker at random.
    dirichlet: each class is divided by a draw from Dirichlet(ALPHA), so sizes differ too.
    """
    kind, number = check_split(split)
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


def _dirichlet(
    by_label: Tensor, labels: Tensor, num_workers: int, alpha: float, generator: torch.Generator
) -> list[Tensor]:
    parts: list[list[Tensor]] = [[] for _ in range(num_workers)]
    for label in labels.unique().tolist():
        members = by_label[labels[by_label] == label]
        concentration = torch.full((num_workers,), alpha, dtype=torch.float64)
        share = torch._standard_gamma(concentration, generator=generator)
        cuts = (share.cumsum(0) / share.sum() * len(members)).round().long()[:-1]
        for pieces, piece in zip(parts, members.tensor_split(cuts), strict=True):
            pieces.append(piece)
    divided = [torch.cat(pieces) for pieces in parts]
    for worker in range(num_workers):  # a worker without examples cannot train
        if len(divided[worker]) == 0:
            donor = max(range(num_workers), key=lambda n: len(divided[n]))
            divided[worker], divided[donor] = divided[donor][:1], divided[donor][1:]
    return divided


def batch_order(parts: list[Tensor], batch_size: int, num_steps: int, seed: int) -> Tensor:
    """The examples of every step, (T, N, B): each worker shuffles its own anew for every pass over them."""
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    columns = []
    for part in parts:
        needed, drawn = num_steps * batch_size, []
        while needed > 0:
            drawn.append(part[torch.randperm(len(part), generator=generator)])
            needed -= len(part)
        columns.append(torch.cat(drawn)[: num_steps * batch_size].view(num_steps, batch_size))
    return torch.stack(columns, dim=1)
