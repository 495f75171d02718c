"""The methods that are planned, and how many seconds a step of each takes.

What is assumed:

- All workers and links are alike, and a link carries its bandwidth in both directions at once.
- Collectives are rings (all_reduce, all_gather), trees (broadcast) or direct (all_to_all), as gloo runs them.
  What they cost the processor and what the link takes are added: a ring adds up what it has received.
- DDP reduces its buckets while backward goes on, which is two thirds of a step without communication; the
  last bucket has nothing left to hide behind. What an exchange takes from the processor hides behind nothing
  where training runs on that processor too. An exchange of scope "bucket" overlaps in the same way; one of
  scope "model" waits for the whole gradient, and so does PowerSGD in one bucket.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from regtopk.core.codes import is_lossless
from regtopk.core.link import Link
from regtopk.core.options import check_choice, check_integer
from regtopk.errors import ArgumentError
from regtopk.plan import baselines, rounds
from regtopk.plan.cases import CODES, numel_units, planned_algorithms
from regtopk.plan.costs import Calibration
from regtopk.plan.rounds import Collective, Move
from regtopk.plan.workload import Workload

BACKWARD = 2 / 3  # of a step's computation
WIRE_BYTES_PER_BYTE = (1448 + 66 + 66 / 2) / 1448  # headers, and an acknowledgement for every two segments
AGREEMENT_BYTES = 24  # the small all_reduce before every exchange
DENSITIES = (0.001, 0.01, 0.1)
MOST_WORKERS = 1_000_000


class Method(NamedTuple):
    """A way to exchange gradients; `dense` by all_reduce is DDP without a hook."""

    name: str
    density: float
    value_code: str
    collective: Collective

    @property
    def is_compressed(self) -> bool:
        """Whether fewer than 16 bits a parameter travel."""
        return self not in (DENSE, FP16)


DENSE = Method("dense", 1.0, "float32", "all_reduce")
FP16 = Method("fp16", 1.0, "float16", "all_reduce")
POWERSGD = Method("powersgd", 1.0, "float32", "all_reduce")
PEER = "peer-topk"  # Top-k as other libraries send it


@dataclass(frozen=True)
class Situation:
    """Where a step is taken.

    Args:
        workload: the gradients.
        num_workers: N, >= 2.
        link: bandwidth in bits per second and one-way latency of every worker's link; its compute_s is a
            step without an exchange.
        scope: "model" or "bucket", of this library's exchanges.
    """

    workload: Workload
    num_workers: int
    link: Link
    scope: str = "model"

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_integer("workers", self.num_workers, at_least=2)
        if self.num_workers > MOST_WORKERS:
            raise ArgumentError(f"workers must be at most {MOST_WORKERS:,}, got {self.num_workers:,}")
        check_choice("scope", self.scope, ("model", "bucket"))

    def at(self, *, bandwidth: float | None = None, num_workers: int | None = None) -> "Situation":
        """The same elsewhere."""
        link = self.link if bandwidth is None else replace(self.link, bandwidth=bandwidth)
        return replace(self, link=link, num_workers=num_workers or self.num_workers)


class Prediction(NamedTuple):
    """What a method takes."""

    method: Method
    payload_bytes: int
    memory_bytes: float
    step_time_s: float


def planned_methods(densities: Sequence[float] = DENSITIES) -> list[Method]:
    """Every method, at every density, with every code and by every collective it can run with."""
    found = [DENSE, FP16, POWERSGD, *(Method(PEER, d, "float32", "all_gather") for d in densities)]
    for name in planned_algorithms():
        for code in rounds.value_codes_of(name, CODES):
            if name == "dense":
                found += [Method("dense", 1.0, code, "split")] if not is_lossless(code) else []
                continue
            asks_sparse = rounds.requests_of(name, 10**6, 10**3, 2, code)[0].kind == "sparse"
            ways: tuple[Collective, ...] = ("all_gather", "split") if asks_sparse else ("split",)
            found += [Method(name, density, code, way) for density in densities for way in ways]
    return found


def predict(method: Method, situation: Situation, costs: Calibration) -> Prediction:
    """How long a step takes with a method."""
    if method == POWERSGD:
        return _predict_powersgd(situation, costs)
    if method in (DENSE, FP16):
        return _predict_all_reduce(method, situation, costs)
    if method.name == PEER:
        return _predict_peer(method, situation, costs)
    return _predict_ours(method, situation, costs)


def _predict_all_reduce(method: Method, situation: Situation, costs: Calibration) -> Prediction:
    numel, is_half = situation.workload.numel, method == FP16
    moves = baselines.all_reduce_moves(numel, situation.num_workers, is_half=is_half)
    work_s = costs.seconds("ddp", {"numel": numel})
    work_s += costs.seconds("fp16", {"numel": numel}) if is_half else 0
    step_s = _step(work_s, *_seconds(moves, situation, costs), situation, costs, len(moves))
    return Prediction(method, (2 if is_half else 4) * numel, 0, step_s)


def _predict_powersgd(situation: Situation, costs: Calibration) -> Prediction:
    workload = situation.workload
    moves = baselines.powersgd_moves(workload, situation.num_workers)
    num_matrices = sum(len(shape) > 1 for shape in workload.shapes)
    work_s = costs.seconds("ddp", {"numel": workload.numel})
    work_s += costs.seconds("powersgd", {"messages": num_matrices, **numel_units(workload.numel)})
    step_s = _step(work_s, *_seconds(moves, situation, costs), situation, costs, 1)
    return Prediction(POWERSGD, sum(baselines.powersgd_bytes(workload)), 0, step_s)


def _predict_peer(method: Method, situation: Situation, costs: Calibration) -> Prediction:
    """torch.topk of each bucket, and an all_gather each of 32-bit indices and values."""
    numel, N = situation.workload.numel, situation.num_workers
    num_parts, k = baselines.num_buckets(numel), max(1, round(method.density * numel))
    moves = [rounds.all_gather(4 * k / num_parts, N)] * (2 * num_parts)
    work_s = costs.seconds("peer-topk", {"numel": numel, "entries": N * k})
    work_s += costs.seconds("ddp", {"numel": numel})
    step_s = _step(work_s, *_seconds(moves, situation, costs), situation, costs, num_parts)
    return Prediction(method, 8 * k, 8 * N * k, step_s)


def _predict_ours(method: Method, situation: Situation, costs: Calibration) -> Prediction:
    num_parts = 1 if situation.scope == "model" else baselines.num_buckets(situation.workload.numel)
    N, way = situation.num_workers, method.collective
    numel = max(1, situation.workload.numel // num_parts)
    k = numel if method.name == "dense" else max(1, round(method.density * numel))
    asked = rounds.requests_of(method.name, numel, k, N, method.value_code)
    moves = [rounds.all_reduce(AGREEMENT_BYTES, N)]
    work_s = costs.seconds("ddp", {"numel": numel}) + costs.seconds("exchange", {"numel": numel})
    if method.name == "fair-topk":  # it listens to rank 0's report
        moves.append(rounds.broadcast(AGREEMENT_BYTES, N))
    work_s += costs.seconds(f"select {method.name}", {"calls": 1, "entries": k, **numel_units(numel)})
    if method.value_code in CODES:
        work_s += costs.seconds(f"quantise {method.value_code}", {"calls": 1, "entries": k})
    for request in asked:
        moves += rounds.moves_of(request, N, way)
        work_s += sum(costs.seconds(*work) for work in rounds.work_of(request, N, way))
    here_s, on_wire_s = _seconds(moves, situation, costs)
    return Prediction(
        method,
        num_parts * sum(rounds.payload_bytes(request, N, way) for request in asked),
        max(rounds.memory_bytes(request, N, way) for request in asked),
        _step(num_parts * work_s, num_parts * here_s, num_parts * on_wire_s, situation, costs, num_parts),
    )


def _step(
    work_s: float,
    here_s: float,
    on_wire_s: float,
    situation: Situation,
    costs: Calibration,
    num_parts: int,
) -> float:
    """A step whose exchange runs in parts, all but the last of which may hide behind backward.

    Args:
        work_s: what is computed for the exchange.
        here_s: what its collectives take from the processor.
        on_wire_s: what its messages take on their way.
        situation: where.
        costs: of which machine.
        num_parts: buckets exchanged one after another.
    """
    compute_s = situation.link.compute_s
    hides_s = on_wire_s if costs.machine["device"] == "cpu" else on_wire_s + here_s
    hidden_s = min(BACKWARD * compute_s, hides_s) * (num_parts - 1) / num_parts
    return compute_s + work_s + here_s + on_wire_s - hidden_s


def _seconds(moves: Iterable[Move], situation: Situation, costs: Calibration) -> tuple[float, float]:
    """Collectives one after another: what they cost here, and the way of their bytes over the link."""
    link, here_s, on_wire_s = situation.link, 0.0, 0.0
    for move in moves:
        units = {"messages": float(move.num_messages), "bytes": move.sent_bytes}
        here_s += costs.seconds(f"move {move.kind}", units)
        on_wire_s += move.num_hops * link.latency_s
        on_wire_s += 8 * WIRE_BYTES_PER_BYTE * move.sent_bytes / link.bandwidth
    return here_s, on_wire_s
