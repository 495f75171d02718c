"""An exchange in the Trainer of Lightning: ``pip install 'regtopk[lightning]'``."""

from contextlib import ExitStack
from typing import Any

from regtopk.core.algorithm import Algorithm
from regtopk.distributed.updates.exchange import UpdateExchange
from regtopk.errors import StateError, importing
from regtopk.integrations.wrapped import ExchangeInTrainer, What, silence

with importing("regtopk.integrations.lightning needs lightning: pip install 'regtopk[lightning]'"):
    from lightning import Callback


class LightningCallback(ExchangeInTrainer, Callback):
    """Exchange the updates of a module's optimizers, or its gradients.

    >>> sparse = LightningCallback(regtopk.TopK(density=0.01), every=2)
    >>> trainer = lightning.Trainer(strategy="ddp", devices=2, callbacks=[sparse])
    >>> trainer.fit(module, loader, ckpt_path="last")
    >>> print(sparse.exchange.summary())

    The exchange is made when training starts. Lightning writes one file, rank 0's. So all ranks' states are
    gathered there whenever it saves, and loaded from it on any number of ranks. docs/trainers.md has more.

    Args:
        algorithm: what is run; the same on every rank.
        exchange: "updates" (for AdamW, and where gradients are clipped), or "gradients".
        options: of `regtopk.UpdateExchange` or `regtopk.attach`; process groups and scaler are Lightning's.

    Raises:
        ArgumentError: an option breaks its rule; when training starts, parameters that are not in exactly one
            optimizer.
        ClusterError: when training starts, the strategy has not wrapped the model in DDP.
    """

    def __init__(self, algorithm: Algorithm[Any], *, exchange: What = "updates", **options: Any) -> None:
        super().__init__("LightningCallback", algorithm, exchange, options)
        self._saved: dict[str, Any] | None = None  # to go on from
        self._validation = ExitStack()

    @property
    def state_key(self) -> str:
        """What the state is under in Lightning's file: this class's first name."""
        return "RegTopKCallback"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the exchange, and load its state: the model is wrapped, and the optimizers are loaded."""
        if trainer.ckpt_path is not None and self._saved is None:
            raise StateError(f"checkpoint must be saved with LightningCallback, got {trainer.ckpt_path}")
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        exchange = self._make(trainer.strategy.model, trainer.optimizers, scaler)
        if self._saved is not None:
            exchange.load_state_dict(self._saved)
            self._saved = None
        self._apart = exchange if isinstance(exchange, UpdateExchange) else None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keep DDP silent: Lightning lets it average again after every step of a manual optimization."""
        if isinstance(self.exchange, UpdateExchange):
            silence(trainer.strategy.model)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Validate the model that all ranks share."""
        self._validation.enter_context(self._agreed())

    def on_validation_end(self, *_: Any) -> None:
        """Go on with this rank's own; Lightning calls those callbacks that save after this one."""
        self._validation.close()

    on_exception = on_validation_end  # where validation has failed: fit() may be called again

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give all ranks the same model."""
        self._finish()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Let the model in the file be the one that all ranks share."""
        if self._apart is not None:
            with self._agreed():
                state = trainer.strategy.lightning_module_state_dict()
                checkpoint["state_dict"] = {name: tensor.clone() for name, tensor in state.items()}

    def state_dict(self) -> dict[str, Any]:
        """All ranks' states, on rank 0, whose file it is; Lightning calls this on every rank."""
        gathered = None if self.exchange is None else self.exchange.gather_state_dict()
        return gathered or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it until there is an exchange to load it into."""
        self._saved = state_dict
