"""Answers an algorithm's requests for N workers that are rows of one batch, and counts the bytes.

Messages are (N, m), or (R, N, m) for R independent replicas. What is received has no worker dimension:
(m,), or (R, 1, m), which broadcasts against each replica's own workers.
"""

from typing import Any

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.codes import full_message_bytes, message_bytes, quantise
from regtopk.core.regions import dense_regions, dense_sum_bytes
from regtopk.core.requests import Broadcast, DenseSum, Gather, Gathered, Peek, Request, SparseSum
from regtopk.core.sparse import SparseGradient
from regtopk.core.traffic import Traffic, all_gather_bytes, all_reduce_bytes


class SimulatedDriver:
    """Answers one step's requests.

    Args:
        traffic: where the bytes are counted, (..., N).
        weights: w_n; workers of weight zero send nothing.
        index_code: how indices travel; they are not coded here, only counted so.
    """

    def __init__(self, traffic: Traffic, weights: tuple[float, ...], index_code: str) -> None:
        self.traffic = traffic
        self.weights = weights
        self.is_active = torch.tensor([weight > 0 for weight in weights], device=traffic.num_entries.device)
        self.index_code = index_code

    def answer(self, request: Request) -> Any:
        """What the cluster makes of a request."""
        if isinstance(request, SparseSum):
            return self._sparse_sum(request)
        if isinstance(request, DenseSum):
            return self._dense_sum(request)
        if isinstance(request, Peek):
            return _received(_weighted_sum(request.tensor, request.weight))
        if isinstance(request, Gather):
            return self._gather(request)
        return self._broadcast(request)

    def _sparse_sum(self, request: SparseSum) -> Tensor:
        sparse = request.sparse
        counts = sparse.counts * self.is_active
        payload = self._message_bytes(sparse) * self.is_active
        self._count(payload, *all_gather_bytes(payload), counts)
        indices, values = sparse.without_padding()
        total = kernels.sum_sparse_in_rank_order(indices, request.weight * values, sparse.numel)
        return _received(total)

    def _message_bytes(self, sparse: SparseGradient) -> Tensor | int:
        dtype, capacity = sparse.values.dtype, sparse.indices.shape[-1]
        if sparse.count is None and self.index_code != "rice":  # the common case, and the fast one
            return full_message_bytes(
                capacity,
                sparse.numel,
                dtype=dtype,
                value_code=sparse.code,
                index_code=self.index_code,
            )
        return message_bytes(
            sparse.counts,
            sparse.numel,
            dtype=dtype,
            value_code=sparse.code,
            index_code=self.index_code,
            indices=sparse.indices,
        )

    def _dense_sum(self, request: DenseSum) -> Tensor:
        tensor, dtype = request.tensor, request.weight.dtype
        moved = dense_sum_bytes(tensor.shape[-1], self.weights, dtype, request.code, request.sum_code)
        count = _full(tensor, tensor.shape[-1]) * self.is_active
        payload, sent, received = (torch.tensor(sizes, device=tensor.device) for sizes in moved)
        self._count(payload, sent, received, count)
        total = _weighted_sum(tensor, request.weight)
        if request.loss is None:
            return _received(total)
        return _received(self._code_sums(total, request.sum_code, request.weight, request.loss))

    def _code_sums(self, total: Tensor, sum_code: str, weight: Tensor, loss: Tensor) -> Tensor:
        """Code each region of the sums, and give what is lost to the region's owner."""
        loss.zero_()
        coded = total.clone()
        for owner, (start, end) in enumerate(dense_regions(total.shape[-1], self.weights)):
            if end > start:
                coded[..., start:end] = quantise(total[..., start:end], sum_code)
                lost = total[..., start:end] - coded[..., start:end]
                loss[..., owner, start:end] = lost / weight[owner]
        return coded

    def _gather(self, request: Gather) -> Gathered:
        """Every entry counts in full (8 bytes an int64): what is gathered is not coded."""
        tensor = request.tensor
        counts = _full(tensor, tensor.shape[-1]) if request.count is None else request.count
        counts = counts * self.is_active
        payload = counts * tensor.element_size()
        self._count(payload, *all_gather_bytes(payload), counts)
        return Gathered(tensor.clone(), counts)  # what is received is never the sender's own memory

    def _broadcast(self, request: Broadcast) -> Tensor:
        tensor, num_workers = request.tensor, request.tensor.shape[-2]
        rank = torch.arange(num_workers, device=tensor.device).expand(tensor.shape[:-1])
        message_bytes = tensor.shape[-1] * tensor.element_size()
        payload = (rank == request.source) * message_bytes
        # passed on along a ring: all but the source's predecessor send it, all but the source get it
        sent = (rank != (request.source - 1) % num_workers) * message_bytes
        self._count(payload, sent, message_bytes - payload, payload // tensor.element_size())
        return _received(tensor[..., request.source, :].clone())

    def _count(self, payload: Tensor, sent: Tensor, received: Tensor, entries: Tensor) -> None:
        self.traffic.payload_bytes += payload
        self.traffic.sent_bytes += sent
        self.traffic.received_bytes += received
        self.traffic.num_entries += entries


def dense_bytes(numel: int, num_workers: int) -> int:
    """What an uncompressed float32 all_reduce of J entries would send from each worker."""
    return all_reduce_bytes(4 * numel, num_workers)


def _weighted_sum(tensor: Tensor, weight: Tensor) -> Tensor:
    return kernels.sum_dense_in_rank_order(tensor, weight.flatten())


def _received(total: Tensor) -> Tensor:
    return total if total.dim() == 1 else total.unsqueeze(-2)


def _full(tensor: Tensor, size: int) -> Tensor:
    return torch.full(tensor.shape[:-1], size, dtype=torch.int64, device=tensor.device)
