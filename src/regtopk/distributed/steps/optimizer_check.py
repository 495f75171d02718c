"""A warning where an algorithm with a momentum of its own meets an optimizer that has one, too."""

import logging
import weakref
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from regtopk.core.algorithm import Algorithm
from regtopk.errors import ArgumentError

_log = logging.getLogger("regtopk")


def warn_of_two_momenta(algorithm: Algorithm[Any], optimizer: Optimizer | None) -> None:
    """Say on rank 0 that the momenta of an algorithm and of an optimizer multiply."""
    if optimizer is None or not _has_own_momentum(algorithm):
        return
    found = [
        f"{name}={group[name]}"
        for group in optimizer.param_groups
        for name in ("momentum", "betas")
        if group.get(name) and (name == "momentum" or group[name][0])
    ]
    if found and (not dist.is_initialized() or dist.get_rank() == 0):
        _log.warning(
            "%s keeps a momentum of its own, and the optimizer has one, too (%s with %s): steps become many "
            "times too long. Use torch.optim.SGD without momentum, or an algorithm without one, such as TopK",
            algorithm.name,
            type(optimizer).__name__,
            found[0],
        )


def watch_optimizer(model: nn.Module, algorithm: Algorithm[Any], optimizer: Optimizer | None) -> None:
    """Warn of two momenta, now or, if no optimizer is given, when one first trains the model."""
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ArgumentError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    warn_of_two_momenta(algorithm, optimizer)
    if optimizer is not None or not _has_own_momentum(algorithm):
        return
    watched = weakref.WeakSet([model])  # emptied when the model is gone, or an optimizer was found

    def look(optimizer: Optimizer, *_: Any) -> None:
        own = {id(p) for each in watched for p in each.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            watched.clear()  # torch does not let a hook remove itself
            warn_of_two_momenta(algorithm, optimizer)

    weakref.finalize(model, register_optimizer_step_pre_hook(look).remove)


def _has_own_momentum(algorithm: Algorithm[Any]) -> bool:
    return getattr(algorithm, "has_own_momentum", False) and getattr(algorithm, "momentum", 1.0) != 0
