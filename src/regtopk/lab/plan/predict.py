"""A plan: every method's step time on a link, the best of them, and the bandwidth below which it pays.

Workers and links are alike, and a link carries its bandwidth in both directions at once. A worker receives a
message before it adds it up and passes it on, so the processor's time and the link's time are added. All
parts of an exchange but the last hide behind the backward pass; what they take from the processor does not
where training runs on that processor too. docs/planning.md has all that is assumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from regtopk.core.link import Link
from regtopk.core.options import check_integer
from regtopk.errors import ArgumentError
from regtopk.lab.plan.costs import Calibration
from regtopk.lab.plan.exchange import Exchange, Move
from regtopk.lab.plan.learning import Optimizer, relative_steps
from regtopk.lab.plan.methods import DENSE, TORCH, Method, exchange_of
from regtopk.lab.plan.workload import Workload

BACKWARD = 2 / 3  # of a step's computation
WIRE_BYTES_PER_BYTE = (1448 + 66 + 66 / 2) / 1448  # headers, and an acknowledgement for every two segments
ROUNDS = [2**n for n in range(7)]  # steps of a round of updates that are looked at
ROUND_SHARE = 0.1  # of the computation, that rounds should cost at most
EQUAL = 1.05  # methods whose times differ by less are equally fast
LOWEST, HIGHEST = 1e3, 1e14  # bits per second between which a break-even is looked for
MOST_WORKERS = 1_000_000


@dataclass(frozen=True)
class Situation:
    """Where a step is taken."""

    workload: Workload
    num_workers: int  # N, >= 2
    link: Link  # of every worker, latency one way; its compute_s is a step without an exchange
    optimizer: Optimizer = "sgd"  # that trains: how many steps a method needs depends on it

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_integer("workers", self.num_workers, at_least=2)
        if self.num_workers > MOST_WORKERS:
            raise ArgumentError(f"workers must be at most {MOST_WORKERS:,}, got {self.num_workers:,}")

    def at(self, *, bandwidth: float | None = None, num_workers: int | None = None) -> "Situation":
        """The same on a link of another bandwidth, or with another number of workers."""
        link = replace(self.link, bandwidth=bandwidth or self.link.bandwidth)
        return replace(self, link=link, num_workers=num_workers or self.num_workers)

    def exchange(self, method: Method) -> Exchange:
        """What a method does in a step."""
        return exchange_of(method, self.workload, self.num_workers)


class Prediction(NamedTuple):
    """What a method takes."""

    method: Method
    exchange: Exchange
    step_time_s: float
    relative_steps: float | None  # to a loss, over dense's; None: there is no record

    @property
    def time_to_loss(self) -> float:
        """Of as much learning as a step of dense; at least that where there is no record."""
        return self.step_time_s * (self.relative_steps or 1.0)

    @property
    def rank(self) -> tuple[bool, float, float]:
        """What is known to take the least time to a loss comes first."""
        return self.relative_steps is None, self.time_to_loss, self.step_time_s


def predict(method: Method, situation: Situation, costs: Calibration) -> Prediction:
    """How long a step takes with a method, and how many it needs.

    Raises:
        StateError: the calibration does not hold all its costs.
    """
    exchange = situation.exchange(method)
    steps = relative_steps(method, situation.optimizer)
    return Prediction(method, exchange, step_time_s(exchange, situation.link, costs), steps)


def step_time_s(exchange: Exchange, link: Link, costs: Calibration) -> float:
    """How long a step takes with an exchange."""
    num_parts, compute_s = exchange.num_parts, link.compute_s
    work_s = num_parts * sum(costs.seconds(work) for work in exchange.work)
    here_s = on_wire_s = 0.0  # what the collectives take from the processor, and on the link
    for move in exchange.moves:
        here_s += num_parts * costs.seconds(move.work)
        bits = 8 * WIRE_BYTES_PER_BYTE * move.sent_bytes
        on_wire_s += num_parts * (_num_hops(move, costs) * link.latency_s + bits / link.bandwidth)
    hides_s = on_wire_s if costs.machine["device"] == "cpu" else on_wire_s + here_s
    if exchange.delay is None:
        hidden_s = min(BACKWARD * compute_s, hides_s) * (num_parts - 1) / num_parts
    else:
        hidden_s = min(min(num_parts * exchange.delay, exchange.every) * compute_s, hides_s)
    return compute_s + (work_s + here_s + on_wire_s - hidden_s) / exchange.every


def _num_hops(move: Move, costs: Calibration) -> int:
    """Trips over the network: only from a processor's memory do short messages go to everybody at once."""
    is_ring = move.kind == "all_gather" and costs.machine["device"] != "cpu"
    return move.num_messages if is_ring else move.num_hops


class Plan(NamedTuple):
    """Every method's prediction, and what follows from them.

    Below the break-even some compressed method beats dense and fp16. It is None if one does at every
    bandwidth (then it pays here too), or none does at any.
    """

    situation: Situation
    predictions: list[Prediction]  # of the methods that fit the memory
    too_large: list[Prediction]  # of those that do not
    not_measured: list[Method]  # that some cost is missing for
    break_even_bits_per_s: float | None

    @property
    def best(self) -> Prediction:
        """The method that `best_of` advises."""
        return best_of(self.predictions)

    @property
    def pays(self) -> bool:
        """Whether some compressed method beats both dense and fp16."""
        return self.best.method.sends_less

    @property
    def dense(self) -> Prediction:
        """DDP without a hook."""
        return next(p for p in self.predictions if p.method == DENSE)

    def speedup(self, prediction: Prediction) -> float:
        """Of a step, against dense."""
        return self.dense.step_time_s / prediction.step_time_s

    def speedup_to_loss(self, prediction: Prediction) -> float:
        """Of the time to a loss, against dense; at most that where there is no record."""
        return self.dense.time_to_loss / prediction.time_to_loss

    def best_by_label(self) -> list[Prediction]:
        """Each method in its best way, the best as advised: dense, then the others, the best first."""
        found: dict[str, Prediction] = {}
        for p in sorted(self.predictions, key=lambda p: p.rank):
            found.setdefault(p.method.label, p)
        found[self.best.method.label] = self.best
        return sorted(found.values(), key=lambda p: (p.method != DENSE, *p.rank))

    def affordable_rounds(self) -> list[tuple[Prediction, int | None]]:
        """Each kind of updates in its fastest way, and the least `every` whose rounds cost little enough.

        That is at most 10 % of the computation between them; None if not even 64 steps are enough.
        """
        compute_s, found = self.situation.link.compute_s, []
        slowest_first = sorted(self.best_by_label(), key=lambda p: -p.step_time_s)
        for p in {p.method.kind: p for p in slowest_first if p.method.rounds.has_updates}.values():
            round_s = p.exchange.every * (p.step_time_s - compute_s)
            found.append((p, next((n for n in ROUNDS if round_s <= ROUND_SHARE * n * compute_s), None)))
        return found


def best_of(predictions: Sequence[Prediction]) -> Prediction:
    """The least time to a loss; of those within 5 % of it the one that sends most, since it learns most.

    Updates are planned because they are asked for: of those that are near, they come first.

    A method of which no record says how it learns is not advised, unless there is none of any that was asked
    for. Then all are taken to need the steps of dense.
    """
    recorded = [p for p in predictions if p.relative_steps is not None]
    advised = recorded if any(p.method not in TORCH for p in recorded) else predictions
    fastest = min(p.time_to_loss for p in advised)
    near = [p for p in advised if p.time_to_loss <= EQUAL * fastest]
    return max(near, key=lambda p: (p.method.rounds.has_updates, p.exchange.bytes_per_step))


def make_plan(
    situation: Situation, costs: Calibration, methods: Sequence[Method], memory_bytes: float
) -> Plan:
    """Predict every method but those that were not measured or whose messages do not fit the memory.

    Raises:
        StateError: not even dense was measured.
    """
    not_measured = [
        m for m in methods if m != DENSE and not situation.exchange(m).lines <= costs.lines.keys()
    ]
    predictions = [predict(m, situation, costs) for m in methods if m not in not_measured]
    fitting = [p for p in predictions if p.exchange.memory_bytes <= memory_bytes]
    too_large = [p for p in predictions if p.exchange.memory_bytes > memory_bytes]
    break_even = find_break_even([p.method for p in fitting], situation, costs)
    return Plan(situation, fitting, too_large, not_measured, break_even)


def find_break_even(methods: Sequence[Method], situation: Situation, costs: Calibration) -> float | None:
    """The bandwidth in bits per second below which a compressed method is best, by bisection."""

    def pays(bandwidth: float) -> bool:
        there = situation.at(bandwidth=bandwidth)
        return best_of([predict(method, there, costs) for method in methods]).method.sends_less

    low, high = LOWEST, HIGHEST
    if pays(high) or not pays(low):
        return None
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
