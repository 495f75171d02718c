"""Answers an algorithm's requests for N workers that are rows of one batch, and counts the bytes.

Messages are (N, m), or (R, N, m) for R independent replicas. What is received has no worker dimension:
(m,), or (R, 1, m), which broadcasts against each replica's own workers.
"""

from typing import Any

import torch
from torch import Tensor

from regtopk import core, kernels
from regtopk.core.owners import entries_of
from regtopk.core.regions import dense_regions
from regtopk.core.traffic import before_a_step, is_active, moved


class SimulatedDriver:
    """Answers the requests of one step. The workers' index code is not applied: bytes are only counted so."""

    def __init__(self, worker: core.Worker) -> None:
        self.worker = worker
        self.traffic = before_a_step(worker.batch_shape, worker.numel, worker.weight.device)
        self.num_rounds = 0
        self._owners = [rank for rank in range(worker.num_workers) if rank not in worker.idle]

    def answer(self, request: core.Request) -> Any:
        """What the cluster makes of a request."""
        self.num_rounds += request.num_rounds
        self.traffic = self.traffic + moved(request, self.worker)
        if isinstance(request, core.SparseSum):
            return self._sparse_sum(request)
        if isinstance(request, core.DenseSum):
            return self._dense_sum(request)
        if isinstance(request, core.ToOwners):
            return self._to_owners(request)
        if isinstance(request, core.FromOwners):
            return self._from_owners(request)
        if isinstance(request, core.Peek):
            return _received(kernels.sum_dense_in_rank_order(request.tensor, request.weight.flatten()))
        if isinstance(request, core.Gather):
            return self._gather(request)
        return _received(request.tensor[..., request.source, :].clone())

    def _sparse_sum(self, request: core.SparseSum) -> Tensor | core.OfSenders:
        sparse, weight = request.sparse, request.weight
        indices, values = sparse.without_padding()
        total = _received(kernels.sum_sparse_in_rank_order(indices, weight * values, sparse.numel))
        if not isinstance(request, core.SenderSum):
            return total
        sent_weight = kernels.sum_sparse_in_rank_order(indices, sparse.weight_of_each(weight), sparse.numel)
        entries = _received(indices.flatten(-2))
        return core.OfSenders.of(total, _received(sent_weight), entries, weight.flatten())

    def _dense_sum(self, request: core.DenseSum) -> Tensor:
        total = kernels.sum_dense_in_rank_order(request.tensor, request.weight.flatten())
        if request.loss is None:
            return _received(total)
        request.loss.zero_()
        coded = total.clone()
        weights = [float(rank not in self.worker.idle) for rank in range(self.worker.num_workers)]
        for owner, (start, end) in enumerate(dense_regions(total.shape[-1], weights)):
            if end > start:
                coded[..., start:end] = core.quantise(total[..., start:end], request.sum_code)
                lost = total[..., start:end] - coded[..., start:end]
                request.loss[..., owner, start:end] = lost / request.weight[owner]
        return _received(coded)

    def _to_owners(self, request: core.ToOwners) -> Tensor:
        sparse, size = request.sparse, request.sparse.numel
        places, values = sparse.without_padding()  # (..., N, A, m)
        num = places.shape[-2]
        starts = size * torch.arange(num, device=places.device).unsqueeze(-1)
        values = (request.weight.unsqueeze(-1) * values).flatten(-2)
        total = kernels.sum_sparse_in_rank_order((starts + places).flatten(-2), values, num * size)
        owned = total.new_zeros(*self.worker.batch_shape, size)
        owned[..., self._owners, :] = total.unflatten(-1, (num, size))
        return owned

    def _from_owners(self, request: core.FromOwners) -> Tensor:
        sparse, num = request.sparse, len(self._owners)
        places, values = (t[..., self._owners, :] for t in (sparse.indices, sparse.values))
        owners = torch.arange(num, device=places.device).unsqueeze(-1)
        indices = entries_of(owners, places, num).flatten(-2)
        total = core.to_dense(indices, values.flatten(-2), num * sparse.numel)
        return _received(total[..., : request.numel])

    def _gather(self, request: core.Gather) -> core.Gathered:
        tensor, worker = request.tensor, self.worker
        active = is_active(worker.num_workers, worker.idle, tensor.device)
        counts = active * (tensor.shape[-1] if request.count is None else request.count)
        return core.Gathered(tensor.clone(), counts.expand(tensor.shape[:-1]))  # never the sender's memory


def _received(total: Tensor) -> Tensor:
    return total if total.dim() == 1 else total.unsqueeze(-2)
