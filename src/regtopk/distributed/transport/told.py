"""Messages whose lengths only their senders know, in one trip where the last ones foretell them.

Over a link with latency a trip takes longer than a short message. So a message travels with its length, in a
row that has room for the last one from this rank to that one, and a little more. If a message is longer, all
ranks hear it, and the rest of every message makes a second trip. The first exchange makes two. So do those
of long messages for all, which go round a ring, and all where collectives run on a GPU, whose host would wait
for the lengths anyway.
"""

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from regtopk.distributed.transport.collectives import Collectives, check_size
from regtopk.distributed.transport.rooms import Room
from regtopk.errors import ClusterError


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

    A rank with a length or count beyond the limits announces it to all, so that all refuse together, before
    memory is taken for it. What is damaged between two ranks is refused by the receiver alone.
    """
    by_rank = zip(*(sent.messages for sent in vectors), strict=True)
    joined = [each[0] if len(each) == 1 else torch.cat(each) for each in by_rank]
    is_for_all, device = len(joined) == 1, joined[0].device
    messages = joined * collectives.num_workers if is_for_all else joined
    kind = is_for_all, *collectives.rooms.next_kind()
    room = collectives.rooms.of(kind, collectives.num_workers)
    is_longer = any(message.numel() > size for message, size in zip(messages, room.to_each, strict=True))
    heads = _heads(is_longer, vectors, len(messages)).to(device)
    found = collectives.all_to_all(
        [_row(*each) for each in zip(heads, messages, room.to_each, strict=True)],
        [heads.shape[1] + size for size in room.from_each],
    )
    are_longer, numbers = _read(torch.stack([row[: heads.shape[1]] for row in found]), vectors, collectives)
    sizes = [sum(row[::2]) for row in numbers]
    theirs = [row[heads.shape[1] :][:size] for row, size in zip(found, sizes, strict=True)]
    if any(are_longer):
        rests = _second_trip(collectives, joined, room, sizes)
        theirs = [torch.cat(each) for each in zip(theirs, rests, strict=True)]
    if is_for_all and not collectives.goes_directly(max(sizes), device):
        collectives.rooms.drop(kind)
    elif not collectives.is_on_device(device):
        collectives.rooms.keep(kind, [message.numel() for message in messages], sizes)
    return _by_vector(theirs, numbers)


def _heads(is_longer: bool, vectors: Sequence[Sent], num_workers: int) -> Tensor:
    """What goes before each message, (N, bytes): has this rank a longer one, lengths and counts, checksum."""
    each = [list(zip(map(Tensor.numel, sent.messages), sent.counts, strict=True)) for sent in vectors]
    rows = [[number for pair in pairs for number in pair] for pairs in zip(*each, strict=True)]
    limits = _limits(vectors)
    impossible = [row for row in rows if any(not 0 <= n <= most for n, most in zip(row, limits, strict=True))]
    rows = [[int(is_longer), *row] for row in impossible[:1] or rows]
    whole = torch.tensor([[*row, _checksum(row)] for row in rows]).view(torch.uint8)
    return whole.expand(num_workers, -1) if len(rows) == 1 else whole


def _read(
    heads: Tensor, vectors: Sequence[Sent], collectives: Collectives
) -> tuple[list[int], list[list[int]]]:
    """Has each rank a longer message; and its lengths and counts. What no rank can mean is refused."""
    are_longer, numbers = [], []
    for rank, (*row, checksum) in zip(collectives.ranks, heads.view(torch.int64).tolist(), strict=True):
        if checksum != _checksum(row):
            raise ClusterError(
                f"the length of a message must arrive as rank {rank} sent it, but it was damaged on its way; "
                "restart all ranks from the last checkpoint"
            )
        for number, limit in zip(row[1:], _limits(vectors), strict=True):
            check_size(rank, number, limit)
        are_longer.append(row[0])
        numbers.append(row[1:])
    return are_longer, numbers


def _checksum(row: list[int]) -> int:
    return crc32(repr(row).encode())


def _limits(vectors: Sequence[Sent]) -> list[int]:
    return [limit for sent in vectors for limit in sent.limits]


def _row(head: Tensor, message: Tensor, size: int) -> Tensor:
    """A message, as far as it has room, behind its head, and followed by zeros."""
    return torch.cat([head, pad(message[:size], (0, max(0, size - message.numel())))])


def _second_trip(
    collectives: Collectives, joined: list[Tensor], room: Room, sizes: list[int]
) -> list[Tensor]:
    """What had no room, of all ranks' messages."""
    to_each = room.to_each[:1] if len(joined) == 1 else room.to_each  # one for all has one length
    rests = [message[size:] for message, size in zip(joined, to_each, strict=True)]
    theirs = [max(0, size - known) for size, known in zip(sizes, room.from_each, strict=True)]
    if len(joined) > 1:
        return collectives.all_to_all(rests, theirs)
    rows = collectives.all_gather_padded(rests[0], max(theirs))
    return [row[:size] for row, size in zip(rows, theirs, strict=True)]


def _by_vector(messages: list[Tensor], numbers: list[list[int]]) -> list[Received]:
    """What was joined, apart."""
    sizes, counts = [row[::2] for row in numbers], [row[1::2] for row in numbers]
    parts = [message.split(each) for message, each in zip(messages, sizes, strict=True)]
    rows = [pad_sequence(list(column), batch_first=True) for column in zip(*parts, strict=True)]
    columns = zip(rows, zip(*sizes, strict=True), zip(*counts, strict=True), strict=True)
    return [Received(found, list(lengths), list(those)) for found, lengths, those in columns]
