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
