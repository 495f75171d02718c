"""The options that `attach` and `Exchange` share, and the rules they are checked by."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from regtopk.core.algorithm import Algorithm
from regtopk.core.codes import check_index_code
from regtopk.core.options import check_choice, check_integer, check_number
from regtopk.errors import ArgumentError

Collective = Literal["auto", "all_gather", "split"]
Scope = Literal["model", "bucket"]
Skip = Callable[[str, nn.Parameter], bool]
COLLECTIVES = ("auto", "all_gather", "split")
SCOPES = ("model", "bucket")


class Writer(Protocol):
    """What draws curves: TensorBoard's SummaryWriter, or anything else that has this method."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> Any:
        """Draw one number of one step."""


@dataclass(frozen=True)
class Options:
    """See `regtopk.attach` for what each means."""

    index_code: str
    weight: float | None
    dense_steps: int
    skip: Skip | None
    grad_scaler: torch.amp.GradScaler | None
    collective: Collective
    deterministic: bool
    writer: Writer | None
    handshake_timeout_s: float

    def __post_init__(self) -> None:
        """Check what can be checked without the other ranks."""
        check_index_code(self.index_code)
        check_integer("dense_steps", self.dense_steps, at_least=0)
        if self.skip is not None and not callable(self.skip):
            raise ArgumentError(f"skip must be a callable of (name, parameter), got {self.skip!r}")
        if self.grad_scaler is not None and not hasattr(self.grad_scaler, "get_scale"):
            raise ArgumentError(f"grad_scaler must be a torch.amp.GradScaler, got {self.grad_scaler!r}")
        check_choice("collective", self.collective, COLLECTIVES)
        if self.writer is not None and not hasattr(self.writer, "add_scalar"):
            raise ArgumentError(f"writer must have a method add_scalar, got {self.writer!r}")
        check_number("handshake_timeout_s", self.handshake_timeout_s, "above 0", lambda x: x > 0)


def check_algorithm(algorithm: object) -> None:
    """Refuse what is no algorithm, such as its name."""
    if not isinstance(algorithm, Algorithm):
        raise ArgumentError(
            f"algorithm must be an Algorithm such as RegTopK(density=0.001), got {algorithm!r}"
        )


def check_scope(scope: object, algorithm: object) -> None:
    """Refuse an unknown scope, and a k that does not fit it."""
    check_choice("scope", scope, SCOPES)
    k = getattr(algorithm, "k", None)
    if scope == "bucket" and k is not None:
        raise ArgumentError(f"k must be None with scope='bucket', whose buckets differ in size, got {k}")
