"""The options that `attach` and `Exchange` share, and the rules they are checked by."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

import torch
from torch import nn

from regtopk.core.codes import check_index_code
from regtopk.core.options import check_choice, check_integer, check_positive, did_you_mean
from regtopk.core.precision import check_residual_dtype
from regtopk.errors import ArgumentError

Collective = Literal["auto", "all_gather", "split"]
ResidualDtype = Literal["float32", "bfloat16"]
Skip = Callable[[str, nn.Parameter], bool]
P = ParamSpec("P")
R = TypeVar("R")


class Writer(Protocol):
    """What draws curves: TensorBoard's SummaryWriter, or anything else that has this method."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> Any:
        """Draw one number of one step."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """See `regtopk.attach` for what each means."""

    index_code: str = "elias-fano"
    weight: float | None = None
    dense_steps: int = 0
    skip: Skip | None = None
    grad_scaler: torch.amp.GradScaler | None = None
    collective: Collective = "auto"
    deterministic: bool = True
    writer: Writer | None = None
    handshake_timeout_s: float = 60.0
    residual_dtype: ResidualDtype = "float32"

    def __post_init__(self) -> None:
        """Check what can be checked without the other ranks."""
        check_index_code(self.index_code)
        check_integer("dense_steps", self.dense_steps, at_least=0)
        if self.skip is not None and not callable(self.skip):
            raise ArgumentError(f"skip must be a callable of (name, parameter), got {self.skip!r}")
        if self.grad_scaler is not None and not hasattr(self.grad_scaler, "get_scale"):
            raise ArgumentError(f"grad_scaler must be a torch.amp.GradScaler, got {self.grad_scaler!r}")
        check_choice("collective", self.collective, ("auto", "all_gather", "split"))
        if self.writer is not None and not hasattr(self.writer, "add_scalar"):
            raise ArgumentError(f"writer must have a method add_scalar, got {self.writer!r}")
        check_positive("handshake_timeout_s", self.handshake_timeout_s)
        check_residual_dtype(self.residual_dtype)


def refuse_k(algorithm: object) -> None:
    """Refuse a number of entries where a model is exchanged in parts."""
    k = getattr(algorithm, "k", None)
    if k is not None:
        raise ArgumentError(
            "k must be None for a model that is exchanged in parts (FSDP units, fragments), which differ in "
            f"size, got {k}: give a density"
        )


def names_typos(function: Callable[P, R]) -> Callable[P, R]:
    """Let a call with an option that does not exist fail with the name of the nearest one that does."""
    known = list(signature(function).parameters)
    name = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_typos(name, kwargs, known)
        return function(*args, **kwargs)

    return checked


def refuse_typos(call: str, given: Iterable[str], known: list[str]) -> None:
    """Refuse an option that a call does not have, and name the nearest one that it has."""
    for option in given:
        if option not in known:
            raise TypeError(f"{call}() got an unexpected option {option!r}{did_you_mean(option, known)}")
