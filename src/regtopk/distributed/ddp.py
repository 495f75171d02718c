"""One line for users of DistributedDataParallel: a communication hook that exchanges sparsely.

scope="model" holds all buckets until the last has arrived, selects over the whole model as the paper does,
and then completes them together. scope="bucket" selects within each bucket and overlaps with backward: a
queue, drained by one thread over a process group of its own, runs every bucket's rounds in the same order on
every rank.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from regtopk.core.algorithm import Algorithm
from regtopk.distributed.bucket_queue import Arrival, BucketQueue
from regtopk.distributed.exchange import Exchange
from regtopk.errors import ArgumentError, ClusterError

Scope = Literal["model", "bucket"]


class SparseHookState(Exchange):
    """The state of `sparse_hook`, for those who register hooks themselves.

    >>> state = SparseHookState(ddp_model, RegTopK(density=0.001))
    >>> ddp_model.register_comm_hook(state, sparse_hook)

    Takes the arguments of `attach`.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        algorithm: Algorithm[Any],
        *,
        scope: Scope = "model",
        **options: Any,
    ) -> None:
        _check_model(model)
        if scope not in ("model", "bucket"):
            raise ArgumentError(f"scope must be 'model' or 'bucket', got {scope!r}")
        self.scope = scope
        super().__init__(model.module, algorithm, process_group=model.process_group, **options)
        self._may_drop = bool(model.find_unused_parameters)
        self._names = {id(p): name for name, p in self.parameters.items()}
        self._arrivals: list[Arrival] = []
        self._was_skipped = False
        self._queue = BucketQueue(self) if scope == "bucket" else None

    def step(self) -> None:
        """Not for DDP, whose backward runs the exchange."""
        raise ClusterError("step() must not be called on an attached model: its backward() runs the exchange")

    def on_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Take a bucket from DDP; its future completes with the aggregate."""
        arrival = self._arrival(bucket)
        self._arrivals.append(arrival)
        if self._queue is not None:
            self._queue.put(arrival)
        elif arrival.is_last:
            self._exchange_model()
        if arrival.is_last:
            _after_backward(self._finish_backward)
        return arrival.future

    def _arrival(self, bucket: GradBucket) -> Arrival:
        names = []
        for p in bucket.parameters():
            name = self._names.get(id(p))
            if name is None:
                raise ClusterError(
                    f"parameter of shape {tuple(p.shape)} was added to the model after attach: "
                    "attach to a new DistributedDataParallel"
                )
            if tuple(p.shape) != self.shapes[name]:
                raise ClusterError(
                    f"parameter {name!r} must keep its shape {self.shapes[name]}, got {tuple(p.shape)}"
                )
            names.append(name)
        if bucket.buffer().is_sparse:
            raise ClusterError(f"gradient of {names} has a sparse layout, which is not supported")
        if bucket.index() == 0:
            self._arrivals = []
        grads = dict(zip(names, bucket.gradients(), strict=True))
        return Arrival(tuple(names), grads, bucket.buffer(), bucket.index(), bucket.is_last())

    def _exchange_model(self) -> None:
        grads = {name: grad for arrival in self._arrivals for name, grad in arrival.grads.items()}
        if len(grads) != len(self.parameters):
            missing = next(name for name in self.parameters if name not in grads)
            raise ClusterError(f"parameter {missing!r} has stopped requiring a gradient since attach")
        self.exchange_all(grads)
        for arrival in self._arrivals:
            arrival.future.set_result(arrival.buffer)

    def _finish_backward(self) -> None:
        """When DDP has handed out the gradients: report failures, and give what DDP dropped."""
        arrivals, self._arrivals = self._arrivals, []
        if self._queue is not None:
            self._queue.raise_failure()
        for arrival in arrivals:
            for name, aggregate in arrival.grads.items():
                if self._queue is not None and self._queue.was_skipped:
                    _fill_grad(self.parameters[name], math.nan)
                elif self._may_drop:
                    _give_dropped(self.parameters[name], aggregate)


def attach(
    model: DistributedDataParallel,
    algorithm: Algorithm[Any],
    *,
    scope: Scope = "model",
    index_code: str = "elias-fano",
    weight: float | None = None,
    dense_steps: int = 0,
    skip: Any = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    **options: Any,
) -> SparseHookState:
    """Make a DistributedDataParallel model exchange its gradients with an algorithm. Call it on every rank.

    >>> model = DistributedDataParallel(model)
    >>> exchange = regtopk.attach(model, regtopk.RegTopK(density=0.001))
    >>> ...                                  # train as before
    >>> print(exchange.summary())

    Args:
        model: wrapped in DistributedDataParallel, without another communication hook.
        algorithm: what is run; the same on every rank.
        scope: "model" selects over the whole model, "bucket" within each DDP bucket, overlapping backward.
        index_code: how indices are coded: "elias-fano", "rice" or "raw32".
        weight: this rank's w_n; 1/N if None. All ranks' must sum to one within 1e-6.
        dense_steps: how many first steps send everything.
        skip: a callable of (name, parameter): True sends that parameter dense,
            for example ``lambda name, p: p.ndim <= 1``.
        grad_scaler: the torch.amp.GradScaler in use: residuals are then kept unscaled.
        **options: further options of `Exchange`: collective, deterministic, writer.

    Returns:
        The exchange: `summary()`, `total`, `last_step`, `state_dict()`, `load_state_dict()`.

    Raises:
        ClusterError: not a DDP model, attached twice, or the ranks differ; nothing was changed.
        OracleError: the algorithm asks what only a simulator can answer.
    """
    if hasattr(model, "_regtopk_exchange"):
        raise ClusterError("attach must be called once for a model: this one is attached already")
    state = SparseHookState(
        model,
        algorithm,
        scope=scope,
        index_code=index_code,
        weight=weight,
        dense_steps=dense_steps,
        skip=skip,
        grad_scaler=grad_scaler,
        **options,
    )
    try:
        model.register_comm_hook(state, sparse_hook)
    except RuntimeError as error:
        raise ClusterError(f"the model must not have another communication hook: {error}") from error
    object.__setattr__(model, "_regtopk_exchange", state)
    return state


def sparse_hook(state: SparseHookState, bucket: GradBucket) -> Future[Tensor]:
    """The communication hook: see `attach`, or register it with a `SparseHookState` of your own."""
    return state.on_bucket(bucket)


def _check_model(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        return
    kind = type(model).__name__
    if "FullyShardedDataParallel" in [base.__name__ for base in type(model).__mro__]:
        raise ClusterError(f"model must be a DistributedDataParallel, got {kind}: FSDP is not supported")
    raise ClusterError(
        f"model must be a DistributedDataParallel, got {kind}: wrap it first, or use regtopk.Exchange"
    )


def _after_backward(callback: Any) -> None:
    """Run a callback when this backward is over and DDP has finished with it.

    DDP queues its own end after the last bucket's hook returns; a callback that queues another comes later.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(callback))


def _give_dropped(p: nn.Parameter, aggregate: Tensor) -> None:
    """DDP drops what a hook returns for a parameter that no rank used: hand it over, if anything came."""
    if p.grad is None:
        if bool(aggregate.any()):
            p.grad = aggregate.detach().clone()
    elif not torch.equal(p.grad, aggregate):
        p.grad.copy_(aggregate)


def _fill_grad(p: nn.Parameter, value: float) -> None:
    if p.grad is not None:
        p.grad.fill_(value)
