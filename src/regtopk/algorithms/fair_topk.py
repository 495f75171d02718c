"""Fairness-aware Top-k: every worker's largest entries have equal rights, and k is learnt online."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from regtopk.algorithms.consensus import first_distinct
from regtopk.core import (
    Conversation,
    DenseSum,
    Gather,
    Report,
    Sparsifier,
    State,
    Worker,
    check_choice,
    check_integer,
    check_number,
    find_largest_,
    per_worker,
    shared,
    take_at_,
    to_dense,
    uniform,
)
from regtopk.errors import ArgumentError

_SMALL = 2**31  # indices of vectors up to this length travel as int32


@dataclass
class FairTopKState(State):
    """The residual, and what is known about k."""

    residual: Tensor = per_worker("weighted_sum")
    k: Tensor = shared()  # a real number
    num_trials: Tensor = shared()  # how many trials of k and its neighbour k' are finished
    num_failures: Tensor = shared()  # how many trials in a row left k as it was, for want of a decrease
    num_reports: Tensor = shared()  # how many reports the present trial has
    reported: Tensor = shared()  # (2, 3), sums for k and for k': early losses, late losses, times


@dataclass(frozen=True, kw_only=True)
class FairTopK(Sparsifier[FairTopKState]):
    """Fairness-aware Top-k with online adaptation of k (Han, Wang, Leung 2020).

    a_n = e_n + g_n
    p_n = Top_k(|a_n|) in descending order, gathered
    s = the union of all workers' top kappa, the largest kappa that gives at most k entries, filled up to k
        from the entries of rank kappa + 1: so every worker contributes at least floor(k / N) of its best
    send s * a_n, receive g = sum_n w_n (s * a_n), e_n := a_n - s * a_n

    The m-th trial runs k for a while, and then k' = k - delta_m / 2 (or + where there is no room below):
    tau = time / decrease of the loss, for k and for k'; delta_m = (k_max - k_min) / sqrt(2 m)
    k := k - delta_m sign((tau(k) - tau(k')) / (k - k')), within k_min..k_max
    k stays if a loss did not decrease, or becomes k + delta_m if it has stayed ``patience`` times in a row

    Without reports of loss and time (`Exchange.report`, `Cluster.report`) k stays what it is.

    Use it for: training that can report loss and time, where the best k is not known.

    Args:
        density: k / J at the start, a number in (0, 1]; or give ``k``.
        k: entries of the support at the start.
        value_code: how values are coded on the wire.
        min_density, max_density: the bounds of k / J, in (0, 1]; a tenth and ten times the start if None.
        trial: for how many reports k is tried, and then k'; even, >= 2. The decrease of the loss is that from
            the first half of these reports to the second.
        rounding: "nearest", or "stochastic": k and k' are rounded up with the probability of their fraction,
            drawn once a trial.
        patience: how many trials in a row may leave k as it is, >= 0; the next one without a decrease raises
            it. None: any number.
        seed: an integer; the draws of "stochastic" are a function of (seed, m).

    Differs from the paper: there is no server, so proposals are gathered by all (4 bytes
    per index, since their order matters) before any value is sent. All workers then send their values on the
    whole support; the paper adds up only those that were among a worker's own k largest. Places for rank
    kappa + 1 go to workers in turn, not by magnitude. k and k' run one after the other; the paper evaluates
    both in every step. k_min..k_max does not narrow over time. By default k is rounded to the nearest, and
    stays as long as losses do not decrease; ``rounding="stochastic", patience=11`` are those of the authors'
    code, which counts rounds where trials are counted here. There k itself becomes the rounded number, and k'
    has a draw of its own; here k stays a real number, and one draw serves both.

    Checked against the authors' loop, transcribed: nearly the same support. Their aggregate on it is shorter,
    since fewer workers add to an entry.
    """

    name: ClassVar[str] = "fair-topk"
    promises = frozenset({"conserves", "dense_at_full_density", "shared_support"})
    listens: ClassVar[bool] = True
    min_density: float | None = None
    max_density: float | None = None
    trial: int = 20
    rounding: Literal["nearest", "stochastic"] = "nearest"
    patience: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if callable(self.density):
            raise ArgumentError(f"density must be a number, since k is learnt, got {self.density!r}")
        for name in ("min_density", "max_density"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), "None or in (0, 1]", lambda x: 0 < x <= 1)
        check_integer("trial", self.trial, at_least=2)
        if self.trial % 2:
            raise ArgumentError(f"trial must be even, got {self.trial}")
        check_choice("rounding", self.rounding, ("nearest", "stochastic"))
        if self.patience is not None:
            check_integer("patience", self.patience, at_least=0)
        check_integer("seed", self.seed)

    def init(self, worker: Worker) -> FairTopKState:
        """k is the given one, and nothing was reported."""
        k = self.num_selected(worker)
        low, high = self._range(worker)
        if not low <= k <= high:
            raise ArgumentError(
                f"k must be within min_density and max_density, {low}..{high} of J = {worker.numel} entries, "
                f"got {k}"
            )
        zero = torch.zeros((), dtype=torch.int64, device=worker.weight.device)
        return FairTopKState(
            residual=worker.zeros(),
            k=worker.weight.new_tensor(k),
            num_trials=zero,
            num_failures=zero.clone(),
            num_reports=zero.clone(),
            reported=worker.weight.new_zeros(2, 3),
        )

    def exchange(self, grad: Tensor, state: FairTopKState, worker: Worker) -> Conversation:
        """One step of fairness-aware Top-k."""
        if worker.report is not None:
            self._learn_(state, worker.report, worker)
        k = self._k_of_this_step(state, worker)
        own = find_largest_(state.residual, grad, k)
        order = state.residual.gather(-1, own).abs().sort(dim=-1, descending=True, stable=True).indices
        own = own.gather(-1, order)
        gathered = yield from Gather(own.int() if worker.numel <= _SMALL else own)
        # Everybody's first choice, then everybody's second, ...
        by_rank = gathered.rows[worker.senders].t().flatten().long()
        # The k entries of one worker are distinct, so the support is full without random entries.
        support = first_distinct(by_rank, by_rank[:k], k)
        values = take_at_(state.residual, None, support, code=self.value_code)
        total = yield from DenseSum(values, worker.weight, self.value_code)
        return to_dense(support, total, worker.numel)

    def _k_of_this_step(self, state: FairTopKState, worker: Worker) -> int:
        is_neighbour = int(state.num_reports) >= self.trial
        return self._rounded(self._neighbour(state, worker) if is_neighbour else float(state.k), state)

    def _rounded(self, k: float, state: FairTopKState) -> int:
        """A whole number of entries, the same in all steps of a trial."""
        if self.rounding == "nearest":
            return round(k)
        draw = uniform(torch.zeros_like(state.num_trials), self.seed, int(state.num_trials), 1)
        return math.floor(k + float(draw))

    def _neighbour(self, state: FairTopKState, worker: Worker) -> float:
        low, high = self._range(worker)
        k, half = float(state.k), self._delta(state, worker) / 2
        below = max(low, k - half)
        return below if self._rounded(below, state) < self._rounded(k, state) else min(high, k + half)

    def _delta(self, state: FairTopKState, worker: Worker) -> float:
        low, high = self._range(worker)
        return (high - low) / math.sqrt(2 * (int(state.num_trials) + 1))

    def _range(self, worker: Worker) -> tuple[int, int]:
        start, numel = self.num_selected(worker) / worker.numel, worker.numel
        low = start / 10 if self.min_density is None else self.min_density
        high = min(1.0, 10 * start) if self.max_density is None else self.max_density
        return max(1, round(low * numel)), max(1, round(high * numel))

    def _learn_(self, state: FairTopKState, report: Report, worker: Worker) -> None:
        """Add a report to its half of the trial, and after the last of them move k."""
        run, place = divmod(int(state.num_reports), self.trial)
        is_late = place >= self.trial // 2
        state.reported[run, int(is_late)] += report.loss
        state.reported[run, 2] += report.time_s
        state.num_reports += 1
        if int(state.num_reports) < 2 * self.trial:
            return
        early, late, time_s = state.reported.double().unbind(-1)
        decrease = early - late
        if bool((decrease > 0).all()):
            cost, cost_of_neighbour = (time_s / decrease).tolist()
            slope = (cost - cost_of_neighbour) * (float(state.k) - self._neighbour(state, worker))
            self._move_(state, (slope < 0) - (slope > 0), worker)
        elif self.patience is not None and int(state.num_failures) >= self.patience:
            self._move_(state, 1, worker)
        else:
            state.num_failures += 1
        state.num_trials += 1
        state.num_reports.zero_()
        state.reported.zero_()

    def _move_(self, state: FairTopKState, direction: int, worker: Worker) -> None:
        """k := k + direction delta_m, within its range."""
        low, high = self._range(worker)
        state.k.fill_(min(high, max(low, float(state.k) + direction * self._delta(state, worker))))
        state.num_failures.zero_()
