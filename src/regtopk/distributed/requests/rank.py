"""What one rank knows, and what it counts while it answers an algorithm's requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regtopk.core.sparse import SparseGradient
from regtopk.core.timer import Timer
from regtopk.distributed.options import Options
from regtopk.distributed.requests.record import StepRecord
from regtopk.distributed.transport.collectives import Collectives
from regtopk.kernels import Support
from regtopk.wire import encode, raise_for_status

_DEFAULTS = Options()
# so many entries that are cleared in one go take as long as one by its index
_WRITTEN_AT_ONCE = {"cpu": 16, "cuda": 48}


@dataclass(frozen=True, eq=False)
class Total:
    """A sum, dense, and where it is not zero if it was sparse, as long as nobody else writes to it."""

    vector: Tensor
    support: Support | None
    version: int

    def support_of(self, vector: Tensor) -> Support | None:
        """Where an aggregate is not zero, if it is this sum, unchanged."""
        return self.support if vector is self.vector and vector._version == self.version else None

    def cleared(self) -> Tensor:
        """The vector's memory, made zero: only where it is not, if that is known and little."""
        support = self.support_of(self.vector)
        at_once = _WRITTEN_AT_ONCE.get(self.vector.device.type, 16)
        if support is None or support.indices.numel() * at_once > self.vector.numel():
            return self.vector.zero_()
        return self.vector.scatter_(-1, support.indices.flatten(-2), 0)


class SumBuffer:
    """Where the sums of a bucket are made: in memory that is used again, because new memory costs more."""

    def __init__(self) -> None:
        self.spare: Total | None = None  # memory for the next sum, which nobody needs any more
        self.total: Total | None = None  # the last sparse sum

    def zeros_for(self, sparse: SparseGradient) -> Tensor:
        """A vector of zeros for a sum, (J,), or (U, J) for U at once, in the spare memory if it fits."""
        spare, self.spare = self.spare, None
        shape = (*sparse.indices.shape[:-2], sparse.numel)
        if spare is None or spare.vector.shape != shape or spare.vector.dtype != sparse.values.dtype:
            return sparse.values.new_zeros(shape)
        return spare.cleared()

    def clear_spare(self) -> None:
        """Make the spare memory zero before it is needed: a GPU has time while ranks wait for one another."""
        if self.spare is not None:
            vector = self.spare.cleared()
            nowhere = torch.empty(1, 0, dtype=torch.int64, device=vector.device)
            self.spare = Total(vector, Support(nowhere, nowhere), vector._version)

    def keep(self, vector: Tensor, indices: Tensor, counts: Tensor) -> None:
        """Remember where a sum is not zero: see `kernels.Support`."""
        self.total = Total(vector, Support(indices, counts), vector._version)

    def support_of(self, aggregate: Tensor) -> Support | None:
        """Where an aggregate is not zero, if it is the last sparse sum, unchanged."""
        return None if self.total is None else self.total.support_of(aggregate)

    def recycle(self, aggregate: Tensor, *in_use: Tensor) -> None:
        """Let the next sum be made in the memory of this one, unless something else is there."""
        here = memory_of(aggregate)
        self.spare = None
        if here in map(memory_of, in_use):
            return
        total = self.total
        if total is not None and memory_of(total.vector) == here and aggregate._version == total.version:
            self.spare = total
        elif aggregate.dim() == 1:
            self.spare = Total(aggregate, None, aggregate._version)


def memory_of(tensor: Tensor) -> int:
    """Where a tensor's memory starts."""
    return tensor.untyped_storage().data_ptr()


class Rank:
    """One rank of a process group; `weights`, (N,) float64, are every rank's w_n."""

    def __init__(self, collectives: Collectives, weights: Tensor, options: Options = _DEFAULTS) -> None:
        self.options = options
        self.index_code = options.index_code
        self.collectives = collectives
        self.index, self.num_workers = collectives.rank, collectives.num_workers
        self.weights = weights
        self.active = [rank for rank, weight in enumerate(weights.tolist()) if weight > 0]
        self.idle = tuple(rank for rank, weight in enumerate(weights.tolist()) if weight == 0)
        self.is_idle = self.index in self.idle  # of weight zero: it sends nothing
        self.record = StepRecord()
        self.timer = Timer(torch.device("cpu"))
        self._statuses: list[Tensor] = []  # of messages that were used before anybody looked
        self._withheld: list[Tensor] = []
        self._weights: Tensor | None = None  # the weights where they were last needed

    def begin(self, device: torch.device, names: tuple[str, ...] = ()) -> None:
        """Start counting a new step, of these parameters."""
        self.collectives.rooms.begin(names)
        self.record, self.timer = StepRecord(), Timer(device)
        self._statuses, self._withheld = [], []

    def encoded(self, sparse: SparseGradient) -> Tensor:
        """This rank's message; nothing at all from a rank of weight zero."""
        if self.is_idle:
            return torch.empty(0, dtype=torch.uint8, device=sparse.indices.device)
        return encode(sparse, self.index_code)

    def weights_like(self, values: Tensor) -> Tensor:
        """Every rank's weight, (N,), in the dtype of values and on their device."""
        known = self._weights
        if known is None or (known.dtype, known.device) != (values.dtype, values.device):
            known = self._weights = self.weights.to(values)
        return known

    def of_active(self, rows: Tensor) -> Tensor:
        """Rows of the ranks that have weight, of rows of all; a list as index would wait for a GPU."""
        return rows[self.active] if self.idle else rows

    def by_rank(self, rows: Tensor) -> Tensor:
        """Rows of the ranks that have weight, among rows of zeros for the others: (N, ...)."""
        if not self.idle:
            return rows
        everyone = rows.new_zeros(self.num_workers, *rows.shape[1:])
        return everyone.index_copy(0, torch.tensor(self.active, device=rows.device), rows)

    def check_later(self, status: Tensor, *, after_answer: bool = False) -> None:
        """Keep the status of the active ranks' messages, (N,) or (..., N), for `raise_refusals`.

        It waits until this rank has answered, if to raise before would leave others waiting.
        """
        (self._withheld if after_answer else self._statuses).append(self.by_rank(status))

    def release_withheld(self) -> None:
        """This rank has answered."""
        self._statuses += self._withheld
        self._withheld = []

    def raise_refusals(self) -> None:
        """Raise what is wrong with a message since the last call. The host waits for the device here."""
        status = self.take_status()
        if status is not None:
            raise_for_status(status, self.collectives.ranks)

    def take_status(self) -> Tensor | None:
        """The status of all messages since the last call, (..., N), for a caller that looks at it later."""
        statuses, self._statuses = self._statuses, []
        rows = [status.view(-1, self.num_workers) for status in statuses]
        return torch.cat(rows) if len(rows) > 1 else rows[0] if rows else None

    def count(self, payload: int, sent: int, received: int) -> None:
        """Add to what crossed the interface."""
        self.record.payload_bytes += payload
        self.record.sent_bytes += sent
        self.record.received_bytes += received

    def count_gather(self, payload: int, sizes: Sequence[int]) -> None:
        """Add a ring all_gather of messages of these sizes: a rank sends on all but the next rank's."""
        total, following = sum(sizes), sizes[(self.index + 1) % self.num_workers]
        self.count(payload, total - following, total - sizes[self.index])

    def count_all_to_all(self, sent: Sequence[int], received: Sequence[int]) -> None:
        """Add messages of these sizes to and from all ranks; what a rank has for itself does not travel."""
        payload = sum(sent)
        self.count(payload, payload - sent[self.index], sum(received) - received[self.index])

    def count_entries(self, sparse: SparseGradient) -> None:
        """Add the entries this rank sent."""
        if not self.is_idle:
            self.record.num_entries += sparse.indices.numel() if sparse.count is None else int(sparse.count)
