"""What a worker contributes by a request, for algorithms that keep to a budget."""

import torch
from torch import Tensor

from regtopk.core.codes import message_bytes
from regtopk.core.regions import dense_sum_bytes
from regtopk.core.requests import DenseSum, Gather, Peek, Request, SparseSum
from regtopk.core.sparse import SparseGradient, index_set
from regtopk.core.worker import Worker


def payload_bytes(request: Request, worker: Worker) -> Tensor:
    """Bytes of each worker's messages, (...,) int64, as the simulator counts them."""
    is_active = worker.weight.squeeze(-1) > 0
    if isinstance(request, SparseSum):
        return _sparse(request.sparse, worker) * is_active
    if isinstance(request, DenseSum):
        return _dense(request, worker) * is_active
    if isinstance(request, Peek):
        return torch.zeros_like(is_active, dtype=torch.int64)
    if isinstance(request, Gather):
        return _entries(request.tensor, request.count, request.numel, worker) * is_active
    size = _entries(request.tensor, None, request.numel, worker)
    return size * (worker.index.squeeze(-1) == request.source)


def _sparse(sparse: SparseGradient, worker: Worker) -> Tensor:
    return message_bytes(
        sparse.counts,
        sparse.numel,
        dtype=sparse.values.dtype,
        value_code=sparse.code,
        index_code=worker.index_code,
        indices=sparse.indices,
    )


def _dense(request: DenseSum, worker: Worker) -> int:
    weights = tuple(float(rank not in worker.idle) for rank in range(worker.num_workers))
    codes = request.weight.dtype, request.code, request.sum_code
    return max(dense_sum_bytes(request.tensor.shape[-1], weights, *codes).payload)


def _entries(tensor: Tensor, count: Tensor | None, numel: int | None, worker: Worker) -> Tensor:
    if numel is not None:
        return _sparse(index_set(tensor, numel, count), worker)
    size = tensor.element_size()
    if count is not None:
        return count * size
    return torch.full(tensor.shape[:-1], tensor.shape[-1] * size, device=tensor.device)
