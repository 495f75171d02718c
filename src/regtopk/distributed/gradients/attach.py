"""For users: `attach` makes a model exchange gradients, however it is wrapped; `Exchange` is for loops."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Unpack

from regtopk.core.algorithm import Algorithm
from regtopk.distributed.gradients.ddp import SparseHookState, sparse_hook
from regtopk.distributed.gradients.fsdp import ShardedHookState
from regtopk.distributed.options import ExchangeOptions, Options, names_typos
from regtopk.distributed.state.parameters import NamedParameters, Parameters, fsdp_version, uncompiled
from regtopk.distributed.steps.attached import look, refuse_updates, watch_optimizer
from regtopk.distributed.steps.base import ExchangeBase
from regtopk.distributed.steps.step import Kind, Steps
from regtopk.distributed.transport.collectives import Alone, Collectives, group_or_default, is_one_process
from regtopk.errors import ArgumentError, ClusterError, log


class OneProcess(ExchangeBase):
    """What `attach` returns for a model that is not wrapped because there is one process.

    The script of many processes runs on one then: gradients are left as they are, and nothing is sent. A
    checkpoint of several ranks can be loaded and saved again; what its ranks had not sent is kept.
    """

    def __init__(self, model: nn.Module, algorithm: Algorithm[Any], options: Options) -> None:
        super().__init__(Steps(Parameters(model), algorithm, Alone(), options, Kind("regtopk.attach")))
        log.warning(
            "%s is not wrapped in DistributedDataParallel, and there is one process: nothing is exchanged",
            type(model).__name__,
        )

    def summary(self) -> str:
        """That nothing was sent."""
        return f"{self._steps.algorithm.name}: one process, nothing was exchanged"

    def finish(self) -> None:
        """Nothing to do: there is one model, which trains as without an exchange."""

    detach = finish

    def count(self, tokens: float) -> None:
        """Nothing to do: there is nobody else."""

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Nothing to do: there is one model."""
        yield


@names_typos
def attach(
    model: nn.Module,
    algorithm: Algorithm[Any],
    *,
    optimizer: Optimizer | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    **options: Unpack[ExchangeOptions],
) -> SparseHookState | ShardedHookState | OneProcess:
    """Make a DDP or fully_shard'ed model exchange its gradients with an algorithm. Call it on every rank.

    >>> model = DistributedDataParallel(model)
    >>> exchange = regtopk.attach(model, regtopk.Consensus(density=0.01, value_code="4bit"))
    >>> ...                                  # train as before, with SGD
    >>> print(exchange.summary())

    A model that fully_shard has sharded over one axis of a mesh is exchanged over the other, the replicas.
    Every rank exchanges its own part of each FSDP unit with the ranks that hold the same part:

    >>> mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
    >>> fully_shard(model, mesh=mesh["shard"])
    >>> exchange = regtopk.attach(model, algorithm, process_group=mesh["replicate"])

    With Adam, and where you clip, use `regtopk.UpdateExchange`: a sparse aggregate arrives in pulses. If an
    exchange fails (a lost rank), it refuses to be saved or to go on until a checkpoint is loaded.

    Args:
        model: wrapped in DistributedDataParallel, without another communication hook; torch.compile may be
            around that. Or sharded by fully_shard over a mesh of one dimension. Where there is one process,
            a model that is not wrapped is left as it is.
        algorithm: what is run; the same on every rank.
        optimizer: the one that trains the model. If given, what does not go with the algorithm (DGC beside
            momentum, Adam) is logged now, otherwise in the first step.
        grad_scaler: the torch.amp.GradScaler in use: residuals are then kept unscaled.
        options: see `regtopk.ExchangeOptions`.

    Returns:
        The exchange: see `regtopk.ExchangeBase`.

    Raises:
        ArgumentError: an option breaks its rule, or does not fit the model.
        ClusterError: a model that is not wrapped, a second call, ranks that differ or that did not call.
        OracleError: the algorithm asks what only a simulator can answer.
    """
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ArgumentError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    state = _attached(uncompiled(model), algorithm, Options(grad_scaler=grad_scaler, **options))
    if optimizer is not None:
        look(optimizer)
    return state


def _attached(
    inner: Any, algorithm: Algorithm[Any], options: Options
) -> SparseHookState | ShardedHookState | OneProcess:
    if isinstance(inner, nn.Module):
        refuse_updates(inner)
        if any(fsdp_version(part) == 2 for part in inner.modules()):
            return ShardedHookState(inner, algorithm, options)
        is_wrapped = isinstance(inner, DistributedDataParallel) or fsdp_version(inner) > 0
        if not is_wrapped and is_one_process():
            return OneProcess(inner, algorithm, options)
    state = SparseHookState(inner, algorithm, **vars(options))  # which refuses all but DDP
    try:
        inner.register_comm_hook(state, sparse_hook)
    except RuntimeError as error:
        state.close()
        raise ClusterError(
            "attach must be called once, for a model without another communication hook (after detach(), "
            f"wrap the network in a new DistributedDataParallel): {error}"
        ) from error
    return state


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
        collectives = Collectives(group_or_default(checked.process_group), checked.link)
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
