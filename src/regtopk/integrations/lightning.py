"""An exchange in the Trainer of Lightning: ``pip install 'regtopk[lightning]'``."""

import logging
from contextlib import ExitStack
from typing import Any

from regtopk.core.algorithm import Algorithm
from regtopk.distributed.updates.exchange import UpdateExchange
from regtopk.errors import ArgumentError, MissingExtraError, StateError
from regtopk.integrations.wrapped import Made, What, check_options, make_exchange, silence

try:
    from lightning import Callback
except ImportError as error:
    raise MissingExtraError(
        "regtopk.integrations.lightning needs lightning: pip install 'regtopk[lightning]'"
    ) from error

_log = logging.getLogger("regtopk")


class RegTopKCallback(Callback):
    """Exchange the updates of a module's optimizer, or its gradients.

    >>> sparse = RegTopKCallback(regtopk.TopK(density=0.01), every=2)
    >>> trainer = lightning.Trainer(strategy="ddp", devices=2, callbacks=[sparse])
    >>> trainer.fit(module, loader, ckpt_path="last")
    >>> print(sparse.exchange.summary())

    Lightning's own `DDPStrategy(ddp_comm_hook=...)` needs the hook's state before the model is wrapped, and
    on a CPU it never registers the hook. This callback makes the exchange when training starts, on any
    device.

    Lightning writes one file, rank 0's. So all ranks' states are gathered there whenever it saves, and loaded
    from it on any number of ranks. With updates, the model in that file and the model that is validated are
    theta_start, the same on all ranks (`UpdateExchange.agreed`), and training ends with `finish()`.

    Args:
        algorithm: what is run; the same on every rank.
        exchange: "updates" (for AdamW, and where gradients are clipped), or "gradients".
        options: of `regtopk.UpdateExchange` or `regtopk.attach`; process groups and scaler are Lightning's.

    Raises:
        ArgumentError: an option breaks its rule; when training starts, updates of several optimizers.
        ClusterError: when training starts, the strategy has not wrapped the model in DDP.
    """

    def __init__(self, algorithm: Algorithm[Any], *, exchange: What = "updates", **options: Any) -> None:
        check_options("RegTopKCallback", algorithm, exchange, options)
        self.exchange: Made | None = None  # from the start of training on
        self._algorithm = algorithm
        self._what: What = exchange
        self._options = options
        self._saved: dict[str, Any] | None = None  # to go on from
        self._may_differ = False  # whether the ranks' models may
        self._agreed = ExitStack()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the exchange, and load its state: the model is wrapped, and the optimizers are loaded."""
        if len(trainer.optimizers) != 1 and self._what == "updates":
            raise ArgumentError(
                "exchange must be 'gradients' unless there is one optimizer, got 'updates' and "
                f"{len(trainer.optimizers)} optimizers"
            )
        if trainer.ckpt_path is not None and self._saved is None:
            raise StateError(
                f"checkpoint must hold the exchange's state, got {trainer.ckpt_path}, which was saved "
                "without RegTopKCallback"
            )
        if self.exchange is not None:
            _log.warning("fit() was called again: what the exchange before had not sent yet is dropped")
            self.exchange.close()
        model, scaler = trainer.strategy.model, getattr(trainer.precision_plugin, "scaler", None)
        optimizer: Any = trainer.optimizers[0] if trainer.optimizers else None
        self.exchange = make_exchange(model, optimizer, self._algorithm, self._what, self._options, scaler)
        if self._saved is not None:
            self.exchange.load_state_dict(self._saved)
            self._saved = None
        self._may_differ = isinstance(self.exchange, UpdateExchange)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keep DDP silent: Lightning lets it average again after every step of a manual optimization."""
        if isinstance(self.exchange, UpdateExchange):
            silence(trainer.strategy.model)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Validate the model that all ranks share."""
        if self._may_differ:
            assert isinstance(self.exchange, UpdateExchange)
            self._agreed.enter_context(self.exchange.agreed())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Go on with this rank's own; Lightning calls those callbacks that save after this one."""
        self._agreed.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same where validation has failed: fit() may be called again."""
        self._agreed.close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give all ranks the same model."""
        if self._may_differ:
            assert isinstance(self.exchange, UpdateExchange)
            self.exchange.finish()
            self._may_differ = False

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Let the model in the file be the one that all ranks share."""
        if self._may_differ:
            assert isinstance(self.exchange, UpdateExchange)
            with self.exchange.agreed():
                state = trainer.strategy.lightning_module_state_dict()
                checkpoint["state_dict"] = {name: tensor.clone() for name, tensor in state.items()}

    def state_dict(self) -> dict[str, Any]:
        """All ranks' states, on rank 0, whose file it is; Lightning calls this on every rank."""
        gathered = None if self.exchange is None else self.exchange.gather_state_dict()
        return gathered or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it until there is an exchange to load it into."""
        self._saved = state_dict
