"""A plan: every method's step time on a link, the best of them, and the bandwidth below which it pays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from regtopk.core.link import Link
from regtopk.core.options import check_integer
from regtopk.core.traffic import all_reduce_bytes
from regtopk.lab.plan.costs import Calibration
from regtopk.lab.plan.exchange import PlannedExchange, Workload, exchange_of, move_work
from regtopk.lab.plan.learning import relative_steps
from regtopk.lab.plan.link import hidden_s
from regtopk.lab.plan.methods import DENSE, TORCH, UNCOMPRESSED, PlannedMethod, advised_with

EQUAL = 1.05  # methods whose times differ by less are equally fast
FAST = 25e9  # from here on machines have RDMA or NVLink, which is not predicted: no compression is advised


@dataclass(frozen=True)
class Situation:
    """Where a step is taken."""

    workload: Workload
    num_workers: int  # N, >= 2
    link: Link  # of every worker, latency one way; its compute_s is a step without an exchange
    optimizer: str = "sgd"  # that trains: how many steps a method needs depends on it

    def __post_init__(self) -> None:
        check_integer("workers", self.num_workers, at_least=2, at_most=1_000_000)

    def at(self, bandwidth: float) -> "Situation":
        """The same on a link of another bandwidth."""
        return replace(self, link=replace(self.link, bandwidth=bandwidth))


class Prediction(NamedTuple):
    """What a method takes."""

    method: PlannedMethod
    exchange: PlannedExchange
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


def predict(method: PlannedMethod, situation: Situation, costs: Calibration) -> Prediction:
    """How long a step takes with a method, and how many it needs."""
    exchange = exchange_of(method, situation.workload, situation.num_workers)
    steps = relative_steps(method, situation.optimizer, situation.num_workers)
    return Prediction(method, exchange, step_time_s(exchange, situation.link, costs), steps)


def step_time_s(exchange: PlannedExchange, link: Link, costs: Calibration) -> float:
    """How long a step takes with an exchange."""
    num_parts, device = exchange.num_parts, costs.machine["device"]
    gloo = exchange.moves if device == "cpu" else ()  # NCCL takes nothing from what trains
    work_s = num_parts * sum(costs.seconds(work) for work in exchange.work)
    move_s = num_parts * sum(costs.seconds(move_work(move)) for move in gloo)
    on_link_s = num_parts * sum(move.on_link_s(link, device) for move in exchange.moves)
    hides_s = hidden_s(on_link_s, link.compute_s, num_parts, exchange.every, exchange.delay)
    return link.compute_s + (work_s + move_s + on_link_s - hides_s) / exchange.every


class LinkPlan(NamedTuple):
    """Every method's prediction, and what follows from them."""

    situation: Situation
    predictions: list[Prediction]
    break_even_bits_per_s: float | None  # below it compression pays, up to `FAST`; None: nowhere
    work_s: float  # of the best method's step, what its exchange takes where bytes and trips cost nothing

    @property
    def best(self) -> Prediction:
        """The method that `best_of` advises."""
        return best_of(self.predictions, self.situation)

    @property
    def pays(self) -> bool:
        """Whether some compressed method beats both dense and fp16."""
        return self.best.method not in UNCOMPRESSED

    def speedup_to_loss(self, prediction: Prediction) -> float:
        """Of the time to a loss, against dense; at most that where there is no record."""
        return self.dense.time_to_loss / prediction.time_to_loss

    def ring_over_received(self, prediction: Prediction, itemsize: int) -> float:
        """How many times as much a ring all_reduce of all gradients would bring a worker."""
        here = self.situation
        ring_bytes = all_reduce_bytes(itemsize * here.workload.numel, here.num_workers)
        return ring_bytes / prediction.exchange.received_bytes_per_step

    @property
    def dense(self) -> Prediction:
        """DDP without a hook."""
        return next(p for p in self.predictions if p.method == DENSE)

    def best_by_label(self) -> list[Prediction]:
        """Each method in its best way, the best as advised: dense, then the others, the best first."""
        found: dict[str, Prediction] = {}
        for p in sorted(self.predictions, key=lambda p: p.rank):
            found.setdefault(p.method.label, p)
        found[self.best.method.label] = self.best
        return sorted(found.values(), key=lambda p: (p.method != DENSE, *p.rank))


def best_of(predictions: Sequence[Prediction], here: Situation) -> Prediction:
    """The least time to a loss. Of those within 5 %: no compression, or the fewest steps, then most bytes.

    It is one that docs/which-method.md advises, or no compression, if such methods were asked for. Otherwise
    it is one with a record; or, if there is none of ours, one that is taken to need the steps of dense. Of
    ours gradients are sent with SGD alone.
    """
    if here.link.bandwidth >= FAST:
        return next(p for p in predictions if p.method == DENSE)
    is_sgd = here.optimizer == "sgd"
    ours = [p for p in predictions if p.method not in TORCH and (is_sgd or p.method.rounds.has_updates)]
    advised = [p for p in ours if p.method in advised_with(here.optimizer)]
    others = UNCOMPRESSED if advised else TORCH
    found = [p for p in advised or ours if p.relative_steps is not None] or advised or ours
    found += [p for p in predictions if p.method in others and p.relative_steps is not None]
    fastest = min(p.time_to_loss for p in found)
    near = [p for p in found if p.time_to_loss <= EQUAL * fastest]
    near = [p for p in near if p.method in UNCOMPRESSED] or near
    return min(near, key=lambda p: (p.relative_steps or inf, -p.exchange.bytes_per_step))


def make_plan(situation: Situation, costs: Calibration, methods: Sequence[PlannedMethod]) -> LinkPlan:
    """Predict every method, and find the bandwidth below which a compressed one is best."""

    def best_at(bandwidth: float) -> PlannedMethod:
        there = situation.at(bandwidth)
        return best_of([predict(method, there, costs) for method in methods], there).method

    low, high, break_even = 1e3, FAST, None  # bits per second
    if best_at(low) not in UNCOMPRESSED:
        while high / low > 1.001:
            middle = (low * high) ** 0.5
            low, high = (low, middle) if best_at(middle) in UNCOMPRESSED else (middle, high)
        break_even = low
    predictions = [predict(method, situation, costs) for method in methods]
    best, link = best_of(predictions, situation), situation.link
    alone = replace(situation, link=replace(link, bandwidth=1e18, latency_s=0.0))
    work_s = predict(best.method, alone, costs).step_time_s - link.compute_s
    return LinkPlan(situation, predictions, break_even, work_s)
