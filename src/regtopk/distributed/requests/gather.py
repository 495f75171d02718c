"""Every rank's vector, or one rank's, on every rank: index sets and sparse ones as messages."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regtopk.core.codes import longest_message_bytes
from regtopk.core.requests import Broadcast, Gather, Gathered
from regtopk.core.sparse import SparseGradient, index_set
from regtopk.distributed.requests.rank import Rank
from regtopk.distributed.transport import told
from regtopk.distributed.transport.collectives import as_bytes, check_size
from regtopk.wire import decode, decode_rows, encode

LONGEST_GATHERED_BYTES = 1 << 32  # of a vector that travels as it is: a longer one can only be damage


def gather(rank: Rank, request: Gather) -> Gathered:
    """Every rank's vector, (N, m), in rank order."""
    tensor = request.tensor
    if request.numel is not None:
        (sets,) = gather_sparse(rank, [index_set(tensor, request.numel, request.count)])
        return Gathered(sets.indices, sets.counts)
    count = tensor.shape[-1] if request.count is None else int(request.count)
    sent = as_bytes(tensor[: 0 if rank.is_idle else count])
    with rank.timer.phase("collective_s"):
        limits = LONGEST_GATHERED_BYTES, LONGEST_GATHERED_BYTES // tensor.itemsize
        (found,) = told.exchange(rank.collectives, [told.Sent([sent], [tensor.shape[-1]], limits)])
    rank.count_gather(sent.numel(), found.sizes)
    rank.record.num_entries += sent.numel() // tensor.itemsize
    rows = pad(found.rows, (0, max(found.counts) * tensor.itemsize - found.rows.shape[1])).contiguous()
    counts = torch.tensor(found.sizes, device=rows.device) // tensor.itemsize
    return Gathered(rows.view(tensor.dtype), counts)


def gather_sparse(rank: Rank, parts: Sequence[SparseGradient]) -> list[SparseGradient]:
    """Every rank's sparse vectors, each (N, m), or (U, N, m) of a batch (U, 1, m).

    Padding is entry 0 of value 0. Vectors that are equally long on all ranks travel together. What is wrong
    with a message is raised later: see `Rank.check_later`.
    """
    # no sizes to ask for: every code but "rice" gives messages of one length for one number of entries
    is_even = [not rank.idle and part.count is None and rank.index_code != "rice" for part in parts]
    found: dict[int, SparseGradient] = {}
    for are_even, gathered in ((True, _gather_together), (False, _gather_told)):
        places = [place for place, each in enumerate(is_even) if each is are_even]
        if places:
            found |= zip(places, gathered(rank, [parts[place] for place in places]), strict=True)
    return [found[place] for place in range(len(parts))]


def _gather_told(rank: Rank, parts: Sequence[SparseGradient]) -> list[SparseGradient]:
    """Vectors that may have other lengths on every rank, which tell one another."""
    with rank.timer.phase("encode_s"):
        sent = [
            told.Sent(
                [rank.encoded(part)],
                [part.indices.shape[-1]],
                (longest_message_bytes(part.numel), part.numel),
            )
            for part in parts
        ]
    with rank.timer.phase("collective_s"):
        received = told.exchange(rank.collectives, sent)
    for theirs in received:
        rank.count_gather(theirs.sizes[rank.index], theirs.sizes)
    found = []
    with rank.timer.phase("decode_s"):
        for part, theirs in zip(parts, received, strict=True):
            codes = rank.index_code, part.code, part.values.dtype
            rows, status = decode_rows(rank.of_active(theirs.rows), part.numel, max(theirs.counts), *codes)
            rank.check_later(status)
            indices, values, counts = map(rank.by_rank, (rows.indices, rows.values, rows.counts))
            found.append(SparseGradient(indices, values, part.numel, counts, part.code))
    return found


def _gather_together(rank: Rank, parts: Sequence[SparseGradient]) -> list[SparseGradient]:
    """Vectors of known lengths: one collective for all of them; those of one kind are coded as one batch."""
    kinds: dict[Any, list[int]] = {}
    for number, part in enumerate(parts):
        key = part.numel, part.indices.shape[-1], part.values.dtype, part.code
        kinds.setdefault(key, []).append(number)
    batches = [_as_batch([parts[number] for number in numbers]) for numbers in kinds.values()]
    with rank.timer.phase("encode_s"):
        messages = [encode(batch, rank.index_code) for batch in batches]
    with rank.timer.phase("collective_s"):
        gathered = rank.collectives.all_gather(_joined([each.flatten() for each in messages]))
    rank.count_gather(gathered.shape[1], [gathered.shape[1]] * rank.num_workers)
    found: dict[int, SparseGradient] = {}
    with rank.timer.phase("decode_s"):
        sections = gathered.split_with_sizes([each.numel() for each in messages], -1)
        for numbers, batch, message, section in zip(kinds.values(), batches, messages, sections, strict=True):
            of_each = section.unflatten(-1, message.shape).transpose(0, 1).flatten(0, 1)
            codes = rank.index_code, batch.code, batch.values.dtype
            rows, status = decode_rows(of_each, batch.numel, batch.indices.shape[-1], *codes)
            rank.check_later(status.view(len(batch.indices), -1))
            stop = 0
            for number in numbers:
                shape = *parts[number].indices.shape[:-2], rank.num_workers
                start, stop = stop, stop + math.prod(shape)
                columns = (rows.indices, rows.values, rows.counts)
                indices, values, counts = (t[start:stop].view(*shape, *t.shape[1:]) for t in columns)
                found[number] = SparseGradient(indices, values, batch.numel, counts, batch.code)
    return [found[number] for number in range(len(parts))]


def _as_batch(parts: list[SparseGradient]) -> SparseGradient:
    """Vectors of one kind, each (m,) or (U, 1, m), as rows, (R, m)."""
    columns = [[t.reshape(-1, t.shape[-1]) for t in (part.indices, part.values)] for part in parts]
    indices, values = map(_joined, zip(*columns, strict=True))
    return SparseGradient(indices, values, parts[0].numel, code=parts[0].code)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """All of them as one; one alone is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def broadcast(rank: Rank, request: Broadcast) -> Tensor:
    """The vector of rank `request.source`, (m,)."""
    tensor, source, numel = request.tensor, request.source, request.numel
    is_source, passes_on = rank.index == source, rank.index != (source - 1) % rank.num_workers
    with rank.timer.phase("encode_s"):
        if numel is None:
            message = as_bytes(tensor.clone())
        else:
            message = encode(index_set(tensor, numel), rank.index_code)
    with rank.timer.phase("collective_s"):
        if numel is not None and rank.index_code == "rice":
            length = torch.tensor([message.numel()], device=message.device)
            size = int(rank.collectives.broadcast(length, source))
            check_size(rank.collectives.ranks[source], size, longest_message_bytes(numel))
            message = message if is_source else message.new_zeros(size)
        rank.collectives.broadcast(message, source)
    size = message.numel()
    rank.count(size * is_source, size * passes_on, size * (not is_source))
    if numel is None:
        rank.record.num_entries += tensor.numel() * is_source
        return message.view(tensor.dtype)
    with rank.timer.phase("decode_s"):
        return decode(message, numel).indices
