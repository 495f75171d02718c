"""One line for users of DistributedDataParallel: a communication hook that exchanges sparsely.

scope="model" holds all buckets until the last has arrived, selects over the whole model as the paper does,
and then completes them together. scope="bucket" selects within each bucket and overlaps with backward: a
queue, drained by one thread over a process group of its own, runs every bucket's rounds in the same order on
every rank.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from regtopk.core.algorithm import Algorithm
from regtopk.distributed.bucket_queue import Arrival, BucketQueue
from regtopk.distributed.checks import check_model, check_scope
from regtopk.distributed.collectives import Collectives, group_of_its_own, is_world
from regtopk.distributed.exchange import Exchange
from regtopk.distributed.parameters import Parameters
from regtopk.errors import ClusterError

Scope = Literal["model", "bucket"]

_attached: "weakref.WeakKeyDictionary[nn.Module, SparseHookState]" = weakref.WeakKeyDictionary()


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
        check_model(model)
        check_scope(scope, algorithm)
        self.scope = scope
        parameters = Parameters(model.module, ignored=model.parameters_to_ignore)
        super().__init__(parameters, algorithm, process_group=model.process_group, **options)
        self._may_drop = bool(model.find_unused_parameters)
        self._names = {id(p): name for name, p in parameters.named.items()}
        self._arrivals: list[Arrival] = []
        self._queue: BucketQueue | None = None
        if scope == "bucket":  # whose thread must not mix its collectives with DDP's own
            group = group_of_its_own(self.driver.collectives.group, self.device)
            self.driver.collectives = Collectives(group)
            self._queue = BucketQueue(self)
        # DDP's backward fails with an internal assertion on parameters that changed: look before
        self._forward_hook = model.register_forward_pre_hook(self._before_forward)

    def step(self) -> None:
        """Not for DDP, whose backward runs the exchange."""
        raise ClusterError("step() must not be called on an attached model: its backward() runs the exchange")

    def close(self) -> None:
        """End the thread and the process group of scope="bucket". Call it on every rank; no step follows."""
        self._obstacle = "the exchange must not be used after close()"
        self._forward_hook.remove()
        if self._queue is not None:
            self._queue.close()
            group = self.driver.collectives.group
            if is_world(group):  # torch reuses the names of other groups, which then would not connect
                dist.barrier(group)
                dist.destroy_process_group(group)

    def _before_forward(self, model: DistributedDataParallel, _: object) -> None:
        if model._join_config.enable:
            raise ClusterError(
                "the model must not be used within torch's Join: a rank without inputs answers DDP's own "
                "collectives, not these; give all ranks as many batches"
            )
        if torch.is_grad_enabled():
            self.parameters.check()

    def groups_to_resume(self, saved: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """The buckets that were saved: a new process starts with one, and gets the same again later."""
        return saved if self._queue is not None else super().groups_to_resume(saved)

    def on_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Take a bucket from DDP; its future completes with the aggregate."""
        if bucket.index() == 0:
            self.parameters.check_trainable()
            self._arrivals = []
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
        names = tuple(self._names[id(p)] for p in bucket.parameters())
        if bucket.buffer().layout != torch.strided:
            raise ClusterError(f"gradient of {names[0]!r} has a sparse layout, which is not supported")
        grads = dict(zip(names, bucket.gradients(), strict=True))
        return Arrival(names, grads, bucket.buffer(), bucket.index(), bucket.is_last())

    def _exchange_model(self) -> None:
        self.exchange_all({name: grad for arrival in self._arrivals for name, grad in arrival.grads.items()})
        for arrival in self._arrivals:
            arrival.future.set_result(arrival.buffer)

    def _finish_backward(self) -> None:
        """When DDP has handed out the gradients: report failures, and give what DDP dropped."""
        arrivals, self._arrivals = self._arrivals, []
        if self._queue is not None:
            self._queue.raise_failure()
            if self._queue.was_skipped:  # also in buckets that were exchanged before the bad one arrived
                for p in self.parameters.named.values():
                    if p.grad is not None:
                        p.grad.fill_(math.nan)
                return
        if self._may_drop:
            grads = {name: grad for arrival in arrivals for name, grad in arrival.grads.items()}
            _give_dropped(self.parameters.named, grads)


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
        The exchange: `summary()`, `total`, `last_step`, `state_dict()`, `load_state_dict()`; and `close()`,
        for those who attach to many models in one process.

    Raises:
        ClusterError: not a DDP model, attached twice, or the ranks differ; nothing was changed.
        OracleError: the algorithm asks what only a simulator can answer.
    """
    if isinstance(model, nn.Module) and model in _attached:
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
        state.close()
        raise ClusterError(f"the model must not have another communication hook: {error}") from error
    _attached[model] = state
    return state


def sparse_hook(state: SparseHookState, bucket: GradBucket) -> Future[Tensor]:
    """The communication hook: see `attach`, or register it with a `SparseHookState` of your own."""
    return state.on_bucket(bucket)


def _after_backward(callback: Callable[[], None]) -> None:
    """Run a callback when this backward is over and DDP has finished with it.

    DDP queues its own end after the last bucket's hook returns; a callback that queues another comes later.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(callback))


def _give_dropped(parameters: dict[str, nn.Parameter], aggregates: dict[str, Tensor]) -> None:
    """DDP drops what a hook returns for a parameter that no rank used: hand it over, if anything came."""
    dropped = []
    for name, aggregate in aggregates.items():
        grad = parameters[name].grad
        if grad is None:
            dropped.append(name)
        else:  # zeroed but not set to None; where DDP has written it, this changes nothing
            grad.copy_(aggregate)
    if dropped:
        has_come = torch.stack([aggregates[name].any() for name in dropped]).tolist()
        for name, came in zip(dropped, has_come, strict=True):
            if came:
                parameters[name].grad = aggregates[name].clone()
