"""Algorithms whose workers choose their entries for themselves, and what is made of the sum of these.

Imputation infers what workers hold of an entry that only others sent (docs/imputation.md): one that did not
send it is taken to hold rho times the mean of those that did.

Sums may also come back in part (docs/returned.md): every entry has an owner, who adds what workers send of it
to what it owes, and sends back the largest of that. So bytes per worker do not grow with the workers.
"""

from dataclasses import dataclass
from typing import Any

from regtopk.core import Conversation, Promises, Sparsifier, Worker, option, within
from regtopk.core.owners import for_owners_, num_owned, num_returned, owed_to
from regtopk.core.requests import FromOwners, SenderSum, SparseSum, ToOwners, impute_
from regtopk.core.sparse import SparseGradient, take_largest_
from regtopk.core.state import StateT, extended, per_worker
from regtopk.errors import ArgumentError


@dataclass(frozen=True, kw_only=True)
class ReturnsInPart(Sparsifier[StateT]):
    """Base of sparsifiers whose sums may come back in part.

    With ``returned``, o_m being what owner m owes on its entries, zero at first, and A the number of owners:

    o_m := o_m + sum_n w_n (s_n * a_n), send back the ceil(round(returned J) / A) largest of |o_m|
    g = what all owners send back, o_m := o_m - what m sent back

    Args:
        density, k, value_code: as in `Sparsifier`.
        returned: the part of J that comes back of the sum, in (0, 1]; None: all of it (docs/returned.md).
            Not with k, with imputation or with a score.
    """

    can_return = True

    @property
    def sent_code(self) -> str:
        """The code of what is selected. Messages to owners have blocks of their own, and are coded later."""
        return self.value_code if self.returned is None else "float32"

    def with_owed(self, state: StateT, worker: Worker) -> StateT:
        """The state before the first step, with what the worker owes where sums come back in part."""
        if self.returned is None:
            return state
        owed = worker.zeros(num_owned(worker.numel, worker.num_owners))
        return extended(state, {"owed": per_worker("owned")}, owed=owed)

    def sum_sent(self, sent: SparseGradient, state: Any, worker: Worker) -> Conversation:
        """The sum S of what was sent, or what comes back; what the code loses is kept."""
        if self.returned is None:
            return (yield from SparseSum(sent, worker.weight))
        left = getattr(state, owed_to(state.rules()))
        pieces = for_owners_(left, sent, worker.num_owners, self.value_code)
        own = yield from ToOwners(pieces, worker.weight)
        num = num_returned(self.returned, worker.numel, worker.num_owners)
        back = take_largest_(state.owed, own, num, code=self.value_code)
        return (yield from FromOwners(back, worker.numel))


@dataclass(frozen=True, kw_only=True)
class OwnChoice(ReturnsInPart[StateT]):
    """Base of sparsifiers whose workers choose their entries for themselves, and infer what others hold.

    Args:
        density, k, value_code, returned: as in `ReturnsInPart`.
        impute: rho in [0, 1]; 0 infers nothing (docs/imputation.md).
    """

    impute: float = option(0.0, within("[0, 1]"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.returned is not None and self.impute > 0:
            raise ArgumentError(
                "returned must be None with impute, which infers from who sent an entry, "
                f"got returned={self.returned}, impute={self.impute}"
            )

    @property
    def promises(self) -> Promises:
        """A worker that pays for others' entries conserves its own only together with them."""
        own: Promises = frozenset({"conserves", "dense_at_full_density", "exact_k", "one_sum", "replicates"})
        return self.promised(own)

    def promised(self, promises: Promises) -> Promises:
        """What is left of some promises with these options."""
        if self.returned is None and self.impute == 0:
            return promises
        promises -= {"one_sum"}  # receivers must know who sent an entry, or owners add up
        if self.returned is not None:
            promises -= {"dense_at_full_density"}
        return promises - {"conserves"} | {"conserves_sum"} if "conserves" in promises else promises

    def sum_sent(self, sent: SparseGradient, state: Any, worker: Worker) -> Conversation:
        """The sum S of what was sent, S + rho (1 - W) m, for which residuals pay, or what comes back."""
        if self.impute == 0:
            return (yield from super().sum_sent(sent, state, worker))
        summed = yield from SenderSum(sent, worker.weight)
        return impute_(state.residual, sent, summed, self.impute)
