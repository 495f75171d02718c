"""An exchange for hand-written loops: a call between backward and the optimizer."""

from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from regtopk.core.algorithm import Algorithm
from regtopk.distributed.options import ExchangeOptions, Options, names_typos
from regtopk.distributed.state.parameters import NamedParameters, Parameters
from regtopk.distributed.steps.attached import watch_optimizer
from regtopk.distributed.steps.base import ExchangeBase
from regtopk.distributed.steps.step import Kind, Steps
from regtopk.distributed.transport.collectives import Collectives, group_or_default
from regtopk.errors import ClusterError


class Exchange(ExchangeBase):
    """Exchange gradients over a process group, between backward and the optimizer's step.

    >>> exchange = Exchange(model, RegTopK(density=0.001))     # on every rank
    >>> loss.backward()
    >>> exchange.step()                                        # p.grad becomes the aggregate
    >>> optimizer.step()

    The vector exchanged is all trainable parameters in the module's order, as in the paper.

    Args:
        parameters: a module, parameters, or (name, parameter) pairs, in the same order on every rank.
        algorithm: what is run; the same on every rank.
        grad_scaler: the torch.amp.GradScaler in use: residuals are then kept unscaled.
        options: see `regtopk.ExchangeOptions`.
    """

    @names_typos
    def __init__(
        self,
        parameters: nn.Module | NamedParameters,
        algorithm: Algorithm[Any],
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        **options: Unpack[ExchangeOptions],
    ) -> None:
        checked = Options(grad_scaler=grad_scaler, **options)
        collectives = Collectives(group_or_default(checked.process_group))
        kind = Kind("regtopk.Exchange")
        super().__init__(Steps(Parameters(parameters), algorithm, collectives, checked, kind))
        self._warn_of_one_rank()
        watch_optimizer(self)

    @torch.no_grad()
    def step(self) -> None:
        """Turn every parameter's `.grad` into the aggregate; a missing gradient counts as zero.

        If any rank's gradients are not finite, nothing changes but `.grad`, which becomes NaN everywhere, so
        that a GradScaler (or you) can see it; the step is counted in `num_skipped`.
        """
        parameters = self._steps.parameters
        parameters.check()
        parameters.check_trainable()
        for name, p in parameters.named.items():
            if p.grad is not None and p.grad.layout != torch.strided:
                raise ClusterError(f"gradient of {name!r} has a sparse layout, which is not supported")
        grads = {}
        for name, p in parameters.named.items():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif 0 in p.grad.stride():  # expanded: its entries share memory, and the aggregate's do not
                p.grad = p.grad.clone(memory_format=torch.contiguous_format)
            grads[name] = p.grad
        self._steps.run(grads)
