"""Messages whose lengths only their senders know, in one trip where the last ones foretell them.

Over a link with latency a trip takes longer than a short message. So a message travels with its length, in a
row that has room for the longest of the last time and a little more. If a rank has a longer one, all ranks
see it, and the rest of every message makes a second trip. The first exchange makes two. So do all where
collectives run on a GPU, whose host would wait for the lengths anyway.
"""

from collections.abc import Sequence
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from regtopk.distributed.transport.collectives import Collectives, check_size

_NUMBER_BYTES = 8


class Sent(NamedTuple):
    """What a rank has for all ranks of one vector; `limits` are what is possible, in bytes and as a count."""

    messages: Sequence[Tensor]  # bytes: one for each rank, or one for all
    counts: Sequence[int]  # a number that goes with each
    limits: tuple[int, int]


class Received(NamedTuple):
    """What all ranks had for this one of one vector, in rank order."""

    rows: Tensor  # (N, longest), shorter ones followed by zeros
    sizes: list[int]
    counts: list[int]

    @property
    def messages(self) -> list[Tensor]:
        """Without the zeros."""
        return [row[:size] for row, size in zip(self.rows, self.sizes, strict=True)]


def exchange(collectives: Collectives, vectors: Sequence[Sent]) -> list[Received]:
    """Every rank's message for all, on every rank; or, if it has one for each, message r on rank r.

    Ranks hear only of what they receive. A rank with a length or count beyond the limits announces it to all,
    so that all refuse together, before memory is taken for it. What is damaged between two ranks is refused
    by the receiver alone.
    """
    by_rank = zip(*(sent.messages for sent in vectors), strict=True)
    joined = [each[0] if len(each) == 1 else torch.cat(each) for each in by_rank]
    is_for_all, limits = len(joined) == 1, [sent.limits for sent in vectors]
    told = _numbers(vectors)
    about = is_for_all, *limits
    room, start = collectives.rooms.get(about, 0), _NUMBER_BYTES * told.shape[1]
    rows = joined[0].new_zeros(len(joined), start + room)
    rows[:, :start] = told.view(torch.uint8).to(rows.device)
    for row, message in zip(rows, joined, strict=True):
        row[start:][: message.numel()] = message[:room]
    found = collectives.all_gather(rows[0]) if is_for_all else collectives.all_to_all_rows(rows)
    numbers = found[:, :start].contiguous().view(torch.int64).tolist()
    _check(numbers, limits, collectives.ranks)
    longest = max(row[0] for row in numbers)
    collectives.rooms[about] = _room(longest, start, collectives, rows.device, is_for_all)
    found = found[:, start : start + longest]
    if longest > room:
        rests = [message[room:] for message in joined]
        sizes = [max(0, sum(row[1::2]) - room) for row in numbers]
        found = torch.cat([found, _second_trip(collectives, rests, sizes, longest - room)], 1)
    return _by_vector(found, numbers)


def _numbers(vectors: Sequence[Sent]) -> Tensor:
    """What goes before the message for each rank: this rank's longest length, then lengths and counts."""
    sizes = [[message.numel() for message in sent.messages] for sent in vectors]
    told = torch.tensor([sizes, [sent.counts for sent in vectors]]).permute(2, 1, 0)
    limits = torch.tensor([sent.limits for sent in vectors])
    is_impossible = ((told < 0) | (told > limits)).flatten(1).any(1)
    if bool(is_impossible.any()):
        told = told[is_impossible][:1].expand_as(told)
    longest = told[..., 0].sum(1).max()
    return torch.cat([longest.expand(len(told), 1), told.flatten(1)], 1)


def _check(numbers: list[list[int]], limits: Sequence[tuple[int, int]], ranks: Sequence[int]) -> None:
    """Refuse what no rank can mean."""
    for rank, (longest, *told) in zip(ranks, numbers, strict=True):
        for number, limit in zip(told, (limit for pair in limits for limit in pair), strict=True):
            check_size(rank, number, limit)
        check_size(rank, longest, sum(size for size, _ in limits))
        check_size(rank, sum(told[::2]), longest)


def _room(longest: int, start: int, collectives: Collectives, device: torch.device, is_for_all: bool) -> int:
    """For how many bytes a row has room the next time: lengths vary by about their square root."""
    room = -(-(longest + 2 * isqrt(longest)) // _NUMBER_BYTES) * _NUMBER_BYTES
    if collectives.is_on_device(device) or (
        is_for_all and not collectives.goes_directly(start + room, device)
    ):
        return 0  # vectors that go round a ring: it would carry what is left free
    return room


def _second_trip(collectives: Collectives, rests: list[Tensor], sizes: list[int], longest: int) -> Tensor:
    """The rest of all messages, (N, longest)."""
    if len(rests) == 1:
        return collectives.all_gather_padded(rests[0], longest)
    found = pad_sequence(collectives.all_to_all(rests, sizes), batch_first=True)
    return pad(found, (0, longest - found.shape[1]))


def _by_vector(rows: Tensor, numbers: list[list[int]]) -> list[Received]:
    """What was joined, apart."""
    sizes, counts = (
        [list(each) for each in zip(*(row[at::2] for row in numbers), strict=True)] for at in (1, 2)
    )
    if len(sizes) == 1:
        return [Received(rows[:, : max(sizes[0])], sizes[0], counts[0])]
    parts = [row[: sum(row_sizes)].split(row_sizes) for row, *row_sizes in zip(rows, *sizes, strict=True)]
    columns = [pad_sequence(list(each), batch_first=True) for each in zip(*parts, strict=True)]
    return [Received(*each) for each in zip(columns, sizes, counts, strict=True)]
