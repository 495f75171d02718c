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
from regtopk.core.codes import check_index_code, longest_message_bytes
from regtopk.core.requests import Broadcast, DenseSum, Gather, Gathered, Peek, Request, SparseSum
from regtopk.core.sparse import SparseGradient, index_set
from regtopk.core.traffic import all_gather_bytes
from regtopk.distributed.checks import PEEKS
from regtopk.distributed.collectives import Collectives, check_size
from regtopk.distributed.dense_sum import dense_sum
from regtopk.distributed.record import StepRecord, Stopwatch
from regtopk.distributed.split import split_and_reduce, split_moves_less
from regtopk.errors import ArgumentError, OracleError
from regtopk.wire import decode, decode_rows, encode, raise_for_status

Collective = Literal["auto", "all_gather", "split"]
LONGEST_GATHERED_BYTES = 1 << 32  # of a vector that travels as it is: more is no message, but damage


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
        self.idle = tuple(rank for rank, weight in enumerate(weights.tolist()) if weight == 0)
        self.record = StepRecord()
        self.watch = Stopwatch(torch.device("cpu"))
        self.room: Tensor | None = None

    def begin(self, device: torch.device) -> None:
        """Start counting a new conversation."""
        self.record, self.watch = StepRecord(), Stopwatch(device)

    def answer(self, request: Request) -> Any:
        """What the cluster makes of a request; must be called with the same kind on all ranks."""
        if isinstance(request, SparseSum):
            return self._sparse_sum(request.sparse)
        if isinstance(request, DenseSum):
            return dense_sum(self, request)
        if isinstance(request, Gather):
            return self._gather(request)
        if isinstance(request, Broadcast):
            return self._broadcast(request)
        assert isinstance(request, Peek)
        raise OracleError(f"this algorithm {PEEKS}")

    def _sparse_sum(self, sparse: SparseGradient) -> Tensor:
        if self._splits(sparse):
            return split_and_reduce(self, sparse)
        rows = self.gather_sparse(sparse)
        self.record.num_entries += 0 if self.is_idle else int(sparse.counts)
        with self.watch.phase("decode_s"):
            indices, values = rows.without_padding()
            weighted = self.weights.to(values).unsqueeze(-1) * values
            return kernels.sum_sparse_in_rank_order(
                indices, weighted, sparse.numel, out=self.take_room(sparse)
            )

    def take_room(self, sparse: SparseGradient) -> Tensor | None:
        """Memory for a sum of such vectors that nobody needs any more, once."""
        room, self.room = self.room, None
        fits = room is not None and room.shape == (sparse.numel,) and room.dtype == sparse.values.dtype
        return room if fits else None

    def gather_sparse(self, sparse: SparseGradient) -> SparseGradient:
        """Every rank's sparse vector, (N, m), decoded and checked."""
        with self.watch.phase("encode_s"):
            message = self.encoded(sparse)
        capacity = sparse.indices.shape[-1]
        sizes = [message.numel()] * self.num_workers
        is_even = sparse.count is None and self.index_code != "rice" and len(self.active) == self.num_workers
        with self.watch.phase("collective_s"):
            if is_even:
                messages = self.collectives.all_gather(message)
            else:
                numbers = self.collectives.all_gather_sizes(
                    (message.numel(), capacity),
                    (longest_message_bytes(sparse.numel), sparse.numel),
                    message.device,
                )
                sizes, capacities = ([row[i] for row in numbers] for i in (0, 1))
                capacity = max(capacities)
                messages = self.collectives.all_gather_padded(message, max(sizes))
        self.count_gather(message.numel(), sizes)
        with self.watch.phase("decode_s"):
            return self._decode_rows(messages, capacity, sparse)

    def _decode_rows(self, messages: Tensor, capacity: int, sparse: SparseGradient) -> SparseGradient:
        """The ranks' messages as rows of equal capacity; a rank of weight zero sent none."""
        code, dtype = sparse.code, sparse.values.dtype
        found, status = decode_rows(
            messages[self.active], sparse.numel, capacity, self.index_code, code, dtype
        )
        raise_for_status(self.by_rank(status))
        indices, values, counts = map(self.by_rank, (found.indices, found.values, found.counts))
        return SparseGradient(indices, values, sparse.numel, counts, code)

    def by_rank(self, rows: Tensor) -> Tensor:
        """Rows of the ranks that have weight, among rows of zeros for the others: (N, ...)."""
        if len(self.active) == self.num_workers:
            return rows
        everyone = rows.new_zeros(self.num_workers, *rows.shape[1:])
        return everyone.index_copy(0, torch.tensor(self.active, device=rows.device), rows)

    def _gather(self, request: Gather) -> Gathered:
        tensor = request.tensor
        if request.numel is not None:
            found = self.gather_sparse(index_set(tensor, request.numel, request.count))
            return Gathered(found.indices, found.counts)
        count = tensor.shape[-1] if request.count is None else int(request.count)
        meant = tensor[: 0 if self.is_idle else count]
        with self.watch.phase("collective_s"):
            limits = 2 * (LONGEST_GATHERED_BYTES // tensor.itemsize,)
            numbers = self.collectives.all_gather_sizes(
                (meant.numel(), tensor.shape[-1]), limits, tensor.device
            )
            counts, capacities = ([row[i] for row in numbers] for i in (0, 1))
            rows = self.collectives.all_gather_padded(_as_bytes(meant), max(capacities) * tensor.itemsize)
        sizes = [count * tensor.itemsize for count in counts]
        self.count_gather(sizes[self.rank], sizes)
        self.record.num_entries += counts[self.rank]
        return Gathered(rows.view(tensor.dtype), torch.tensor(counts, device=rows.device))

    def _broadcast(self, request: Broadcast) -> Tensor:
        if request.numel is not None:
            return self._broadcast_index_set(request.tensor, request.source, request.numel)
        tensor = request.tensor.clone()
        with self.watch.phase("collective_s"):
            self.collectives.broadcast(_as_bytes(tensor), request.source)
        self._count_broadcast(tensor.numel() * tensor.itemsize, request.source)
        self.record.num_entries += tensor.numel() * (self.rank == request.source)
        return tensor

    def _broadcast_index_set(self, indices: Tensor, source: int, numel: int) -> Tensor:
        """Every rank names as many entries, so all but "rice" messages are as long as this rank's own."""
        with self.watch.phase("encode_s"):
            message = encode(index_set(indices, numel), self.index_code)
        with self.watch.phase("collective_s"):
            if self.index_code == "rice":
                length = torch.tensor([message.numel()], device=message.device)
                length = self.collectives.broadcast(length, source)
                check_size(source, int(length), longest_message_bytes(numel))
                own, message = message, message.new_zeros(int(length))
                message[: own.numel()] = own[: message.numel()]
            self.collectives.broadcast(message, source)
        self._count_broadcast(message.numel(), source)
        with self.watch.phase("decode_s"):
            return decode(message, numel).indices

    def _count_broadcast(self, size: int, source: int) -> None:
        is_source = self.rank == source
        passes_on = self.rank != (source - 1) % self.num_workers
        self.count(size * is_source, size * passes_on, size * (not is_source))

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

    def count_gather(self, payload: int, sizes: list[int]) -> None:
        """Add a ring all_gather of messages of these sizes, one a rank."""
        sent, received = all_gather_bytes(torch.tensor(sizes))
        self.count(payload, int(sent[self.rank]), int(received[self.rank]))

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


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: backends differ in the dtypes they know."""
    return tensor.contiguous().view(torch.uint8)
