"""A stand-in for an exchange where there is one process, and so nobody to exchange with."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from regtopk.core.algorithm import Algorithm
from regtopk.distributed.options import Options
from regtopk.distributed.state.parameters import Parameters
from regtopk.distributed.steps.base import ExchangeBase
from regtopk.distributed.steps.step import Kind, Steps
from regtopk.distributed.transport.collectives import Collectives

_log = logging.getLogger("regtopk")
WORLD_SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # as launchers tell it


def is_one_process() -> bool:
    """Whether this process trains alone: no launcher started others, and no process group holds others."""
    if dist.is_initialized():
        return dist.get_world_size() == 1
    return all(os.environ.get(name, "1") == "1" for name in WORLD_SIZES)


class OneProcess(ExchangeBase):
    """What `attach` returns for a model that is not wrapped because there is one process.

    Accelerate and Lightning wrap a model in DDP only for several processes. With this, the same script runs
    on one: gradients are left as they are, and nothing is sent. A checkpoint of several ranks can be loaded
    and saved again; what its ranks had not sent is kept.
    """

    def __init__(self, model: nn.Module, algorithm: Algorithm[Any], options: Options) -> None:
        super().__init__(Steps(Parameters(model), algorithm, Alone(), options, Kind("regtopk.attach")))
        _log.warning(
            "%s is not wrapped in DistributedDataParallel, and there is one process: nothing is exchanged",
            type(model).__name__,
        )

    def summary(self) -> str:
        """That nothing was sent."""
        return f"{self._steps.algorithm.name}: one process, nothing was exchanged"

    def detach(self) -> None:
        """Nothing to do: the model trains as without an exchange."""

    def finish(self) -> None:
        """Nothing to do: there is one model."""

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Nothing to do: there is one model."""
        yield


class Alone(Collectives):
    """The collectives of a handshake and a checkpoint, for one process without a process group."""

    rank = 0
    num_workers = 1
    store = None

    def __init__(self) -> None:
        """There is no group."""
        self.ranks = [0]

    def _backend_for(self, device: str) -> None:
        """There is none."""

    def all_gather_objects(self, thing: Any) -> list[Any]:
        """This process's."""
        return [thing]

    def gather_objects(self, thing: Any, destination: int) -> list[Any] | None:
        """This process's."""
        return [thing]
