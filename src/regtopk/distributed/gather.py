"""Every rank's vector on every rank: sparse vectors and index sets as messages, others as they are."""

import torch
from torch import Tensor

from regtopk.core.codes import longest_message_bytes
from regtopk.core.requests import Gather, Gathered
from regtopk.core.sparse import SparseGradient, index_set
from regtopk.core.traffic import numbers_bytes
from regtopk.distributed.collectives import as_bytes
from regtopk.distributed.rank import Rank
from regtopk.wire import decode_rows, decode_segment, raise_for_status

LONGEST_GATHERED_BYTES = 1 << 32  # of a vector that travels as it is: a longer one can only be damage


def gather(rank: Rank, request: Gather) -> Gathered:
    """Every rank's vector, (N, m), in rank order."""
    tensor = request.tensor
    if request.numel is not None:
        found, _ = gather_sparse(rank, index_set(tensor, request.numel, request.count))
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
    rank: Rank, sparse: SparseGradient, numbers: Tensor | None = None
) -> tuple[SparseGradient, Tensor | None]:
    """Every rank's sparse vector, (N, m), decoded and checked, and the numbers that came along."""
    with rank.timer.phase("encode_s"):
        message = rank.encoded(sparse, numbers)
    capacity = sparse.indices.shape[-1]
    sizes = [message.numel()] * rank.num_workers
    is_even = sparse.count is None and rank.index_code != "rice" and not rank.idle
    with rank.timer.phase("collective_s"):
        if is_even:
            messages = rank.collectives.all_gather(message)
        else:
            limits = longest_message_bytes(sparse.numel) + numbers_bytes(numbers), sparse.numel
            told = rank.collectives.all_gather_sizes((message.numel(), capacity), limits, message.device)
            sizes, capacities = ([row[i] for row in told] for i in (0, 1))
            capacity = max(capacities)
            messages = rank.collectives.all_gather_padded(message, max(sizes))
    rank.count_gather(message.numel(), sizes)
    with rank.timer.phase("decode_s"):
        start = numbers_bytes(numbers)
        everyones = None if numbers is None else _decode_numbers(rank, messages[:, :start], numbers)
        return _decode(rank, messages[:, start:], capacity, sparse), everyones


def _decode_numbers(rank: Rank, messages: Tensor, numbers: Tensor) -> Tensor:
    """The ranks' numbers, (N, m); zeros for a rank of weight zero."""
    found, status = decode_segment(rank.of_active(messages), numbers.numel(), dtype=numbers.dtype)
    raise_for_status(rank.by_rank(status))
    return rank.by_rank(found)


def _decode(rank: Rank, messages: Tensor, capacity: int, sparse: SparseGradient) -> SparseGradient:
    """The ranks' messages as rows of equal capacity; a rank of weight zero sent none."""
    code, dtype = sparse.code, sparse.values.dtype
    found, status = decode_rows(
        rank.of_active(messages), sparse.numel, capacity, rank.index_code, code, dtype
    )
    raise_for_status(rank.by_rank(status))
    indices, values, counts = map(rank.by_rank, (found.indices, found.values, found.counts))
    return SparseGradient(indices, values, sparse.numel, counts, code)
