"""The methods that are planned, and what each does in a step.

Nothing here depends on a machine or a link: `predict` multiplies with their costs.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import ceil, prod
from typing import Literal, NamedTuple

from regtopk.algorithms import ALGORITHMS
from regtopk.core.codes import is_lossless
from regtopk.plan.asked import probe, takes
from regtopk.plan.exchange import Exchange, Units, Work, all_reduce, answer, broadcast
from regtopk.plan.workload import Workload

Way = Literal["all_reduce", "all_gather", "split"]
CODES = ("float32", "4bit", "2bit")  # of the algorithms that can be told one
DENSITIES = (0.001, 0.01, 0.1)
CHOSEN = ("topk", "regtopk", "consensus", "dgc")  # what one would try first; the others are planned if asked
MIDDLE_NUMEL = 2**22  # entries beyond these have a cost of their own
AGREEMENT_BYTES = 24  # the small all_reduce before every exchange, and a report
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20  # DDP's default bucket_cap_mb, and its first bucket
POWERSGD_RANK = 2
POWERSGD_MIN_SAVING = 2  # torch's min_compression_rate: what saves less is sent as it is


class Method(NamedTuple):
    """A way to exchange gradients; `dense` by all_reduce is DDP without a hook."""

    name: str
    density: float
    value_code: str
    collective: Way

    @property
    def sends_less(self) -> bool:
        """Whether it is meant to send less than DDP without a hook and torch's fp16 hook."""
        return self not in (DENSE, FP16)

    @property
    def is_blind(self) -> bool:
        """Whether it sends entries without a look at the gradient: at equal density it learns less."""
        return self.name in ALGORITHMS and probe(self.name, self.density, self.value_code).is_blind

    @property
    def label(self) -> str:
        """The name in tables and figures: `dense` is DDP alone, not this library's coded exchange of it."""
        return "dense, coded" if self.name == DENSE.name and self != DENSE else self.name

    @property
    def amount(self) -> str:
        """How much of the gradient it sends."""
        return f"rank {POWERSGD_RANK}" if self == POWERSGD else f"{self.density:g}"


DENSE = Method("dense", 1.0, "float32", "all_reduce")
FP16 = Method("fp16", 1.0, "float16", "all_reduce")
POWERSGD = Method("powersgd", 1.0, "float32", "all_reduce")


def planned_methods(densities: Sequence[float] = DENSITIES, *, every: bool = False) -> list[Method]:
    """DDP, torch's hooks, and algorithms at every density, with every code and by every collective they run.

    An algorithm that decides by itself how many entries to send is planned as if it sent that many. One that
    always sends the same share is planned at that share.

    Args:
        densities: for the algorithms that take one.
        every: plan all algorithms that a cluster can run, not only those one would try first.
    """
    found = [DENSE, FP16, POWERSGD]
    for name in ALGORITHMS if every else CHOSEN:
        for code in CODES if takes(name, "value_code") else CODES[:1]:
            probed = probe(name, densities[0], code)
            sends_all_as_it_is = probed.density == 1 and is_lossless(probed.code)  # what DDP does anyway
            if probed.peeks or sends_all_as_it_is:
                continue
            own = densities if probed.density is None else [probed.density]
            found += [Method(name, density, probed.code, way) for density in own for way in probed.ways]
    return found


def numel_units(numel: float) -> Units:
    """A vector's entries, and how many of them lie beyond the first four million.

    Large vectors take longer per entry: they do not fit the caches, and their memory is new every time.
    """
    return {"numel": numel, "numel beyond": max(0, numel - MIDDLE_NUMEL)}


@lru_cache(maxsize=16384)
def exchange_of(method: Method, workload: Workload, num_workers: int, scope: str) -> Exchange:
    """What a step with a method does; `scope`, "model" or "bucket", is that of this library's exchanges."""
    numel, N = workload.numel, num_workers
    num_parts = num_buckets(numel)
    in_bucket = numel / num_parts
    ddp = Work("ddp", {"numel": in_bucket})
    if method == DENSE:
        return Exchange(4 * numel, [all_reduce(4 * in_bucket, N)], [ddp], num_parts=num_parts)
    if method == FP16:
        move = all_reduce(2 * in_bucket, N, "all_reduce half")
        fp16 = Work("fp16", {"numel": in_bucket})
        return Exchange(2 * numel, [move], [ddp, fp16], num_parts=num_parts)
    if method == POWERSGD:  # three all_reduces, in one bucket (with several, torch's hook hangs on gloo)
        sizes = [size for size in powersgd_bytes(workload) if size]
        num_matrices = sum(len(shape) > 1 for shape in workload.shapes)
        powersgd = Work("powersgd", {"messages": num_matrices, **numel_units(numel)})
        work = [Work("ddp", {"numel": numel}), powersgd]
        return Exchange(sum(sizes), [all_reduce(size, N) for size in sizes], work)
    return _ours(method, numel, N, num_parts if scope == "bucket" else 1)


def num_buckets(numel: int) -> int:
    """How many buckets DDP makes of float32 gradients."""
    return 1 + max(0, ceil((4 * numel - FIRST_BUCKET_BYTES) / BUCKET_BYTES))


def _ours(method: Method, numel: int, N: int, num_parts: int) -> Exchange:
    """An exchange of this library: what the algorithm asks, and what comes before."""
    numel = max(1, numel // num_parts)
    k = max(1, round(method.density * numel))
    probed = probe(method.name, method.density, method.value_code)
    work = [
        Work("ddp", {"numel": numel}),
        Work("exchange", {"numel": numel}),
        Work(f"select {method.name}", {"calls": 1, "entries": k, **numel_units(numel)}),
    ]
    if method.value_code in CODES:
        work.append(Work(f"quantise {method.value_code}", {"calls": 1, "entries": k}))
    moves = [all_reduce(AGREEMENT_BYTES, N)]
    if probed.listens:
        moves.append(broadcast(AGREEMENT_BYTES, N))
    payload_bytes, memory_bytes = 0, 0.0
    for asked in probed.requests:
        request, is_split = asked.scaled(numel, k, N), method.collective == "split"
        answered = answer(request, N, is_ragged=asked.is_ragged, is_split=is_split)
        work += answered.work
        moves += answered.moves
        payload_bytes += num_parts * answered.payload_bytes
        memory_bytes = max(memory_bytes, answered.memory_bytes)
    return Exchange(payload_bytes, moves, work, memory_bytes, num_parts)


def powersgd_bytes(workload: Workload) -> tuple[int, int, int]:
    """Bytes of the parameters PowerSGD leaves alone, of the left factors, and of the right factors."""
    alone = left = right = 0
    for shape in workload.shapes:
        size = prod(shape)
        rows = shape[0] if len(shape) > 1 else 1
        columns = size // rows if rows else 0
        rank = min(rows, columns, POWERSGD_RANK)
        if len(shape) > 1 and (rows + columns) * rank * POWERSGD_MIN_SAVING < size:
            left, right = left + 4 * rows * rank, right + 4 * columns * rank
        else:
            alone += 4 * size
    return alone, left, right
