"""SIDCo: Top-k by a threshold that a distribution fitted to the magnitudes gives."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core import Conversation, ResidualState, SparseSum, Sparsifier, Worker, exact_sum, per_worker
from regtopk.core.options import one_of, option
from regtopk.core.sparse import find_largest_, put_back_, send_, take_where_

Fit = Literal["exponential", "pareto", "gamma"]

_FIRST_DENSITY = 0.25  # d_1, of the first of several stages
_TOLERANCE = 0.2  # a number of entries within 20 % of k is near enough
_WINDOW = 5  # steps between two decisions on the number of stages
_SMALLEST = 2.0**-52  # added to magnitudes, in units of their mean, before a logarithm is taken


@dataclass
class SIDCoState(ResidualState):
    """The residual, and how the number of stages is being adapted: (..., 1) int64 each."""

    num_stages: Tensor = per_worker("reset")
    last_change: Tensor = per_worker("reset")  # of the number of stages: -1, 0 or 1
    direction: Tensor = per_worker("reset")  # +1 if more stages are thought to find more entries, else -1
    num_found: Tensor = per_worker("reset")  # entries found since the last decision
    num_found_before: Tensor = per_worker("reset")  # entries found between the two decisions before it


@dataclass(frozen=True, kw_only=True)
class SIDCo(Sparsifier[SIDCoState]):
    """Statistical threshold estimation (Abdelmoniem, Elzanaty, Alouini, Canini 2021).

    a_n = e_n + g_n, x = |a_n|, d = k / J
    one stage:  eta = threshold that a share d of the fitted distribution reaches
    M stages:   eta_1 for d_1 = 1/4 on all x; then eta_m on the excess x - min x of the x >= eta_{m-1}, for
                (d / d_1)^(1 / (M - 1)) of them; eta = eta_M
    s_n = {j : |a_nj| >= eta}, send s_n * a_n, receive g = sum_n w_n (s_n * a_n), e_n := a_n - s_n * a_n

    With x of mean mu and variance v, the fits give

    exponential   eta = -mu ln d
    pareto        eta = alpha (1 - d^c) / c,  c = (mu^2 / v - 1) / 2,  alpha = mu (mu^2 / v + 1) / 2
    gamma         eta = -beta (ln d + ln Gamma(alpha)),  beta = mu / alpha,  s = ln mu - mean ln x,
                  alpha = (3 - s + sqrt((s - 3)^2 + 24 s)) / (12 s);  pareto from the second stage on

    Every 5 steps a worker compares the number of entries it found with k. If that is off by more than 20 %,
    it takes one stage more or less, whichever the last change has shown to help.

    Use it for: very long vectors where even a fast selection is too slow.

    Args:
        density, k, value_code: as in `Sparsifier`. A worker sends one to 2 k entries, and no zeros.
        fit: the distribution: "exponential", "pareto" (generalised) or "gamma".

    Differs from the paper, which adds a stage for too few entries and removes one for too many: which of the
    two helps depends on the tail, so each worker learns it here.

    Checked against the authors' code on the same vectors, with all three fits and several stages: thresholds
    select as many entries, or one more or less.
    """

    name = "sidco"
    promises = frozenset({"conserves", "replicates"})
    fit: Fit = option("exponential", one_of("exponential", "pareto", "gamma"))

    def init(self, worker: Worker) -> SIDCoState:
        zero = worker.zeros(1, dtype=torch.int64)
        return SIDCoState(
            residual=worker.zeros(),
            num_stages=zero + 1,
            last_change=zero.clone(),
            direction=zero + 1,
            num_found=zero.clone(),
            num_found_before=zero,
        )

    def exchange(self, grad: Tensor, state: SIDCoState, worker: Worker) -> Conversation:
        k = self.num_selected(worker)
        accumulated = state.residual.add_(grad)
        eta = self.threshold(accumulated.abs(), state.num_stages, k / worker.numel)
        most = min(worker.numel, 2 * k)
        kernel = kernels.kernel_for(accumulated, None)
        taken = kernel.take_above_(accumulated, None, eta.squeeze(-1), most)
        state.num_found = state.num_found + taken.num_found.unsqueeze(-1)
        if (worker.step + 1) % _WINDOW == 0:
            _adapt_stages_(state, _WINDOW * k, most=math.ceil(math.log2(worker.numel / k)))
        if bool(taken.num_left.any()):
            put_back_(accumulated, taken)  # of those that reach eta the largest are taken instead
            largest = find_largest_(accumulated, torch.zeros_like(accumulated), most)
            is_taken = torch.zeros_like(accumulated, dtype=torch.bool).scatter_(-1, largest, True)
            is_taken &= accumulated.abs() >= eta  # where another row has too many, this one may have too few
            sent = take_where_(accumulated, is_taken, code=self.value_code)
        else:
            sent = send_(accumulated, taken, self.value_code)
        return (yield from SparseSum(sent, worker.weight))

    def threshold(self, x: Tensor, num_stages: Tensor, density: float) -> Tensor:
        """eta for each row of magnitudes, (..., 1) in their dtype, at most the largest, never zero."""
        if density >= _FIRST_DENSITY:
            num_stages = torch.ones_like(num_stages)
        num_stages = num_stages.clamp(1, x.shape[-1].bit_length())  # a damaged checkpoint may name more
        log_density = math.log(density)
        log_first = torch.full_like(num_stages, math.log(_FIRST_DENSITY), dtype=torch.float64)
        log_first = log_first.where(num_stages > 1, log_density)
        log_next = (log_density - log_first) / (num_stages - 1).clamp(min=1)
        largest = x.amax(-1, keepdim=True)
        eta = _rounded(_fitted(x, torch.ones_like(x, dtype=torch.bool), log_first, self.fit), largest)
        tail_fit: Fit = "pareto" if self.fit == "gamma" else self.fit
        for stage in range(2, int(num_stages.max()) + 1):
            is_left = x >= eta
            least = x.masked_fill(~is_left, torch.inf).amin(-1, keepdim=True)
            excess = (x - least).where(is_left, 0.0)
            further = least + _fitted(excess, is_left, log_next, tail_fit)
            eta = eta.where(num_stages < stage, _rounded(further, largest))
        return eta.clamp(min=torch.finfo(x.dtype).tiny)


def _fitted(x: Tensor, is_counted: Tensor, log_density: Tensor, fit: Fit) -> Tensor:
    """The value that a share of the distribution fitted to the counted x >= 0 reaches, (..., 1) float64."""
    num = is_counted.sum(-1, keepdim=True).clamp(min=1)
    mean = exact_sum(x).unsqueeze(-1) / num
    if fit == "exponential":
        return -mean * log_density
    relative = x / mean.where(mean > 0, 1.0)
    if fit == "pareto":
        deviation = (relative - 1).where(is_counted, 0.0)
        variance = (exact_sum(deviation.square()).unsqueeze(-1) / num).clamp(min=_SMALLEST)
        c, alpha = (1 / variance - 1) / 2, mean * (1 / variance + 1) / 2
        c = c.where(c.abs() > 1e-9, 1e-9)  # the limit c -> 0 is the exponential
        return -alpha * torch.expm1(c * log_density) / c
    s = (-exact_sum((relative + _SMALLEST).log()).unsqueeze(-1) / num).clamp(min=_SMALLEST)
    alpha = (3 - s + ((s - 3).square() + 24 * s).sqrt()) / (12 * s)
    return -mean / alpha * (log_density + torch.lgamma(alpha))


def _rounded(eta: Tensor, largest: Tensor) -> Tensor:
    """eta in float32, so that no last bit of a logarithm matters, and at most the largest magnitude."""
    return eta.float().to(largest.dtype).clamp(min=0).minimum(largest)


def _adapt_stages_(state: SIDCoState, target: int, most: int) -> None:
    """Take one stage more or less where the number of entries found is not near the target."""
    found, stages = state.num_found, state.num_stages
    learned = state.last_change * (found - state.num_found_before).sign()
    direction = state.direction.where(learned == 0, learned)
    is_few, is_many = found < (1 - _TOLERANCE) * target, found > (1 + _TOLERANCE) * target
    change = direction * (is_few.long() - is_many.long())
    is_outside = (stages + change < 1) | (stages + change > max(1, most))  # then turn round
    direction, change = direction.where(~is_outside, -direction), change.where(~is_outside, -change)
    state.num_stages = (stages + change).clamp(1, max(1, most))
    state.last_change, state.direction = state.num_stages - stages, direction
    state.num_found, state.num_found_before = torch.zeros_like(found), found
