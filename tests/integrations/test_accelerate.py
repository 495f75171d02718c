"""`attach` for Accelerate: one process, and wrong use."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import regtopk
from regtopk.errors import ArgumentError, ClusterError, StateError
from regtopk.integrations.accelerate import attach, newest_checkpoint
from tests.integrations.scripts import needs

pytestmark = [needs("accelerate", "accelerate"), pytest.mark.filterwarnings("default")]
TOPK = regtopk.TopK(density=0.1)


def prepared() -> tuple[Any, Any, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 2)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_one_process_saves_and_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert newest_checkpoint(tmp_path) is None
    accelerator, model, optimizer = prepared()
    options: dict[str, Any] = {"every": 2, "weight": "tokens"}
    exchange: Any = attach(accelerator, model, optimizer, TOPK, exchange="updates", **options)
    assert "there is one process: nothing is exchanged" in caplog.text
    exchange.count(8)
    for number in (8, 10):
        accelerator.save_state(str(tmp_path / f"checkpoint-{number}"))
    saved = model.weight.clone()
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    with exchange.agreed():
        assert not torch.equal(model.weight, saved)
    exchange.finish()
    newest = str(tmp_path / "checkpoint-10")
    assert newest_checkpoint(tmp_path) == newest
    accelerator.load_state(newest)
    assert torch.equal(model.weight, saved)
    (manifest,) = tmp_path.glob("checkpoint-10/regtopk/*/rank-0.json")
    manifest.unlink()  # as if the rank had been killed before
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-8")
    with pytest.raises(StateError) as refused:
        accelerator.load_state(newest)
    assert str(refused.value) == (
        f"checkpoint must hold the exchange's state of every rank, got {newest}, which has none in regtopk/: "
        "it was saved without the exchange, or a rank was killed before it had saved its part. Go on from an "
        "older checkpoint"
    )


@pytest.mark.parametrize("how", ["cut off", "other format"])
def test_states_that_cannot_be_used_stop_a_run_and_stay(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, model, optimizer = prepared()
    attach(accelerator, model, optimizer, TOPK, exchange="updates")
    for number in (8, 10):
        accelerator.save_state(str(tmp_path / f"checkpoint-{number}"))

    def damage(number: int) -> Path:
        (save,) = tmp_path.glob(f"checkpoint-{number}/regtopk/*")
        if how == "cut off":
            (save / "rank-0.pt").write_bytes(b"cut off")
        else:
            manifest = save / "rank-0.json"
            manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
        return save

    newest = damage(10)
    if how == "cut off":
        assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-8")
        assert "checkpoint-10/regtopk/" in caplog.text and "rank-0.pt is missing or cut off" in caplog.text
        damage(8)
    with pytest.raises(StateError, match=f"checkpoints in {tmp_path} cannot be used: checkpoint-10/regtopk/"):
        newest_checkpoint(tmp_path)
    with pytest.raises(StateError, match="cannot be used"):
        accelerator.load_state(str(tmp_path / "checkpoint-10"))
    accelerator.save_state(str(tmp_path / "checkpoint-10"))  # a run of one's own will, in the same folder
    (kept,) = tmp_path.glob(f"checkpoint-10/regtopk-unused-*/{newest.name}")
    assert (kept / "rank-0.json").exists() and not newest.exists()
    accelerator.load_state(str(tmp_path / "checkpoint-10"))


def test_several_models_are_saved_and_closed_exchanges_are_not(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared()
    attach(accelerator, model, optimizer, TOPK, exchange="updates").close()
    accelerator.save_state(str(tmp_path / "none"))  # there is nothing to save
    accelerator.load_state(str(tmp_path / "none"))
    exchanges = [attach(accelerator, model, optimizer, TOPK, exchange="updates") for _ in range(2)]
    accelerator.save_state(str(tmp_path / "two"))
    (part,) = tmp_path.glob("two/regtopk/*/rank-0.pt")
    assert sorted(torch.load(part, weights_only=True)) == ["exchange", "exchange_1"]
    accelerator.load_state(str(tmp_path / "two"))
    exchanges[0].close()
    accelerator.save_state(str(tmp_path / "one"))
    accelerator.load_state(str(tmp_path / "one"))
    attach(accelerator, model, optimizer, TOPK, exchange="updates")
    with pytest.raises(StateError, match=r"the checkpoint must hold \['exchange_1'\], got \['exchange'\]"):
        accelerator.load_state(str(tmp_path / "one"))


def test_ranks_without_a_process_group_choose_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")  # each would choose by what it sees itself
    with pytest.raises(ClusterError, match="must be initialised first"):
        newest_checkpoint(tmp_path)


def test_wrong_use_is_refused() -> None:
    accelerator, model, optimizer = prepared()
    with pytest.raises(ArgumentError, match=r"^optimizer must be what .*prepare\(\) returned, got SGD$"):
        attach(accelerator, model, optimizer.optimizer, TOPK, exchange="updates")
    with pytest.raises(ArgumentError, match=r"delay must .*, got 'gradients'"):
        attach(accelerator, model, optimizer, TOPK, exchange="gradients", delay=1)
