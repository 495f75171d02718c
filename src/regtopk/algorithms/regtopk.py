"""RegTop-k: Top-k whose selection is corrected by what the last aggregate revealed."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

from regtopk.algorithms.own_choice import OwnChoice
from regtopk.algorithms.posterior import PosteriorScore, ScoredState, damped_by
from regtopk.core import Conversation, Worker, take_largest_


@dataclass(frozen=True, kw_only=True)
class RegTopK(OwnChoice[ScoredState]):
    """Regularised Top-k (Algorithm 1).

    a^t = e^t + g^t
    D^t = (g^{t-1} - w a^{t-1}) / (w a^{t-1})  where s^{t-1} = 1, and Q elsewhere       (reference="previous")
    D^t = (g^{t-1} - w a^{t-1}) / (w a^t)      as Algorithm 1 is printed                (reference="current")
    s^t = Top_k(|a^t| tanh(|1 + D^t| / mu)), plain Top-k at t = 0
    s^t = Top_k(min(|a^t|, |g^{t-1}| / mu) where s^{t-1} = 1, and |a^t| elsewhere)      (damping="cap")
    send s^t * a^t, receive g^t = sum_n w_n (s_n^t * a_n^t)
    e^{t+1} = a^t - s^t * a^t

    Over Top-k this costs O(k) operations per step, and no byte. With a lossy value code a^{t-1} is the value
    as it was received. With imputation g^{t-1} is the imputed aggregate, the one that training used.

    Use it for: workers whose large entries cancel, at densities above one half.

    Args:
        density, k, value_code, impute: as in `OwnChoice`.
        mu: > 0; the larger, the more an entry must have survived aggregation to be sent again.
        damping: "factor" is the paper's; with "cap" RegTop-k stays at an optimum it reached (docs/why.md).
        reference: which a the distortion is measured against; with "factor" only.
        q: the paper's Q, > -1; inf gives entries not sent last the factor 1; with "factor" only.

    Differs from the paper: the default reference is the one that gives the published figures
    (docs/paper-vs-code.md). An entry sent as exactly zero counts as not sent.
    """

    name = "regtopk"
    can_return = False  # its score needs whole sums
    mu: float = 4.0
    damping: Literal["factor", "cap"] = "factor"
    reference: Literal["previous", "current"] = "previous"
    q: float = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.score  # checks its own

    @cached_property
    def score(self) -> PosteriorScore:
        """|a| tanh(|1 + D| / mu), or min(|a|, |g| / mu): what the largest k are chosen by."""
        return PosteriorScore(mu=self.mu, damping=self.damping, reference=self.reference, q=self.q)

    def init(self, worker: Worker) -> ScoredState:
        return ScoredState.start(worker, self.score, self.num_selected(worker))

    def exchange(self, grad: Tensor, state: ScoredState, worker: Worker) -> Conversation:
        k, residual = self.num_selected(worker), state.residual
        damped = damped_by(self.score, state, residual, grad, worker)
        sent = take_largest_(residual, grad, k, code=self.sent_code, **damped)
        aggregate = yield from self.sum_sent(sent, state, worker)
        state.remember(sent.indices, sent.values, aggregate, worker)
        return aggregate
