"""Fairness-aware Top-k: every worker's largest entries have equal rights, and k is learnt online."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regtopk.algorithms.consensus import first_distinct
from regtopk.core import Conversation, DenseSum, Gather, Report, ResidualState, Sparsifier, Worker, shared
from regtopk.core.options import integer, option, within
from regtopk.core.sparse import find_largest_, take_at_, to_dense
from regtopk.errors import ArgumentError

_SMALL = 2**31  # indices of vectors up to this length travel as int32


@dataclass
class FairTopKState(ResidualState):
    """The residual, and what is known about k."""

    k: Tensor = shared()  # a real number
    num_trials: Tensor = shared()  # how many trials of k and its neighbour k' are finished
    num_failures: Tensor = shared()  # not used: checkpoints of older versions hold it
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

    delta_m = (k_max - k_min) / sqrt(2 m); the m-th trial runs k, and then k' = k - delta_m / 2 (or +)
    tau = time / decrease of the loss, for k and for k'
    k := k - delta_m sign((tau(k) - tau(k')) / (k - k')), within k_min..k_max; k stays if no loss decreased

    A loss decreases from the first half of a trial's reports to the second. Without reports of loss and time
    (`Exchange.report`, `Cluster.report`) k stays what it is.

    Use it for: training that can report loss and time, where the best k is not known.

    Args:
        density, k, value_code: as in `Sparsifier`, of the support at the start; the density is a number.
        min_density, max_density: the bounds of k / J, in (0, 1]; a tenth and ten times the start if None.
        trial: for how many reports k is tried, and then k'; even, >= 2.

    Differs from the paper: there is no server. All workers send values on the whole support, not only those
    among their own k largest. k and k' run one after the other, and the range of k does not narrow.

    Checked against the authors' loop, transcribed: nearly the same support. Their aggregate on it is shorter,
    since fewer workers add to an entry.
    """

    name = "fair-topk"
    promises = frozenset({"conserves", "dense_at_full_density", "shared_support"})
    listens = True
    min_density: float | None = option(None, within("(0, 1]"))
    max_density: float | None = option(None, within("(0, 1]"))
    trial: int = option(20, integer(at_least=2))

    def __post_init__(self) -> None:
        super().__post_init__()
        if callable(self.density):
            raise ArgumentError(f"density must be a number, since k is learnt, got {self.density!r}")
        if self.trial % 2:
            raise ArgumentError(f"trial must be even, got {self.trial}")

    def init(self, worker: Worker) -> FairTopKState:
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
        if worker.report is not None:
            self._learn_(state, worker.report, worker)
        is_neighbour = int(state.num_reports) >= self.trial
        k = round(self._neighbour(state, worker) if is_neighbour else float(state.k))
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

    def _neighbour(self, state: FairTopKState, worker: Worker) -> float:
        low, high = self._range(worker)
        k, half = float(state.k), self._delta(state, worker) / 2
        below = max(low, k - half)
        return below if round(below) < round(k) else min(high, k + half)

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
            low, high = self._range(worker)
            moved = float(state.k) + ((slope < 0) - (slope > 0)) * self._delta(state, worker)
            state.k.fill_(min(high, max(low, moved)))
        state.num_trials += 1
        state.num_reports.zero_()
        state.reported.zero_()
