"""For users of DistributedDataParallel: a communication hook that exchanges sparsely.

It holds all of DDP's buckets until the last has arrived, selects over the whole model as the paper does, and
then completes them together.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from regtopk.core.algorithm import Algorithm
from regtopk.distributed.options import ExchangeOptions, Options, names_typos
from regtopk.distributed.state.parameters import Parameters, after_backward, uncompiled
from regtopk.distributed.steps.attached import watch_optimizer
from regtopk.distributed.steps.base import ExchangeBase
from regtopk.distributed.steps.step import Kind, Steps
from regtopk.distributed.transport.collectives import Collectives
from regtopk.errors import ArgumentError, ClusterError


class SparseHookState(ExchangeBase):
    """The state of `sparse_hook`, for those who register hooks themselves.

    >>> state = SparseHookState(ddp_model, RegTopK(density=0.001))
    >>> ddp_model.register_comm_hook(state, sparse_hook)

    It takes the options of `attach`. The model's backward makes the steps.
    """

    @names_typos
    def __init__(
        self,
        model: nn.Module,
        algorithm: Algorithm[Any],
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        **options: Unpack[ExchangeOptions],
    ) -> None:
        ddp = uncompiled(model)
        if not isinstance(ddp, DistributedDataParallel):
            raise ClusterError(
                f"model must be a DistributedDataParallel, got {type(ddp).__name__}: wrap it first, or use "
                "regtopk.Exchange; or shard it by fully_shard (FSDP2)"
            )
        checked = Options(grad_scaler=grad_scaler, **options)
        if checked.process_group is not None:
            raise ArgumentError(
                "process_group must be None for a model in DistributedDataParallel, which has its own, got "
                f"{checked.process_group!r}"
            )
        parameters = Parameters(ddp.module, ignored=ddp.parameters_to_ignore)
        ranks = Collectives(ddp.process_group, checked.link)
        super().__init__(Steps(parameters, algorithm, ranks, checked, Kind("regtopk.attach")))
        self._warn_of_one_rank()
        watch_optimizer(self)
        self._may_drop = bool(ddp.find_unused_parameters)
        self._names = {id(p): name for name, p in parameters.named.items()}
        self._grads: dict[str, Tensor] = {}  # what has arrived in this backward
        self._arrived: list[tuple[Tensor, Future[Tensor]]] = []  # its buckets, and what DDP waits for
        # DDP's backward fails with an internal assertion on parameters that changed: look before
        self._forward_hook = ddp.register_forward_pre_hook(self._before_forward)

    def close(self) -> None:
        """End the exchange. A backward that follows is refused: to train on without it use `detach`."""
        super().close()
        self._forward_hook.remove()

    def detach(self) -> None:
        """Go back to dense: the model trains as plain DDP, bit for bit. What was not sent yet is dropped."""
        self.close()
        self._steps.drop()
        self._is_detached = True

    def _on_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Take a bucket from DDP; its future completes with the aggregate."""
        if self._is_detached:
            # as DDP does without a hook, to the bit: it multiplies by 1/N before the sum, and does not divide
            whole = bucket.buffer().mul_(1 / self.num_workers)
            work: Any = dist.all_reduce(whole, group=self._collectives.group, async_op=True)
            mean: Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
            return mean
        self._steps.check_usable()
        if bucket.index() == 0:
            self._steps.parameters.check_trainable()
            self._grads, self._arrived = {}, []
        buffer, names = bucket.buffer(), [self._names[id(p)] for p in bucket.parameters()]
        if buffer.layout != torch.strided:
            raise ClusterError(f"gradient of {names[0]!r} has a sparse layout, which is not supported")
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
        self._grads |= zip(names, bucket.gradients(), strict=True)  # views of the buffer
        self._arrived.append((buffer, future))
        if bucket.is_last():
            self._steps.run(self._grads)
            for whole, waited_for in self._arrived:
                waited_for.set_result(whole)
            after_backward(self._finish_backward)
        return future

    def _before_forward(self, model: DistributedDataParallel, _: object) -> None:
        if model._join_config.enable:
            raise ClusterError(
                "the model must not be used within torch's Join: a rank without inputs answers DDP's own "
                "collectives, not these; give all ranks as many batches"
            )
        if torch.is_grad_enabled():
            self._steps.parameters.check()

    def _finish_backward(self) -> None:
        """DDP drops what a hook returns for a parameter that no rank used: hand it over, if anything came."""
        parameters, aggregates = self._steps.parameters.named, self._grads if self._may_drop else {}
        self._grads, self._arrived = {}, []
        dropped = [name for name in aggregates if parameters[name].grad is None]
        for name in aggregates.keys() - dropped:  # zeroed but not set to None; what DDP wrote stays as it is
            parameters[name].grad.copy_(aggregates[name])  # type: ignore[union-attr]
        if dropped:
            have_come = torch.stack([aggregates[name].any() for name in dropped]).tolist()  # one wait for all
            for name in (name for name, came in zip(dropped, have_come, strict=True) if came):
                parameters[name].grad = aggregates[name].clone()


def sparse_hook(state: SparseHookState, bucket: GradBucket) -> Future[Tensor]:
    """The communication hook: see `attach`, or register it with a `SparseHookState` of your own."""
    return state._on_bucket(bucket)
