"""Every rank's vector on every rank: sparse vectors and index sets as messages, others as they are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regtopk.core.codes import longest_message_bytes
from regtopk.core.requests import Gather, Gathered
from regtopk.core.sparse import SparseGradient, index_set
from regtopk.core.traffic import numbers_bytes
from regtopk.distributed.collectives import as_bytes
from regtopk.distributed.rank import Rank
from regtopk.wire import decode_rows, decode_segment

LONGEST_GATHERED_BYTES = 1 << 32  # of a vector that travels as it is: a longer one can only be damage


def gather(rank: Rank, request: Gather) -> Gathered:
    """Every rank's vector, (N, m), in rank order."""
    tensor = request.tensor
    if request.numel is not None:
        ((found, _),) = gather_sparse(rank, [(index_set(tensor, request.numel, request.count), None)])
        return Gathered(found.indices, found.counts)
    count = tensor.shape[-1] if request.count is None else int(request.count)
    sent = tensor[: 0 if rank.is_idle else count]
    with rank.timer.phase("collective_s"):
        limits = 2 * (LONGEST_GATHERED_BYTES // tensor.itemsize,)
        numbers = rank.collectives.all_gather_sizes((sent.numel(), tensor.shape[-1]), limits, tensor.device)
        counts, capacities = ([row[i] for row in numbers] for i in (0, 1))
        rows = rank.collectives.all_gather_padded(as_bytes(sent), max(capacities) * tensor.itemsize)
    sizes = [count * tensor.itemsize for count in counts]
    rank.count_gather(sizes[rank.index], sizes)
    rank.record.num_entries += counts[rank.index]
    return Gathered(rows.view(tensor.dtype), torch.tensor(counts, device=rows.device))


def gather_sparse(
    rank: Rank, parts: Sequence[tuple[SparseGradient, Tensor | None]]
) -> list[tuple[SparseGradient, Tensor | None]]:
    """Every rank's sparse vectors, each (N, m), decoded, and the numbers that came along with each.

    Padding is entry 0 of value 0. What is wrong with a message is raised later: see `Rank.check_later`.

    Args:
        rank: this one.
        parts: this rank's sparse vectors, and a few numbers or None; if all ranks' are equally long, they
            travel together.
    """
    if len(parts) > 1 and not all(_is_even(rank, sparse) for sparse, _ in parts):
        return [found for part in parts for found in gather_sparse(rank, [part])]
    with rank.timer.phase("encode_s"):
        messages = [rank.encoded(*part) for part in parts]
    if not messages:
        return []
    lengths, capacities = (
        [message.numel() for message in messages],
        [sparse.indices.shape[-1] for sparse, _ in parts],
    )
    with rank.timer.phase("collective_s"):
        if _is_even(rank, parts[0][0]):
            sizes = [sum(lengths)] * rank.num_workers
            everyones = rank.collectives.all_gather(messages[0] if len(parts) == 1 else torch.cat(messages))
        else:
            everyones, sizes, capacities[0] = _gather_uneven(rank, messages[0], *parts[0])
            lengths = [max(sizes)]
    rank.count_gather(sum(message.numel() for message in messages), sizes)
    with rank.timer.phase("decode_s"):
        rows = everyones.split(lengths, dim=-1)
        return [
            _decode(rank, *each) for each in zip(rows, capacities, *zip(*parts, strict=True), strict=True)
        ]


def _is_even(rank: Rank, sparse: SparseGradient) -> bool:
    """Whether all ranks' messages are known to have the same length."""
    return sparse.count is None and rank.index_code != "rice" and not rank.idle


def _gather_uneven(
    rank: Rank, message: Tensor, sparse: SparseGradient, numbers: Tensor | None
) -> tuple[Tensor, list[int], int]:
    """Every rank's message, as rows of one length, their sizes, and the most entries that one may hold."""
    limits = longest_message_bytes(sparse.numel) + numbers_bytes(numbers), sparse.numel
    own = message.numel(), sparse.indices.shape[-1]
    told = rank.collectives.all_gather_sizes(own, limits, message.device)
    sizes, capacities = ([row[i] for row in told] for i in (0, 1))
    return rank.collectives.all_gather_padded(message, max(sizes)), sizes, max(capacities)


def _decode(
    rank: Rank, messages: Tensor, capacity: int, sparse: SparseGradient, numbers: Tensor | None
) -> tuple[SparseGradient, Tensor | None]:
    """The ranks' messages as rows of equal capacity, and their numbers; a rank of weight zero sent none."""
    start = numbers_bytes(numbers)
    everyones = None if numbers is None else _decode_numbers(rank, messages[:, :start], numbers)
    code, dtype = sparse.code, sparse.values.dtype
    found, status = decode_rows(
        rank.of_active(messages[:, start:]), sparse.numel, capacity, rank.index_code, code, dtype
    )
    rank.check_later(status)
    indices, values, counts = map(rank.by_rank, (found.indices, found.values, found.counts))
    return SparseGradient(indices, values, sparse.numel, counts, code), everyones


def _decode_numbers(rank: Rank, messages: Tensor, numbers: Tensor) -> Tensor:
    """The ranks' numbers, (N, m); zeros for a rank of weight zero."""
    found, status = decode_segment(rank.of_active(messages), numbers.numel(), dtype=numbers.dtype)
    rank.check_later(status)
    return rank.by_rank(found)
