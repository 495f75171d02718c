"""A stand-in for an exchange where there is one process, and so nobody to exchange with."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from regtopk.core.algorithm import Algorithm
from regtopk.distributed.options import Options
from regtopk.distributed.state.parameters import Parameters
from regtopk.distributed.steps.base import ExchangeBase
from regtopk.distributed.steps.step import Kind, Steps
from regtopk.distributed.transport.collectives import Alone

_log = logging.getLogger("regtopk")


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
