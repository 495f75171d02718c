"""An exchange with Accelerate: ``pip install 'regtopk[accelerate]'``, which this file does not import."""

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from regtopk.core.algorithm import Algorithm
from regtopk.distributed.steps.base import ExchangeBase
from regtopk.distributed.updates.inner import Inner
from regtopk.errors import ArgumentError
from regtopk.integrations import beside
from regtopk.integrations.beside import newest_checkpoint
from regtopk.integrations.wrapped import ExchangeInTrainer, Made, What

__all__ = ["attach", "newest_checkpoint"]


def attach(
    accelerator: Any,
    model: nn.Module,
    optimizer: Inner,
    algorithm: Algorithm[Any],
    *,
    exchange: What,
    **options: Any,
) -> Made:
    """Exchange the updates of a prepared optimizer, or the gradients of a prepared model. On every rank.

    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    >>> exchange = attach(accelerator, model, optimizer, TopK(density=0.01), exchange="updates", every=2)

    `accelerator.save_state(folder)` then saves every rank's state in `folder/regtopk`, and
    `accelerator.load_state(folder)` loads it. A script with several models attaches to each, in the same
    order when it goes on. An exchange that was closed is not saved.

    Args:
        accelerator: an accelerate.Accelerator.
        model: as prepare() returned it.
        optimizer: as prepare() returned it; or a list of several.
        algorithm: what is run; the same on every rank.
        exchange: "updates" (for AdamW, and where gradients are clipped), or "gradients", which is what
            `regtopk.attach` exchanges.
        options: of `regtopk.UpdateExchange` or `regtopk.attach`; process groups and scaler are Accelerate's.

    Returns:
        An `UpdateExchange`, or what `regtopk.attach` returns. On one process a stand-in for it.

    Raises:
        ArgumentError: an option breaks its rule, or an optimizer was not prepared.
        ClusterError: the model was not wrapped in DistributedDataParallel.
    """
    new = ExchangeInTrainer("attach", algorithm, exchange, options)
    given: list[Any] = [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in given:
        if not isinstance(getattr(each, "optimizer", None), Optimizer):
            raise ArgumentError(
                f"optimizer must be what accelerator.prepare() returned, got {type(each).__name__}"
            )
    made = new._make(model, [each.optimizer for each in given], accelerator.scaler)
    if accelerator not in _states:
        _states[accelerator] = _EveryRanks(accelerator)
    _states[accelerator].exchanges.append(made)
    return made


class _EveryRanks:
    """What Accelerate saves and loads last, on every rank; of what `state_dict` returns it writes rank 0's.

    So the states go beside it, into the folder that the hooks hear of: those of all exchanges of an
    accelerator that are not closed, in the order they were made.
    """

    def __init__(self, accelerator: Any) -> None:
        self.exchanges: list[ExchangeBase] = []
        self._folder = Path()
        accelerator.register_save_state_pre_hook(self.hear_save)
        accelerator.register_load_state_pre_hook(self.hear_load)
        accelerator.register_for_checkpointing(self)

    def hear_save(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        self._folder = Path(folder)
        beside.make_room(self._folder)

    def hear_load(self, models: list[nn.Module], folder: str) -> None:
        self._folder = Path(folder)

    def state_dict(self) -> dict[str, Any]:
        beside.save(self._folder, **self._named())
        return {"state": beside.NAME}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        beside.load(self._folder, **self._named())

    def _named(self) -> dict[str, ExchangeBase]:
        self.exchanges = [each for each in self.exchanges if not each.is_closed]
        return {f"exchange_{i}" if i else "exchange": each for i, each in enumerate(self.exchanges)}


_states: "WeakKeyDictionary[Any, _EveryRanks]" = WeakKeyDictionary()  # by accelerator
