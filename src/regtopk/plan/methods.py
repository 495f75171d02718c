"""The methods that are planned, and what each does in a step: its work and its collectives.

Nothing here depends on a machine or a link: `predict` multiplies with their costs.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from regtopk.algorithms import ALGORITHMS
from regtopk.core.codes import is_lossless
from regtopk.plan.asked import probe, takes
from regtopk.plan.baselines import POWERSGD_RANK, num_buckets, powersgd_bytes
from regtopk.plan.moves import Move, Work, all_gather, all_reduce, answer, broadcast
from regtopk.plan.workload import Workload

Way = Literal["all_reduce", "all_gather", "split"]
CODES = ("float32", "4bit", "2bit")  # of the algorithms that can be told one
DENSITIES = (0.001, 0.01, 0.1)
CHOSEN = ("topk", "regtopk", "consensus", "dgc")  # what one would try first; the others are planned if asked
MIDDLE_NUMEL = 2**22  # entries beyond have a cost of their own
AGREEMENT_BYTES = 24  # the small all_reduce before every exchange, and a report


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
PEER = "peer-topk"  # Top-k as other libraries send it


def planned_methods(densities: Sequence[float] = DENSITIES, *, every: bool = False) -> list[Method]:
    """DDP, torch's hooks, and algorithms at every density, with every code and by every collective they run.

    An algorithm that finds itself how many entries to send is planned at the densities, as if it sent that
    many; one that always sends the same share is planned at that.

    Args:
        densities: of the algorithms that are told one.
        every: all algorithms that a cluster can run; else those one would try first.
    """
    found = [DENSE, FP16, POWERSGD]
    if every:
        found += [Method(PEER, density, "float32", "all_gather") for density in densities]
    for name in ALGORITHMS if every else CHOSEN:
        for code in CODES if takes(name, "value_code") else CODES[:1]:
            probed = probe(name, densities[0], code)
            sends_all_as_it_is = probed.density == 1 and is_lossless(probed.code)  # what DDP does anyway
            if probed.peeks or sends_all_as_it_is:
                continue
            own = densities if probed.density is None else [probed.density]
            found += [Method(name, density, probed.code, way) for density in own for way in probed.ways]
    return found


class Exchange(NamedTuple):
    """What a method does in a step: equal parts one after another, each with this work and these moves."""

    work: list[Work]
    moves: list[Move]
    num_parts: int  # all but the last may run beside the backward pass
    payload_bytes: int  # one worker's messages, of all parts
    memory_bytes: float = 0.0  # that the messages take at the peak

    @property
    def lines(self) -> set[str]:
        """The calibrated lines that its time is computed from."""
        return {work.line for work in self.work} | {line_of(move) for move in self.moves}


def line_of(move: Move) -> str:
    """The calibrated line of a collective."""
    return f"move {move.kind}"


def numel_units(numel: float) -> dict[str, float]:
    """A vector's entries, and those beyond what the processor keeps and the system hands out again at once.

    Large vectors take longer per entry: they do not fit caches, and memory for them is new every time.
    """
    return {"numel": numel, "numel beyond": max(0, numel - MIDDLE_NUMEL)}


@lru_cache(maxsize=16384)
def exchange_of(method: Method, workload: Workload, num_workers: int, scope: str) -> Exchange:
    """What a step with a method does; `scope`, "model" or "bucket", is that of this library's exchanges."""
    numel, N = workload.numel, num_workers
    num_parts = num_buckets(numel)
    ddp = Work("ddp", {"numel": numel / num_parts})
    if method == DENSE:
        return Exchange([ddp], [all_reduce(4 * numel / num_parts, N)], num_parts, 4 * numel)
    if method == FP16:
        work = [ddp, Work("fp16", {"numel": numel / num_parts})]
        move = all_reduce(2 * numel / num_parts, N, "all_reduce half")
        return Exchange(work, [move], num_parts, 2 * numel)
    if method == POWERSGD:  # three all_reduces, in one bucket (with several, torch's hook hangs on gloo)
        sizes = [size for size in powersgd_bytes(workload) if size]
        num_matrices = sum(len(shape) > 1 for shape in workload.shapes)
        powersgd = Work("powersgd", {"messages": num_matrices, **numel_units(numel)})
        ddp = Work("ddp", {"numel": numel})
        return Exchange([ddp, powersgd], [all_reduce(size, N) for size in sizes], 1, sum(sizes))
    if method.name == PEER:  # torch.topk of each bucket, and an all_gather each of 32-bit indices and values
        k = max(1, round(method.density * numel))
        peer = Work(PEER, {"numel": numel / num_parts, "entries": N * k / num_parts})
        return Exchange(
            [ddp, peer], [all_gather(4 * k / num_parts, N)] * 2, num_parts, 8 * k, memory_bytes=8 * N * k
        )
    return _ours(method, numel, N, num_parts if scope == "bucket" else 1)


def _ours(method: Method, numel: int, N: int, num_parts: int) -> Exchange:
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
    answers = [
        answer(asked.scaled(numel, k, N), N, is_ragged=asked.is_ragged, is_split=method.collective == "split")
        for asked in probed.requests
    ]
    return Exchange(
        work + [each for answered in answers for each in answered.work],
        moves + [each for answered in answers for each in answered.moves],
        num_parts,
        num_parts * sum(answered.payload_bytes for answered in answers),
        max(answered.memory_bytes for answered in answers),
    )
