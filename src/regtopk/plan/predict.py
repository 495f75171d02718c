"""A plan: every method's step time on a link, the best of them, and the bandwidth below which it pays."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from regtopk.plan.costs import Calibration
from regtopk.plan.methods import DENSE, PEER, Method, Prediction, Situation, predict

NOT_ADVISED = ("randomk", PEER)
EQUAL = 1.05  # steps whose times differ by less are equally fast
LOWEST, HIGHEST = 1e3, 1e14  # bits per second between which a break-even is looked for


class Plan(NamedTuple):
    """Every method's prediction, and what follows from them.

    Args:
        situation: where.
        predictions: of the methods that fit the memory.
        left_out: of those that do not.
        break_even_bits_per_s: the bandwidth below which some compressed method beats dense and fp16; None if
            one does at every bandwidth (then it pays here too), or none does at any.
    """

    situation: Situation
    predictions: list[Prediction]
    left_out: list[Prediction]
    break_even_bits_per_s: float | None

    @property
    def dense(self) -> Prediction:
        """DDP without a hook."""
        return next(p for p in self.predictions if p.method == DENSE)

    @property
    def best(self) -> Prediction:
        """The fastest step; of those within 5 % of it the one that sends most, since it learns most.

        A support drawn at random is not advised: it looks at no gradient, and at equal density learns less.
        Neither is sending 64 bits an entry.
        """
        advised = [p for p in self.predictions if p.method.name not in NOT_ADVISED]
        fastest = min(p.step_time_s for p in advised)
        near = [p for p in advised if p.step_time_s <= EQUAL * fastest]
        return max(near, key=lambda p: p.payload_bytes)

    @property
    def pays(self) -> bool:
        """Whether some compressed method beats both dense and fp16."""
        return self.best.method.is_compressed

    def speedup(self, prediction: Prediction) -> float:
        """Against DDP without a hook."""
        return self.dense.step_time_s / prediction.step_time_s

    def fastest_by_name(self) -> list[Prediction]:
        """Of each name its fastest way, fastest first; dense and fp16 on top."""
        ranked = sorted(self.predictions, key=lambda p: (p.method.is_compressed, p.step_time_s))
        found: dict[tuple[str, bool], Prediction] = {}
        for p in ranked:
            found.setdefault((p.method.name, p.method.is_compressed), p)
        return list(found.values())

    def row(self, prediction: Prediction) -> dict[str, Any]:
        """One method, as JSON has it."""
        return {
            **prediction.method._asdict(),
            "payload_bytes": prediction.payload_bytes,
            "step_time_s": prediction.step_time_s,
            "speedup": self.speedup(prediction),
        }


def make_plan(
    situation: Situation, costs: Calibration, methods: Sequence[Method], memory_bytes: float
) -> Plan:
    """Predict every method; those whose messages do not fit the memory are left out."""
    predictions = [predict(method, situation, costs) for method in methods]
    fitting = [p for p in predictions if p.memory_bytes <= memory_bytes]
    left_out = [p for p in predictions if p.memory_bytes > memory_bytes]
    break_even = find_break_even([p.method for p in fitting], situation, costs)
    return Plan(situation, fitting, left_out, break_even)


def find_break_even(methods: Sequence[Method], situation: Situation, costs: Calibration) -> float | None:
    """The bandwidth in bits per second below which a compressed method is best, by bisection."""

    def pays(bandwidth: float) -> bool:
        there = situation.at(bandwidth=bandwidth)
        return Plan(there, [predict(method, there, costs) for method in methods], [], None).pays

    low, high = LOWEST, HIGHEST
    if pays(high) or not pays(low):
        return None
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
