"""One rank's vector on every rank: index sets as messages, other vectors as they are."""

import torch
from torch import Tensor

from regtopk.core.codes import longest_message_bytes
from regtopk.core.requests import Broadcast
from regtopk.core.sparse import index_set
from regtopk.distributed.requests.rank import Rank
from regtopk.distributed.transport.collectives import as_bytes, check_size
from regtopk.wire import decode, encode


def broadcast(rank: Rank, request: Broadcast) -> Tensor:
    """The vector of rank `request.source`, (m,)."""
    if request.numel is not None:
        return _broadcast_index_set(rank, request.tensor, request.source, request.numel)
    tensor = request.tensor.clone()
    with rank.timer.phase("collective_s"):
        rank.collectives.broadcast(as_bytes(tensor), request.source)
    _count(rank, tensor.numel() * tensor.itemsize, request.source)
    rank.record.num_entries += tensor.numel() * (rank.index == request.source)
    return tensor


def _broadcast_index_set(rank: Rank, indices: Tensor, source: int, numel: int) -> Tensor:
    """All ranks name equally many entries, so messages in every code but "rice" are equally long."""
    with rank.timer.phase("encode_s"):
        message = encode(index_set(indices, numel), rank.index_code)
    with rank.timer.phase("collective_s"):
        if rank.index_code == "rice":
            length = torch.tensor([message.numel()], device=message.device)
            length = rank.collectives.broadcast(length, source)
            check_size(rank.collectives.ranks[source], int(length), longest_message_bytes(numel))
            buffer = message.new_zeros(int(length))
            buffer[: message.numel()] = message[: buffer.numel()]
            message = buffer
        rank.collectives.broadcast(message, source)
    _count(rank, message.numel(), source)
    with rank.timer.phase("decode_s"):
        return decode(message, numel).indices


def _count(rank: Rank, size: int, source: int) -> None:
    is_source = rank.index == source
    passes_on = rank.index != (source - 1) % rank.num_workers
    rank.count(size * is_source, size * passes_on, size * (not is_source))
