"""Answers an algorithm's requests for N workers that are rows of one batch, and counts the bytes.

Messages are (N, m), or (R, N, m) for R independent replicas. What is received has no worker dimension:
(m,), or (R, 1, m), which broadcasts against each replica's own workers.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.codes import full_message_bytes, message_bytes, quantise
from regtopk.core.regions import dense_regions, dense_sum_bytes
from regtopk.core.requests import Broadcast, DenseSum, Gather, Gathered, Peek, Request, SparseSum
from regtopk.core.sparse import SparseGradient, index_set
from regtopk.core.traffic import Traffic, all_gather_bytes, all_reduce_bytes, as_counts

ROUNDS: dict[type, int] = {SparseSum: 1, DenseSum: 2, Gather: 1, Broadcast: 1, Peek: 0}


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
        self.is_active = _is_active(weights, traffic.counts.device)
        self.index_code = index_code
        self.num_rounds = 0

    def answer(self, request: Request) -> Any:
        """What the cluster makes of a request."""
        self.num_rounds += ROUNDS[type(request)]
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
        self.traffic.counts += self._sparse_counts(sparse)
        indices, values = sparse.without_padding()
        total = kernels.sum_sparse_in_rank_order(indices, request.weight * values, sparse.numel)
        return _received(total)

    def _sparse_counts(self, sparse: SparseGradient) -> Tensor:
        dtype, capacity = sparse.values.dtype, sparse.indices.shape[-1]
        if sparse.count is None and self.index_code != "rice":  # the common case, and the fast one
            message = capacity, sparse.numel, dtype, sparse.code, self.index_code
            return _counts_of_full_messages(*message, self.weights, sparse.indices.device)
        payload = self.is_active * message_bytes(
            sparse.counts,
            sparse.numel,
            dtype=dtype,
            value_code=sparse.code,
            index_code=self.index_code,
            indices=sparse.indices,
        )
        return as_counts(payload, *all_gather_bytes(payload), sparse.counts * self.is_active)

    def _dense_sum(self, request: DenseSum) -> Tensor:
        tensor, dtype = request.tensor, request.weight.dtype
        codes = request.code, request.sum_code
        self.traffic.counts += _counts_of_dense_sum(
            tensor.shape[-1], self.weights, dtype, *codes, tensor.device
        )
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
        """Index sets count in the index code; anything else in full (8 bytes an int64)."""
        tensor = request.tensor
        counts = _full(tensor, tensor.shape[-1]) if request.count is None else request.count
        counts = counts * self.is_active
        if request.numel is not None:
            entries = index_set(tensor, request.numel, request.count)
            moved = Traffic(self._sparse_counts(entries).clone())
            moved.num_entries.zero_()
            self.traffic.add_(moved)
        else:
            payload = counts * tensor.element_size()
            self.traffic.counts += as_counts(payload, *all_gather_bytes(payload), counts)
        return Gathered(tensor.clone(), counts)  # what is received is never the sender's own memory

    def _broadcast(self, request: Broadcast) -> Tensor:
        tensor, num_workers = request.tensor, request.tensor.shape[-2]
        rank = torch.arange(num_workers, device=tensor.device).expand(tensor.shape[:-1])
        num_entries = tensor.shape[-1]
        size: Tensor | int = num_entries * tensor.element_size()
        if request.numel is not None:
            size = self._index_set_bytes(tensor[..., request.source, :], request.numel)
            num_entries = 0
        is_source = rank == request.source
        # passed on along a ring: all but the source's predecessor send it, all but the source get it
        passes_on = rank != (request.source - 1) % num_workers
        self.traffic.counts += as_counts(
            is_source * size, passes_on * size, ~is_source * size, is_source * num_entries
        )
        return _received(tensor[..., request.source, :].clone())

    def _index_set_bytes(self, indices: Tensor, numel: int) -> Tensor:
        counts = _full(indices, indices.shape[-1])
        sizes = message_bytes(
            counts,
            numel,
            dtype=torch.float32,
            value_code="none",
            index_code=self.index_code,
            indices=indices,
        )
        return sizes.unsqueeze(-1)


# What has one size takes the same bytes every step, so its counts, (N, 5), are made once. They are read only.


@lru_cache(maxsize=256)
def _counts_of_full_messages(
    count: int,
    numel: int,
    dtype: torch.dtype,
    value_code: str,
    index_code: str,
    weights: tuple[float, ...],
    device: torch.device,
) -> Tensor:
    active = _is_active(weights, device)
    size = full_message_bytes(count, numel, dtype=dtype, value_code=value_code, index_code=index_code)
    payload = size * active
    return as_counts(payload, *all_gather_bytes(payload), count * active)


@lru_cache(maxsize=256)
def _counts_of_dense_sum(
    numel: int,
    weights: tuple[float, ...],
    dtype: torch.dtype,
    code: str,
    sum_code: str,
    device: torch.device,
) -> Tensor:
    moved = dense_sum_bytes(numel, weights, dtype, code, sum_code)
    payload, sent, received = (torch.tensor(sizes, device=device) for sizes in moved)
    return as_counts(payload, sent, received, numel * _is_active(weights, device))


@lru_cache(maxsize=256)
def _is_active(weights: tuple[float, ...], device: torch.device) -> Tensor:
    """(N,) int64: 1 for workers that send, 0 for those of weight zero."""
    return torch.tensor([int(weight > 0) for weight in weights], device=device)


def dense_bytes(numel: int, num_workers: int) -> int:
    """What an uncompressed float32 all_reduce of J entries would send from each worker."""
    return all_reduce_bytes(4 * numel, num_workers)


def _weighted_sum(tensor: Tensor, weight: Tensor) -> Tensor:
    return kernels.sum_dense_in_rank_order(tensor, weight.flatten())


def _received(total: Tensor) -> Tensor:
    return total if total.dim() == 1 else total.unsqueeze(-2)


def _full(tensor: Tensor, size: int) -> Tensor:
    return torch.full(tensor.shape[:-1], size, dtype=torch.int64, device=tensor.device)
