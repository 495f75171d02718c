"""The callback of Lightning's Trainer: one process, and wrong use."""

from pathlib import Path
from typing import Any

import pytest
import torch

import regtopk
from regtopk.errors import StateError
from tests.integrations.scripts import needs

pytestmark = [needs("lightning", "lightning"), pytest.mark.filterwarnings("default")]
TOPK = regtopk.TopK(density=0.1)


def trainer_of(folder: Path, *callbacks: Any, **options: Any) -> tuple[Any, Any, Any]:
    """A Trainer of one process, a module, and its loader."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = torch.nn.Linear(3, 2)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.network(batch).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    rows: Any = torch.randn(8, 3)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, callbacks=list(callbacks), default_root_dir=folder, **quiet, **options
    )
    return trainer, Module(), torch.utils.data.DataLoader(rows, batch_size=2)


def callback(*args: Any, **options: Any) -> Any:
    from regtopk.integrations.lightning import LightningCallback

    return LightningCallback(*args, **options)


@pytest.mark.parametrize("exchange", ["updates", "gradients"])
def test_one_process_trains_saves_and_goes_on(
    exchange: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = callback(TOPK, exchange=exchange)
    trainer, module, loader = trainer_of(tmp_path, mine, max_epochs=1)
    trainer.fit(module, loader)
    assert "there is one process: nothing is exchanged" in caplog.text
    assert mine.exchange.summary() == "topk: one process, nothing was exchanged"
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    first = mine.exchange
    trainer, module, loader = trainer_of(tmp_path, mine, max_epochs=2)
    trainer.fit(module, loader, ckpt_path=tmp_path / "saved.ckpt")
    assert trainer.global_step == 8 and mine.exchange is not first
    assert "training begins anew: what the exchange before had not sent yet is dropped" in caplog.text


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback"):  # by Lightning itself
        trainer_of(tmp_path, callback(TOPK), callback(TOPK))
    trainer, module, loader = trainer_of(tmp_path, max_epochs=1)
    trainer.fit(module, loader)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    trainer, module, loader = trainer_of(tmp_path, callback(TOPK), max_epochs=2)
    with pytest.raises(StateError, match="checkpoint must be saved with LightningCallback, got "):
        trainer.fit(module, loader, ckpt_path=tmp_path / "saved.ckpt")
