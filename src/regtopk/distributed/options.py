"""The options that all kinds of exchange share, stated once, and the rules they are checked by."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any, Literal, ParamSpec, Protocol, TypedDict, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from regtopk.core.codes import INDEX_CODES
from regtopk.core.link import Link
from regtopk.core.options import check_options, check_positive, did_you_mean, integer, one_of, option
from regtopk.errors import ArgumentError

Collective = Literal["auto", "all_gather", "split"]
Weight = float | Literal["steps", "tokens"] | None
ResidualDtype = Literal["float32", "bfloat16"]
Skip = Callable[[str, nn.Parameter], bool]
P = ParamSpec("P")
R = TypeVar("R")


class Writer(Protocol):
    """What draws curves: TensorBoard's SummaryWriter, or anything else that has this method."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> Any:
        """Draw one number of one step."""


class ExchangeOptions(TypedDict, total=False):
    """What every kind of exchange takes, as keywords. All ranks must give the same, but for `weight`.

    Args:
        process_group: the ranks that take part, as a group or a mesh of one dimension; the default group if
            None. Of a model that fully_shard has sharded it must be given: the replicas, that is the ranks
            that hold the same part of the model. A model in DistributedDataParallel has a group already.
        weight: how much this rank counts, 0 or more: w_n is its share of the sum over all ranks. None on all
            ranks: 1/N. Weights that sum to one (within 1e-6) are taken as they are. `UpdateExchange` takes
            "steps", too, which is `every`, and "tokens": see its `count`.
        dense_steps: how many first steps of the optimizer send everything; 0 if not given.
        skip: a callable of (name, parameter): True sends that parameter dense, for example
            ``lambda name, p: p.ndim <= 1``.
        index_code: how indices are coded: "elias-fano" (if not given), "rice" or "raw32".
        collective: how sparse sums run: "all_gather", "split", or "auto" (if not given): what takes less time
            on the link, or what brings fewer bytes if no link is given.
        link: what is known of the link between ranks, a `regtopk.Link`; None if not given. Where its latency
            makes a ring slow, gloo's long messages for all go to each rank directly.
        deterministic: whether uncoded dense vectors are summed in rank order too, not in the backend's order;
            True if not given.
        residual_dtype: how residuals are kept between steps: "float32" (if not given), or "bfloat16" in half
            the memory, rounded at random.
        writer: a TensorBoard SummaryWriter (or anything with add_scalar) that gets every step's numbers.
        handshake_timeout_s: how long to wait for every rank to make the exchange; 60 if not given.
    """

    process_group: dist.ProcessGroup | DeviceMesh | None
    weight: Weight
    dense_steps: int
    skip: Skip | None
    index_code: str
    collective: Collective
    link: Link | None
    deterministic: bool
    residual_dtype: ResidualDtype
    writer: Writer | None
    handshake_timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Options:
    """`ExchangeOptions` with their defaults, checked; and the scaler of an exchange of gradients."""

    process_group: dist.ProcessGroup | DeviceMesh | None = None
    weight: Weight = None
    dense_steps: int = option(0, integer(at_least=0, at_most=None))
    skip: Skip | None = None
    index_code: str = option("elias-fano", one_of(*INDEX_CODES))
    collective: Collective = option("auto", one_of(*get_args(Collective)))
    link: Link | None = None
    deterministic: bool = True
    residual_dtype: ResidualDtype = option("float32", one_of(*get_args(ResidualDtype)))
    writer: Writer | None = None
    handshake_timeout_s: float = option(60.0, check_positive)
    grad_scaler: torch.amp.GradScaler | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without the other ranks."""
        check_options(self)
        if self.skip is not None and not callable(self.skip):
            raise ArgumentError(f"skip must be a callable of (name, parameter), got {self.skip!r}")
        if self.grad_scaler is not None and not hasattr(self.grad_scaler, "get_scale"):
            raise ArgumentError(f"grad_scaler must be a torch.amp.GradScaler, got {self.grad_scaler!r}")
        if self.link is not None and not isinstance(self.link, Link):
            raise ArgumentError(f"link must be a regtopk.Link such as Link(bandwidth=1e8), got {self.link!r}")
        if self.writer is not None and not hasattr(self.writer, "add_scalar"):
            raise ArgumentError(f"writer must have a method add_scalar, got {self.writer!r}")


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

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_typos(function.__qualname__.removesuffix(".__init__"), kwargs, known_options(function))
        return function(*args, **kwargs)

    return checked


def known_options(function: Callable[..., Any]) -> list[str]:
    """The names that a call takes: its own, and those of the TypedDict that its **options are."""
    *own, last = signature(function).parameters.values()
    others = get_args(last.annotation)[0].__annotations__ if last.name == "options" else [last.name]
    return [*(each.name for each in own), *others]


def refuse_typos(call: str, given: Iterable[str], known: list[str]) -> None:
    """Refuse an option that a call does not have, and name the nearest one that it has."""
    for name in given:
        if name not in known:
            raise TypeError(f"{call}() got an unexpected option {name!r}{did_you_mean(name, known)}")
