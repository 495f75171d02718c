"""What an algorithm is: a conversation with the cluster.

`exchange` is a generator. It yields requests, receives what the cluster made of them, and returns the
aggregate that training uses. The same code runs on one rank of a real cluster, on vectors of shape (J,), and
in the simulator, on all workers at once as (N, J).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from typing import Any, ClassVar, Generic, Literal

from torch import Tensor

from regtopk.core.codes import VALUE_CODES
from regtopk.core.options import check_number, check_options, integer, one_of, option, within
from regtopk.core.requests import Request
from regtopk.core.state import ResidualState, StateT
from regtopk.core.worker import Worker
from regtopk.errors import ArgumentError

Conversation = Generator[Request, Any, Tensor]

# What an algorithm can promise. The contract, tests/algorithms/test_contract.py, holds it to its promises.
Promise = Literal[
    "exact_k",  # every worker sends exactly `num_selected` entries per step
    "conserves",  # sent + residual afterwards = residual before + grad (without a residual: 0)
    "conserves_sum",  # only sum_n w_n of that: aggregate + sum_n w_n residual = sum_n w_n (residual + grad)
    "shared_support",  # all workers send the same entries
    "dense_at_full_density",  # with k = J the aggregate is that of Dense with the same value code
    "unbiased",  # over its random draws, the mean aggregate is sum_n w_n g_n
    "one_sum",  # a step asks for one sparse sum, of messages whose length is known, and for nothing else
    "replicates",  # runs R independent clusters, (R, N, J), at once: no size depends on the gradients
]
Promises = frozenset[Promise]


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC, Generic[StateT]):
    """Base of every algorithm: frozen options, no state of its own."""

    name: ClassVar[str]
    listens: ClassVar[bool] = False  # whether it reads worker.report; all ranks then get rank 0's each step
    has_own_momentum: ClassVar[bool] = False  # whether the optimizer must be plain SGD, without momentum

    def __post_init__(self) -> None:
        check_options(self)

    @property
    @abstractmethod
    def promises(self) -> Promises:
        """What the algorithm promises with its options; a class attribute will do if no option matters."""

    @abstractmethod
    def init(self, worker: Worker) -> StateT:
        """The state before the first step."""

    @abstractmethod
    def exchange(self, grad: Tensor, state: StateT, worker: Worker) -> Conversation:
        """One step, from a worker's gradient to the aggregate. It changes the state, not the gradient."""

    def options(self) -> dict[str, Any]:
        """The constructor arguments as plain values, to record them and to compare ranks."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True, kw_only=True)
class WithDensity(Algorithm[StateT]):
    """An algorithm that is told how many of J entries to send.

    Args:
        density: k / J in (0, 1], or a function of the step that returns it; k = max(1, round(density J)).
        k: the number of entries itself. Give exactly one of the two.
    """

    density: float | Callable[[int], float] | None = None
    k: int | None = option(None, integer(at_least=1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.density is None) == (self.k is None):
            raise ArgumentError(f"give exactly one of density and k, got density={self.density}, k={self.k}")
        if self.density is not None and not callable(self.density):
            check_density(self.density)

    def num_selected(self, worker: Worker) -> int:
        """k of this step: the given one, or max(1, round(density · J))."""
        if self.k is not None:
            if self.k > worker.numel:
                raise ArgumentError(f"k must be at most J = {worker.numel}, got {self.k}")
            return self.k
        density = self.density(worker.step) if callable(self.density) else self.density
        return max(1, round(check_density(density) * worker.numel))


@dataclass(frozen=True, kw_only=True)
class Sparsifier(WithDensity[StateT]):
    """An algorithm that sends about k of J entries, their values in a value code.

    Args:
        density, k: as in `WithDensity`.
        value_code: how values are coded on the wire: "float32", "bfloat16", "float16", "int8", "4bit",
            "2bit" or "sign". What a code loses stays in the residual.
        returned: see `ReturnsInPart`; None for all other algorithms.
    """

    can_return: ClassVar[bool] = False  # whether sums of what workers send may come back in part
    value_code: str = option("float32", one_of(*VALUE_CODES))
    returned: float | None = option(None, within("(0, 1]"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.returned is None:
            return
        if not self.can_return or getattr(self, "score", None) is not None:
            raise ArgumentError(
                "returned is for algorithms whose workers choose for themselves by size alone "
                "(topk, chunked-topk, dgc and ef21, without a score), and must be None for "
                f"{self.name!r}, got {self.returned}"
            )
        if self.k is not None:
            raise ArgumentError(
                f"returned is a part of J and goes with density, got returned={self.returned}, k={self.k}"
            )


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Algorithm[ResidualState]):
    """An algorithm that remembers what it has not sent, and nothing else."""

    def init(self, worker: Worker) -> ResidualState:
        """The residual starts at zero."""
        return ResidualState(residual=worker.zeros())


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """A density that falls from `start` by equal factors (Deep Gradient Compression, Section 3.4).

    S_t = start (density / start)^(i / num_stages) in stage i = floor(num_stages t / num_steps), then density

    From 0.25 to 0.001 in 4 stages, as the paper has it: 0.25, 0.063, 0.016, 0.004, 0.001.

    Args:
        density: k / J after the warm-up, in (0, 1].
        num_steps: steps that the warm-up takes, >= 1.
        start: k / J in its first stage, in (0, 1].
        num_stages: the number of its stages, >= 1.
    """

    density: float = option(MISSING, within("(0, 1]"))
    num_steps: int = option(MISSING, integer(at_least=1))
    start: float = option(0.25, within("(0, 1]"))
    num_stages: int = option(4, integer(at_least=1))

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(self, step: int) -> float:
        """The density of a step."""
        if step >= self.num_steps:
            return self.density
        stage = self.num_stages * step // self.num_steps
        return float(self.start * (self.density / self.start) ** (stage / self.num_stages))


def check_is_algorithm(algorithm: object) -> None:
    """Refuse what is no algorithm, such as its name or its class."""
    if not isinstance(algorithm, Algorithm):
        is_recipe = isinstance(getattr(algorithm, "algorithm", None), Algorithm)
        hint = ": give UpdateExchange recipe.algorithm, **recipe.options" if is_recipe else ""
        raise ArgumentError(
            f"algorithm must be an Algorithm such as RegTopK(density=0.001), got {algorithm!r}{hint}"
        )


def check_density(density: Any) -> float:
    """Refuse a density outside (0, 1]."""
    check_number("density", density, "in (0, 1]", lambda x: 0 < x <= 1)
    return float(density)


def converse(conversation: Conversation, answer: Callable[[Request], Any]) -> Tensor:
    """Run a conversation to its end with a driver's answers and return the aggregate."""
    try:
        request = next(conversation)
        while True:
            request = conversation.send(answer(request))
    except StopIteration as done:
        aggregate: Tensor = done.value
        return aggregate


def _plain(option: Any) -> Any:
    if isinstance(option, float) and not math.isfinite(option):
        return str(option)
    if option is None or isinstance(option, (bool, int, float, str)):
        return option
    if is_dataclass(option) and not isinstance(option, type):
        parts = (f"{f.name}={_plain(getattr(option, f.name))}" for f in fields(option))
        return f"{type(option).__name__}({', '.join(parts)})"
    if isinstance(option, partial):
        return f"partial({_plain(option.func)}, {option.args}, {option.keywords})"
    if hasattr(option, "__qualname__"):
        return f"{option.__module__}.{option.__qualname__}"
    return f"{type(option).__module__}.{type(option).__qualname__}"  # its repr may contain a memory address
