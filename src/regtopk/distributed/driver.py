"""Answers an algorithm's requests on one rank of a process group.

All ranks receive the same bits: messages are coded without loss, and sums run from zero in rank order in at
least float32, as in the simulator. `deterministic=False` lets the backend add uncoded dense vectors instead.

A sparse sum runs as one all_gather of everybody's messages (each rank receives N - 1 of them), or split by
index region: each rank sends every other the entries of its region, sums its own region and gathers the
sums. `collective="auto"` takes whichever is computed to move fewer bytes.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.codes import check_index_code, full_message_bytes, is_lossless, quantise
from regtopk.core.regions import dense_regions
from regtopk.core.requests import Broadcast, DenseSum, Gather, Gathered, Peek, Request, SparseSum
from regtopk.core.sparse import SparseGradient
from regtopk.distributed.collectives import Collectives, ring_gather
from regtopk.distributed.record import StepRecord, Stopwatch
from regtopk.distributed.split import split_and_reduce
from regtopk.errors import ArgumentError, OracleError
from regtopk.wire import decode_rows, decode_segment, encode, encode_segment, raise_for_status

Collective = Literal["auto", "all_gather", "split"]


class ProcessGroupDriver:
    """One rank's side of the conversation.

    Args:
        collectives: the process group.
        weights: (N,) float64, every rank's w_n.
        index_code: how indices are coded.
        collective: how sparse sums run.
        deterministic: sum uncoded dense vectors in rank order too (by all_to_all and all_gather).
    """

    def __init__(
        self,
        collectives: Collectives,
        weights: Tensor,
        *,
        index_code: str = "elias-fano",
        collective: Collective = "auto",
        deterministic: bool = True,
    ) -> None:
        if collective not in ("auto", "all_gather", "split"):
            raise ArgumentError(f"collective must be 'auto', 'all_gather' or 'split', got {collective!r}")
        self.index_code = check_index_code(index_code)
        self.collective = collective
        self.deterministic = deterministic
        self.collectives = collectives
        self.weights = weights
        self.is_idle = float(weights[collectives.rank]) == 0
        self.active = [rank for rank, weight in enumerate(weights.tolist()) if weight > 0]
        self.record = StepRecord()
        self.watch = Stopwatch(torch.device("cpu"))

    def begin(self, device: torch.device) -> None:
        """Start counting a new conversation."""
        self.record, self.watch = StepRecord(), Stopwatch(device)

    def answer(self, request: Request) -> Any:
        """What the cluster makes of a request; must be called with the same kind on all ranks."""
        if isinstance(request, SparseSum):
            return self._sparse_sum(request.sparse)
        if isinstance(request, DenseSum):
            return self._dense_sum(request)
        if isinstance(request, Gather):
            return self._gather(request)
        if isinstance(request, Broadcast):
            return self._broadcast(request)
        assert isinstance(request, Peek)
        raise OracleError(
            "this algorithm peeks at the sum of all workers' vectors before anything is sent: only a "
            "simulator can answer that (regtopk.simulate.Cluster), a real cluster cannot"
        )

    def _sparse_sum(self, sparse: SparseGradient) -> Tensor:
        if self._splits(sparse):
            return split_and_reduce(self, sparse)
        rows = self.gather_sparse(sparse)
        with self.watch.phase("decode_s"):
            indices, values = rows.without_padding()
            weighted = self.weights.to(values).unsqueeze(-1) * values
            return kernels.sum_sparse_in_rank_order(indices, weighted, sparse.numel)

    def gather_sparse(self, sparse: SparseGradient) -> SparseGradient:
        """Every rank's sparse vector, (N, m), decoded and checked."""
        with self.watch.phase("encode_s"):
            message = self.encoded(sparse)
        is_even = sparse.count is None and self.index_code != "rice" and len(self.active) == self.num_workers
        with self.watch.phase("collective_s"):
            if is_even:
                messages, lengths = self.collectives.all_gather(message), None
            else:
                messages, lengths = self.collectives.all_gather_ragged(message)
        sizes = lengths or [message.numel()] * self.num_workers
        self.count(message.numel(), *ring_gather(sizes, self.rank))
        self.record.num_entries += 0 if self.is_idle else int(sparse.counts)
        with self.watch.phase("decode_s"):
            return self._decode_rows(messages, sizes, sparse)

    def _decode_rows(self, messages: Tensor, sizes: list[int], sparse: SparseGradient) -> SparseGradient:
        capacity = sparse.indices.shape[-1]
        senders = [rank for rank, size in enumerate(sizes) if size > 0]
        if not senders:
            return empty_rows(sparse, self.num_workers)
        found, status = decode_rows(
            messages[senders], sparse.numel, capacity, self.index_code, sparse.code, sparse.values.dtype
        )
        raise_for_status(status)
        if len(senders) == self.num_workers:
            return found
        rows = empty_rows(sparse, self.num_workers)
        at = torch.tensor(senders, device=messages.device)
        assert rows.count is not None
        return SparseGradient(
            rows.indices.index_copy(0, at, found.indices),
            rows.values.index_copy(0, at, found.values),
            sparse.numel,
            rows.count.index_copy(0, at, found.counts),
            sparse.code,
        )

    def _dense_sum(self, request: DenseSum) -> Tensor:
        """sum_n w_n x_n: coded segments to the owner of each region, who sums, and the sums to all."""
        x, code = request.tensor, request.code
        if is_lossless(code) and is_lossless(request.sum_code) and not self.deterministic:
            return self._all_reduced(request)
        sum_dtype = request.weight.dtype
        x = x.to(sum_dtype)
        if request.loss is not None:
            request.loss.zero_()
        bounds = dense_regions(x.numel(), self.weights.tolist())
        with self.watch.phase("encode_s"):
            empty = torch.empty(0, dtype=torch.uint8, device=x.device)
            parts = [
                empty if self.is_idle or start == end else encode_segment(x[start:end], code)
                for start, end in bounds
            ]
        with self.watch.phase("collective_s"):
            received = self.collectives.all_to_all(parts)
        start, end = bounds[self.rank]
        own = self._sum_region(received, end - start, code, sum_dtype, request, start)
        return self._gather_regions(own, bounds, parts, received, request.sum_code)

    def _sum_region(
        self, received: list[Tensor], size: int, code: str, dtype: torch.dtype, request: DenseSum, start: int
    ) -> Tensor:
        """This rank's region: sum in rank order, and code the sum; the loss goes where it was asked for."""
        with self.watch.phase("decode_s"):
            if size == 0:
                return torch.empty(0, dtype=dtype, device=request.tensor.device)
            messages = torch.stack([received[rank] for rank in self.active])
            rows, status = decode_segment(messages, size, code, dtype)
            raise_for_status(status)
            total = kernels.sum_dense_in_rank_order(rows, self.weights[self.active].to(rows))
            if request.loss is None:
                return total
            coded = quantise(total, request.sum_code)
            request.loss[start : start + size] = (total - coded) / request.weight
            return coded

    def _gather_regions(
        self,
        own: Tensor,
        bounds: list[tuple[int, int]],
        parts: list[Tensor],
        received: list[Tensor],
        sum_code: str,
    ) -> Tensor:
        with self.watch.phase("encode_s"):
            message = encode_segment(own, sum_code) if own.numel() else own.new_empty(0, dtype=torch.uint8)
        with self.watch.phase("collective_s"):
            messages, sizes = self.collectives.all_gather_ragged(message)
        with self.watch.phase("decode_s"):
            regions = []
            for rank, (start, end) in enumerate(bounds):
                if start == end:
                    continue
                values, status = decode_segment(
                    messages[rank, : sizes[rank]], end - start, sum_code, own.dtype
                )
                raise_for_status(status)
                regions.append(values)
        payload = sum(part.numel() for part in parts)
        sent, got = ring_gather(sizes, self.rank)
        sent += payload - parts[self.rank].numel()
        got += sum(part.numel() for part in received) - received[self.rank].numel()
        self.count(payload, sent, got)
        self.record.num_entries += 0 if self.is_idle else bounds[-1][1]
        return torch.cat(regions) if regions else own

    def _all_reduced(self, request: DenseSum) -> Tensor:
        x = request.tensor.to(request.weight.dtype)
        with self.watch.phase("collective_s"):
            total = self.collectives.all_reduce(x * request.weight)
        payload = x.numel() * x.element_size()
        moved = 2 * (self.num_workers - 1) * payload // self.num_workers
        self.count(payload, moved, moved)
        self.record.num_entries += x.numel()
        return total

    def _gather(self, request: Gather) -> Gathered:
        tensor = request.tensor
        if self.is_idle:
            tensor = tensor[:0]
        elif request.count is not None:
            tensor = tensor[: int(request.count)]
        with self.watch.phase("collective_s"):
            rows, lengths = self.collectives.all_gather_ragged(tensor)
        sizes = [length * tensor.element_size() for length in lengths]
        self.count(sizes[self.rank], *ring_gather(sizes, self.rank))
        self.record.num_entries += tensor.numel()
        return Gathered(rows, torch.tensor(lengths, device=rows.device))

    def _broadcast(self, request: Broadcast) -> Tensor:
        tensor = request.tensor.clone()
        with self.watch.phase("collective_s"):
            self.collectives.broadcast(tensor, request.source)
        size = tensor.numel() * tensor.element_size()
        is_source = self.rank == request.source
        passes_on = self.rank != (request.source - 1) % self.num_workers
        self.count(size * is_source, size * passes_on, size * (not is_source))
        self.record.num_entries += tensor.numel() * is_source
        return tensor

    def encoded(self, sparse: SparseGradient) -> Tensor:
        """This rank's message; nothing at all from a rank of weight zero."""
        if self.is_idle:
            return torch.empty(0, dtype=torch.uint8, device=sparse.indices.device)
        return encode(sparse, self.index_code)

    def count(self, payload: int, sent: int, received: int) -> None:
        """Add to what crossed the interface."""
        self.record.payload_bytes += payload
        self.record.sent_bytes += sent
        self.record.received_bytes += received

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.collectives.rank

    @property
    def num_workers(self) -> int:
        """How many ranks the group has."""
        return self.collectives.num_workers

    def _splits(self, sparse: SparseGradient) -> bool:
        if self.collective != "auto":
            return self.collective == "split"
        return split_moves_less(sparse, self.index_code, self.num_workers)


def split_moves_less(sparse: SparseGradient, index_code: str, num_workers: int) -> bool:
    """Whether a split by region is computed to move fewer bytes than an all_gather of everything.

    all_gather receives (N - 1) B(k). The split receives (N - 1)/N B(k) and then (N - 1)/N of the sums on the
    union of the supports, which is largest, J (1 - (1 - k/J)^N), when the workers choose independently.
    """
    numel, k = sparse.numel, sparse.indices.shape[-1]
    if num_workers < 3 or sparse.count is not None or k == 0:
        return False
    code = "elias-fano" if index_code == "rice" else index_code
    dtype = sparse.values.dtype
    message = full_message_bytes(k, numel, dtype=dtype, value_code=sparse.code, index_code=code)
    union = round(numel * (1 - (1 - k / numel) ** num_workers))
    sums = full_message_bytes(union, numel, dtype=dtype, value_code="float32", index_code=code)
    return message + sums < num_workers * message


def empty_rows(sparse: SparseGradient, num_rows: int) -> SparseGradient:
    """No entries from anybody, in the shape the entries would have."""
    capacity = sparse.indices.shape[-1]
    return SparseGradient(
        sparse.indices.new_zeros(num_rows, capacity),
        sparse.values.new_zeros(num_rows, capacity),
        sparse.numel,
        sparse.indices.new_zeros(num_rows),
        sparse.code,
    )
