"""What a request costs, counted once for the simulator, for algorithms that keep to a budget, and for plans.

docs/notation.md says what is counted as payload, sent, received and dense bytes.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regtopk.core.codes import full_message_bytes, message_bytes
from regtopk.core.link import Link
from regtopk.core.regions import region_bytes
from regtopk.core.requests import Broadcast, DenseSum, FromOwners, Gather, Peek, Request, SparseSum, ToOwners
from regtopk.core.sparse import SparseGradient
from regtopk.core.worker import Worker

# gloo passes vectors round a ring: N - 1 trips over the network to gather them, 2 (N - 1) to sum. Sent to
# every rank directly, as many bytes take one. Long vectors keep to the ring, which shares the links more
# evenly: on 4 ranks at 100 Mbit/s without latency, 100 kB took as long both ways, 250 kB a third longer.
LONGEST_DIRECT_BYTES, DIRECT_TAKES = 1 << 17, 4 / 3
# Two ranks are a ring of one trip either way, and gloo's own was slower at all lengths: by 30 ms for 0.7 MB
# between two processes of one machine. Copies for every rank should not take much memory, though.
LONGEST_BYTES_OF_TWO = 1 << 24


def goes_directly(num_bytes: float, num_workers: int, link: Link | None = None) -> bool:
    """Whether a vector for all is sent to each directly: if it is short, or sooner there on a known link."""
    if link is None or num_workers == 2:
        return num_bytes <= (LONGEST_BYTES_OF_TWO if num_workers == 2 else LONGEST_DIRECT_BYTES)
    moved = (num_workers - 1) * num_bytes
    is_sooner = link.time_s(DIRECT_TAKES * moved, 2) <= link.time_s(moved, 2 * (num_workers - 1))
    return num_bytes <= LONGEST_DIRECT_BYTES or (is_sooner and moved <= LONGEST_BYTES_OF_TWO)


_Cluster = tuple[int, tuple[int, ...], torch.device]  # how many workers, which of them idle, and where
NAMES = ("payload_bytes", "sent_bytes", "received_bytes", "num_entries", "dense_bytes")


class Traffic:
    """Byte and entry counts of N workers, (..., N, 5) int64, in the order of `NAMES`.

    They are one tensor, so that one sum adds all. It is never written to: equal steps share their counts.
    """

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts
        self.payload_bytes, self.sent_bytes, self.received_bytes = counts[..., :3].unbind(-1)
        self.num_entries, self.dense_bytes = counts[..., 3:].unbind(-1)

    @classmethod
    def of(cls, *counts: Tensor) -> "Traffic":
        """From the counts in the order of `NAMES`, (..., N) each; `dense_bytes` may be left out."""
        missing = [torch.zeros_like(counts[0])] * (len(NAMES) - len(counts))
        return cls(torch.stack(torch.broadcast_tensors(*counts, *missing), dim=-1))

    @classmethod
    def zeros(cls, *shape: int, device: torch.device | None = None) -> "Traffic":
        """Nothing sent yet."""
        return cls(torch.zeros((*shape, len(NAMES)), dtype=torch.int64, device=device))

    @classmethod
    def from_state_dict(cls, state_dict: dict[str, Tensor]) -> "Traffic":
        """The counts that `state_dict` names, copied."""
        return cls.of(*(state_dict[name] for name in NAMES))

    def state_dict(self) -> dict[str, Tensor]:
        """The counts by name."""
        return dict(zip(NAMES, self.counts.unbind(-1), strict=True))

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.counts + other.counts)


def _contribution(request: Request, worker: Worker) -> tuple[int | Tensor, int | Tensor]:
    """The bytes of a sender's messages, and its entries: numbers where all send as much, else (...,)."""
    if isinstance(request, (SparseSum, ToOwners, FromOwners)):
        sparse, size = request.sparse, _sparse_bytes(request.sparse, worker)
        if isinstance(request, FromOwners):
            return size, 0  # the entries of others
        num_entries = sparse.indices.shape[-1] if sparse.count is None else sparse.count
        if isinstance(request, SparseSum):
            return size, num_entries
        assert isinstance(size, Tensor) and isinstance(num_entries, Tensor)
        return size.sum(-1), num_entries.sum(-1)
    if isinstance(request, DenseSum):
        numel = request.tensor.shape[-1]
        parts = region_bytes(numel, worker.num_workers, worker.idle, request.weight.dtype, request.code)
        return sum(parts), numel
    if isinstance(request, Peek):
        return 0, 0
    tensor, count = request.tensor, request.count if isinstance(request, Gather) else None
    if request.numel is None:
        num_entries = tensor.shape[-1] if count is None else count
        return num_entries * tensor.element_size(), num_entries
    indices = SparseGradient(tensor, tensor, request.numel, count, "none")
    return _sparse_bytes(indices, worker), 0  # indices alone are no entries


def payload_bytes(request: Request, worker: Worker) -> Tensor:
    """Bytes of each worker's messages, (...,) int64: zero for workers that do not send."""
    sends = worker.index == request.source if isinstance(request, Broadcast) else worker.weight > 0
    return sends.squeeze(-1) * _contribution(request, worker)[0]


def moved(request: Request, worker: Worker) -> Traffic:
    """What a request moves between the workers of a simulated cluster, (..., N), collectives being rings."""
    cluster = worker.num_workers, worker.idle, worker.weight.device
    if isinstance(request, DenseSum):
        codes = request.code, request.sum_code
        return _summed_by_region(request.tensor.shape[-1], request.weight.dtype, codes, cluster)
    if isinstance(request, ToOwners):
        return _sent_to_owners(request, worker)
    size, num_entries = _contribution(request, worker)
    if isinstance(request, Broadcast):
        return _passed_on(request.source, size, num_entries, worker)
    is_known = isinstance(size, int) and isinstance(num_entries, int)
    return (_gathered_alike if is_known else _gathered)(size, num_entries, cluster)


def _sent_to_owners(request: ToOwners, worker: Worker) -> Traffic:
    """A message from each worker to each owner; what an owner has for itself does not travel."""
    sparse = request.sparse
    sizes = _sparse_bytes(sparse, worker)
    active = is_active(worker.num_workers, worker.idle, worker.weight.device)
    owners = active.nonzero().flatten()
    to_each = sparse.counts.new_zeros(*worker.batch_shape, worker.num_workers)
    to_each[..., owners] = active.unsqueeze(-1) * sizes
    payload, own = to_each.sum(-1), to_each.diagonal(dim1=-2, dim2=-1)
    return Traffic.of(payload, payload - own, to_each.sum(-2) - own, active * sparse.counts.sum(-1))


def _sparse_bytes(sparse: SparseGradient, worker: Worker) -> int | Tensor:
    codes: Any = {"dtype": sparse.values.dtype, "value_code": sparse.code, "index_code": worker.index_code}
    if sparse.count is None and worker.index_code != "rice":  # the common case, and the fast one
        return full_message_bytes(sparse.indices.shape[-1], sparse.numel, **codes)
    return message_bytes(sparse.counts, sparse.numel, **codes, indices=sparse.indices)


def _passed_on(source: int, size: int | Tensor, num_entries: int | Tensor, worker: Worker) -> Traffic:
    """A broadcast along a ring: all but the source's predecessor send it, all but the source receive it."""
    if isinstance(size, Tensor):
        size = size[..., source, None]
    rank = torch.arange(worker.num_workers, device=worker.weight.device)
    is_source = rank == source
    passes_on = rank != (source - 1) % worker.num_workers
    return Traffic.of(is_source * size, passes_on * size, ~is_source * size, is_source * num_entries)


# Messages of a known size move the same bytes in every step: these counts, (N,), are made once.


@lru_cache(maxsize=256)
def before_a_step(batch_shape: tuple[int, ...], numel: int, device: torch.device) -> Traffic:
    """Nothing sent yet by (..., N) workers, whose dense exchange would be one of J entries."""
    nothing = Traffic.zeros(*batch_shape, device=device)
    nothing.dense_bytes.fill_(all_reduce_bytes(4 * numel, batch_shape[-1]))
    return nothing


def _gathered(size: int | Tensor, num_entries: int | Tensor, cluster: _Cluster) -> Traffic:
    active = is_active(*cluster)
    payload = active * size
    return Traffic.of(payload, *all_gather_bytes(payload), active * num_entries)


_gathered_alike = lru_cache(maxsize=256)(_gathered)


@lru_cache(maxsize=256)
def _summed_by_region(numel: int, dtype: torch.dtype, codes: tuple[str, str], cluster: _Cluster) -> Traffic:
    """A `DenseSum`: parts to the owners of the regions, then a ring all_gather of the sums."""
    active, (num_workers, idle, device) = is_active(*cluster), cluster
    sizes = (region_bytes(numel, num_workers, idle, dtype, code) for code in codes)
    parts, sums = (torch.tensor(size, device=device) for size in sizes)
    sums_sent, sums_received = all_gather_bytes(sums)
    sent = active * (parts.sum() - parts) + sums_sent
    received = parts * (active.sum() - 1) + sums_received
    return Traffic.of(active * parts.sum(), sent, received, active * numel)


@lru_cache(maxsize=256)
def is_active(num_workers: int, idle: tuple[int, ...], device: torch.device) -> Tensor:
    """(N,) int64: 1 for workers that send, 0 for those of weight zero."""
    return torch.tensor([int(rank not in idle) for rank in range(num_workers)], device=device)


def all_reduce_bytes(vector_bytes: int, num_workers: int) -> int:
    """What a ring all_reduce of a vector sends from (and brings to) each of N workers."""
    return round(2 * (num_workers - 1) * vector_bytes / num_workers)


def all_gather_bytes(payload_bytes: Tensor) -> tuple[Tensor, Tensor]:
    """What a ring all_gather of messages of the given sizes, (..., N), sends and brings per worker.

    A worker forwards every message except the one that its successor contributed, and receives every
    message except its own: N - 1 messages each way.
    """
    total = payload_bytes.sum(-1, keepdim=True)
    return total - payload_bytes.roll(-1, dims=-1), total - payload_bytes
