"""What exchanges hear of optimizers and modules, and what must not meet in one training."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, WeakSet

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from regtopk.core.algorithm import Algorithm
from regtopk.errors import ClusterError, log

OPTIMIZERS: "WeakSet[Optimizer]" = WeakSet()  # whose updates are exchanged
# exchanges of gradients, and the optimizers that were looked at for each
_watched: "WeakKeyDictionary[Any, WeakSet[Optimizer]]" = WeakKeyDictionary()
_WITHOUT_PULSES = ("dense", "ef21", "powersgd")  # algorithms whose aggregate has every entry in every step


def refuse_updates(model: nn.Module) -> None:
    """Refuse a model whose updates are exchanged."""
    if any(_trains(optimizer, model.parameters()) for optimizer in OPTIMIZERS):
        raise ClusterError(
            "model must have no UpdateExchange, got one, and gradients would be exchanged beside updates: "
            "close() it first"
        )


def watch_optimizer(exchange: Any) -> None:
    """Warn of two momenta and of Adam when an optimizer first steps that gets the gradients exchanged."""
    _look_for_optimizers()
    _watched[exchange] = WeakSet()


@cache
def _look_for_optimizers() -> None:
    """Look at the steps of all optimizers, from now on.

    The hook stays. One that went with its model went when the garbage collector took that, and if this was
    inside a step of any optimizer, torch ended the step with an error.
    """
    register_optimizer_step_pre_hook(look)


def look(optimizer: Optimizer, *_: Any) -> None:
    """Warn of what does not go with the gradients that an optimizer gets from an exchange."""
    for exchange, known in list(_watched.items()):
        if optimizer not in known and not exchange.is_closed:
            known.add(optimizer)
            if _trains(optimizer, exchange._trained()):
                instead = "exchange what it changed, by regtopk.UpdateExchange, or use"
                warn(exchange._steps.algorithm, optimizer, instead)


def _trains(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether an optimizer has one of some parameters."""
    own = set(map(id, parameters))
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


def warn(algorithm: Algorithm[Any], optimizer: Optimizer, instead: str = "") -> None:
    """Say on rank 0 what does not go together: two momenta, which multiply; or pulses and Adam.

    `instead` is what to do without Adam. It is empty if the optimizer does not get the aggregate.
    """
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    name, kind, groups = algorithm.name, type(optimizer).__name__, optimizer.param_groups
    if algorithm.has_own_momentum and getattr(algorithm, "momentum", 1.0) != 0:
        found = [
            f"{option}={group[option]}"
            for group in groups
            for option in ("momentum", "betas")
            if group.get(option) and (option == "momentum" or group[option][0])
        ]
        if found:
            log.warning(
                f"{name} keeps a momentum of its own, and the optimizer has one, too ({kind} with "
                f"{found[0]}): steps become many times too long. Use torch.optim.SGD without momentum, or an "
                "algorithm without one, such as TopK"
            )
    elif instead and name not in _WITHOUT_PULSES and any("betas" in group for group in groups):
        log.warning(
            f"{name} sends an entry rarely, as one large value, which spoils {kind}'s second moments: "
            f"{instead} torch.optim.SGD"
        )


class Notices:
    """Remembers that a module has loaded weights, and warns once if it is read inside a round.

    Inside a round the module's weights are this rank's. A copy of the module says nothing.
    """

    _is_silent = False  # while those read who know

    def __init__(self, is_inside: Callable[[], bool] | None = None) -> None:
        self._is_inside = None if is_inside is None else WeakMethod(is_inside)  # no module holds its exchange
        self._has_loaded = False

    def __reduce__(self) -> Any:
        return Notices, ()

    def hear_load(self, *_: Any) -> None:
        """Called by the module."""
        self._has_loaded = True

    def taken(self) -> bool:
        """Whether it has loaded weights since this was last asked."""
        has_loaded, self._has_loaded = self._has_loaded, False
        return has_loaded

    def hear_read(self, *_: Any) -> None:
        """Called by the module."""
        is_inside = None if self._is_inside is None or Notices._is_silent else self._is_inside()
        if is_inside is not None and is_inside():
            self.mute()
            log.warning(
                "state_dict() of the model was called inside a round: it holds this rank's weights. Call it "
                "`with exchange.agreed():` for those that all ranks share, or save exchange.state_dict()"
            )

    def mute(self) -> None:
        """Say nothing of reads from now on."""
        self._is_inside = None

    @classmethod
    @contextmanager
    def silent(cls) -> Iterator[None]:
        """Let modules be read."""
        before, cls._is_silent = cls._is_silent, True
        try:
            yield
        finally:
            cls._is_silent = before
