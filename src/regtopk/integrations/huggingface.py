"""An exchange in the Trainer of Hugging Face: ``pip install 'regtopk[huggingface]'``."""

from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from typing import Any

from regtopk.distributed.updates.exchange import UpdateExchange
from regtopk.errors import ArgumentError, importing, log
from regtopk.integrations import beside
from regtopk.integrations.beside import newest_checkpoint
from regtopk.integrations.wrapped import ExchangeInTrainer, Made, What, silence

with importing("regtopk.integrations.huggingface needs transformers: pip install 'regtopk[huggingface]'"):
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint

__all__ = ["HuggingFaceCallback", "newest_checkpoint"]


class HuggingFaceCallback(ExchangeInTrainer, TrainerCallback):
    """Exchange the updates of a Trainer's optimizer, or its gradients. Make it on every rank.

    >>> trainer = Trainer(model=model, args=args, train_dataset=texts)
    >>> callback = HuggingFaceCallback(trainer, regtopk.TopK(density=0.01), every=2)
    >>> trainer.add_callback(callback)
    >>> trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))
    >>> print(callback.exchange.summary())

    The exchange is made when training begins. Every rank's state is saved in the folder of each checkpoint,
    under `regtopk`. The callback puts itself around the trainer's methods train, evaluate, predict and
    save_model. docs/trainers.md has more on this, and on Trainers of several optimizers.

    Args:
        trainer: a Trainer, or one of its kind.
        algorithm: what is run; the same on every rank.
        exchange: "updates" (for AdamW, and where gradients are clipped: the Trainer's own defaults), or
            "gradients".
        options: of `regtopk.UpdateExchange` or `regtopk.attach`; process groups and scaler are the Trainer's.

    Raises:
        ArgumentError: an option breaks its rule; when training begins, the trainer has another such callback.
        ClusterError: when training begins, the trainer uses DeepSpeed, FSDP or Megatron.
    """

    def __init__(self, trainer: Any, algorithm: Any, *, exchange: What = "updates", **options: Any) -> None:
        if not isinstance(trainer, Trainer):
            raise ArgumentError(
                f"trainer must be a transformers.Trainer, got {type(trainer).__name__}: make the Trainer "
                "first, then trainer.add_callback(HuggingFaceCallback(trainer, ...))"
            )
        super().__init__("HuggingFaceCallback", algorithm, exchange, options)
        self._trainer = trainer
        self._made_for: object = None  # what the exchange belongs to
        self._resumes_from: str | bool | None = None
        self._folder: Path | None = None  # of the checkpoint that is being saved
        agreed = self._with_the_agreed_model
        around = {"train": self._train, "save_model": self._save_model, "evaluate": agreed, "predict": agreed}
        for name, mine in around.items():
            method = getattr(trainer, name)
            setattr(trainer, name, wraps(method)(partial(mine, method)))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Make the exchange, and load its state."""
        if args is not self._trainer.args:
            raise ArgumentError("HuggingFaceCallback must be added to the trainer that it was made with")
        self._advise(args)
        exchange, folder = self._made(), self._resumes_from
        if folder is True:
            folder = get_last_checkpoint(args.output_dir)
        if folder:
            beside.load(Path(str(folder)), exchange=exchange)
        self._apart = exchange if isinstance(exchange, UpdateExchange) else None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the last step, give all ranks the same model: what is evaluated and saved then is the end."""
        if control.should_training_stop:
            self._finish()

    on_epoch_end = on_step_end  # where training was stopped by an evaluation

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save every rank's state, when all else is in the checkpoint."""
        if not args.save_only_model:
            assert self.exchange is not None and self._folder is not None
            beside.save(self._folder, exchange=self.exchange)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The same where the data ended early. The best model, if it was loaded, stays as it is."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._apart = None
        self._finish()

    def _train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Listen to what training resumes from."""
        found = self._trainer.callback_handler.callbacks
        found = [each for each in found if isinstance(each, HuggingFaceCallback)]
        if found != [self]:
            raise ArgumentError(
                "trainer must have one HuggingFaceCallback, the one that was made with it, got "
                f"{len(found)}: trainer.add_callback(callback)"
            )
        given = signature(train).bind(*args, **kwargs).arguments
        self._resumes_from = given.get("resume_from_checkpoint")
        return train(*args, **kwargs)

    def _save_model(self, save_model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Listen to where a checkpoint is saved, and let the model in it be the one that all ranks share."""
        given = signature(save_model).bind(*args, **kwargs).arguments
        if given.get("_internal_call"):  # part of a checkpoint, on all ranks
            self._folder = Path(given["output_dir"])
            beside.make_room(self._folder)
        return self._with_the_agreed_model(save_model, *args, **kwargs)

    def _with_the_agreed_model(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._agreed():
            return method(*args, **kwargs)

    def _made(self) -> Made:
        """The exchange; the one before if train() is called again with the same model and optimizer."""
        trainer = self._trainer
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # inside Accelerate's wrapper
        belongs_to = trainer.model_wrapped if self._what == "gradients" else optimizer
        if self.exchange is not None and self._made_for is belongs_to:
            if isinstance(self.exchange, UpdateExchange):
                silence(trainer.model_wrapped)  # with auto_find_batch_size it is wrapped anew
            return self.exchange
        self._made_for = belongs_to
        inner = getattr(optimizer, "optimizers", [optimizer])
        return self._make(trainer.model_wrapped, inner, getattr(trainer.accelerator, "scaler", None))

    def _advise(self, args: Any) -> None:
        """Say which of the Trainer's defaults work against the exchange."""
        if args.process_index != 0:
            return
        if self._what == "gradients" and args.max_grad_norm:
            log.warning(
                "max_grad_norm=%s clips sparse aggregates, which are larger than gradients: choose it anew",
                args.max_grad_norm,
            )
        if self._what == "updates" and args.average_tokens_across_devices and args.world_size > 1:
            log.warning("average_tokens_across_devices=True makes all ranks meet in every step: use False")
        if args.save_total_limit == 1:
            log.warning("save_total_limit=1 removes a checkpoint before the next one is complete: keep 2")
