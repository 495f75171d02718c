"""An exchange for a model that a framework has wrapped in DistributedDataParallel, with its optimizers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from regtopk.core.algorithm import Algorithm, check_is_algorithm
from regtopk.core.options import check_choice
from regtopk.distributed.gradients.attach import OneProcess, attach
from regtopk.distributed.gradients.ddp import SparseHookState
from regtopk.distributed.gradients.fsdp import ShardedHookState
from regtopk.distributed.options import known_options, refuse_typos
from regtopk.distributed.state.parameters import fsdp_version, uncompiled
from regtopk.distributed.transport.collectives import is_one_process
from regtopk.distributed.updates.exchange import UpdateExchange, checked
from regtopk.errors import ArgumentError, ClusterError, log

What = Literal["gradients", "updates"]
Made = UpdateExchange | SparseHookState | ShardedHookState | OneProcess
# what the framework knows, and so the user need not hand over
_FROM_THE_FRAMEWORK = {"model", "parameters", "optimizer", "algorithm", "grad_scaler", "process_group"}
_OPTIONS = {
    what: [name for name in known_options(function) if name not in _FROM_THE_FRAMEWORK]
    for what, function in (("gradients", attach), ("updates", UpdateExchange))
}


def silence(model: nn.Module) -> None:
    """Let DDP send nothing, if the model is in it; again wherever a framework has wrapped or changed it.

    A hook that does nothing would not do: with find_unused_parameters all ranks meet in every backward.
    """
    inner: Any = uncompiled(model)
    if isinstance(inner, DistributedDataParallel):
        inner.require_backward_grad_sync = False  # as in no_sync()
        inner.broadcast_buffers = False  # the exchange has its own way with them
        inner.static_graph = False  # else the first backward looks for what to average in all others


class ExchangeInTrainer:
    """An exchange of a wrapped model's gradients, or of its optimizers' updates, from when training begins.

    Updates need a model whose gradients nobody averages. The framework has wrapped it in DDP all the same, so
    DDP stays as in `no_sync()`, for good: backward leaves each rank its own gradients, and nothing is sent.
    The ranks' models then differ until training ends.
    """

    def __init__(self, call: str, algorithm: Algorithm[Any], exchange: What, options: dict[str, Any]) -> None:
        check_choice("exchange", exchange, ("gradients", "updates"))
        check_is_algorithm(algorithm)
        (other,) = _OPTIONS.keys() - {exchange}
        for option in options:
            if option not in _OPTIONS[exchange] and option in _OPTIONS[other]:
                raise ArgumentError(f"{option} must be given with exchange={other!r} alone, got {exchange!r}")
        refuse_typos(call, options, _OPTIONS[exchange])
        _, self._shared, _ = checked(options)  # refused with one process, too
        self.exchange: Made | None = None  # from the beginning of training on
        self._algorithm, self._what, self._options = algorithm, exchange, options
        self._apart: UpdateExchange | None = None  # the exchange, while the ranks' models may differ

    def _make(self, model: nn.Module, optimizers: Sequence[Optimizer], grad_scaler: Any) -> Made:
        """Make the exchange, with torch's own optimizers, in the place of the one before, if there is one."""
        if self.exchange is not None:
            log.warning("training begins anew: what the exchange before had not sent yet is dropped")
            self.exchange.close()
        inner: Any = uncompiled(model)
        is_wrapped = isinstance(inner, DistributedDataParallel)
        if not is_wrapped and (fsdp_version(inner) > 0 or not is_one_process()):
            raise ClusterError(
                "model must be wrapped in DistributedDataParallel by the trainer, got "
                f"{type(inner).__name__}: DeepSpeed, FSDP and tensor parallelism are not supported here (for "
                "sharded models use regtopk.UpdateExchange in a loop of your own)"
            )
        if self._what == "gradients":
            optimizer = optimizers[0] if len(optimizers) == 1 else None
            self.exchange = attach(
                model, self._algorithm, optimizer=optimizer, grad_scaler=grad_scaler, **self._options
            )
        elif not is_wrapped:
            self.exchange = OneProcess(inner, self._algorithm, self._shared)
        elif grad_scaler is not None:
            raise ArgumentError(
                "exchange must be 'gradients' with a GradScaler, got 'updates': a step that overflows is "
                "skipped on one rank alone, and ranks would count steps differently. Train in bfloat16"
            )
        else:
            self.exchange = UpdateExchange(
                inner.module, optimizers, self._algorithm, process_group=inner.process_group, **self._options
            )
            if len(set(everys := self.exchange.everys)) > 1:
                self.exchange.close()
                self.exchange = None
                raise ClusterError(f"every must be the same on all ranks in a trainer, got {everys} by rank")
            self.exchange._model.notices.mute()  # what the framework reads to save it is replaced
            silence(model)
        return self.exchange

    @contextmanager
    def _agreed(self) -> Iterator[None]:
        """Let the model be theta_start meanwhile, the same on all ranks."""
        exchange, self._apart = self._apart, None  # an evaluation of several data sets calls itself
        try:
            with nullcontext() if exchange is None else exchange.agreed():
                yield
        finally:
            self._apart = exchange

    def _finish(self) -> None:
        if self._apart is not None:
            self._apart.finish()
            self._apart = None
