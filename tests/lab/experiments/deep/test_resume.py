"""What a resumed run goes on from, and what not: other settings, other weights, a damaged file."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regtopk.errors import ArgumentError, OutputError
from regtopk.lab.experiments.networks import NETWORKS
from regtopk.lab.experiments.paper.fig3 import FIG3
from regtopk.lab.experiments.paper.fig3_config import PRESETS, DeepConfig
from regtopk.lab.experiments.training.trainer import Trainer
from regtopk.lab.runs import read_records

QUICK = DeepConfig(
    **{
        **PRESETS["smoke"],
        "preset": "smoke",
        "num_rounds": 4,
        "evaluate_every": 1,
        "methods": "topk",
        "seeds": "1",
    }
)


def interrupt(config: DeepConfig, folder: Path) -> Path:
    """Stop a run in the middle; returns its checkpoint."""

    def progress(fraction: float, words: str = "") -> None:
        if fraction == 0.75:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FIG3.record(config, folder, command="", progress=progress)
    (checkpoint,) = folder.glob("checkpoint-*.pt")
    return checkpoint


def losses_of(folder: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["test_loss"]) for r in read_records(folder)]


def test_a_slice_of_another_method_leaves_a_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(QUICK, tmp_path)
    FIG3.record(replace(QUICK, methods="dense"), tmp_path, command="", resume=True)
    rounds, plain = [], Trainer._step

    def counted(self: Trainer) -> None:
        rounds.append(self.num_steps)
        plain(self)

    monkeypatch.setattr(Trainer, "_step", counted)
    FIG3.record(QUICK, tmp_path, command="", resume=True)
    assert rounds == [2, 3]  # after the checkpoint of round 2
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize("has_records", [False, True])
def test_a_checkpoint_of_other_settings_is_not_gone_on_from(tmp_path: Path, has_records: bool) -> None:
    checkpoint = interrupt(QUICK, tmp_path / "old")
    other = replace(QUICK, lr=0.01)
    if has_records:  # a run of the other settings, interrupted as well
        interrupt(other, tmp_path / "new")
    (tmp_path / "new").mkdir(exist_ok=True)
    shutil.copy(checkpoint, tmp_path / "new")
    FIG3.record(other, tmp_path / "new", command="", resume=True)
    FIG3.record(other, tmp_path / "clean", command="")
    assert dict(losses_of(tmp_path / "new")) == dict(losses_of(tmp_path / "clean"))
    assert not list((tmp_path / "new").glob("checkpoint-*"))


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    checkpoint = interrupt(QUICK, tmp_path)
    checkpoint.write_bytes(checkpoint.read_bytes()[:500])
    with pytest.raises(OutputError, match=rf"checkpoint must be whole, but {checkpoint} cannot be read: "):
        FIG3.record(QUICK, tmp_path, command="", resume=True)
    checkpoint.unlink()
    FIG3.record(QUICK, tmp_path, command="", resume=True)
    assert {step for step, _ in losses_of(tmp_path)} == {1, 2, 3, 4}


def test_other_weights_under_the_same_name_are_refused(tmp_path: Path) -> None:
    def save_weights(seed: int) -> str:
        torch.manual_seed(seed)
        torch.save(NETWORKS["small-cnn"](10).state_dict(), tmp_path / "weights.pt")
        return str(tmp_path / "weights.pt")

    FIG3.record(replace(QUICK, weights=save_weights(0)), tmp_path / "run", command="")
    other = replace(QUICK, methods="dense", weights=save_weights(1))
    with pytest.raises(OutputError, match=r"weights_sha256 must be '.*' as in the run that .* holds, got"):
        FIG3.record(other, tmp_path / "run", command="", resume=True)


def test_a_method_of_the_folder_in_other_words_is_refused(tmp_path: Path) -> None:
    FIG3.record(QUICK, tmp_path, command="")
    with pytest.raises(ArgumentError, match="methods must be different and at least one, got 'topk,topk:lr="):
        FIG3.record(replace(QUICK, methods="topk:lr=0.2"), tmp_path, command="", resume=True)


def test_a_folder_that_holds_a_run_is_refused_before_the_data_are_read(
    tmp_path: Path,
) -> None:
    FIG3.record(QUICK, tmp_path, command="")
    with pytest.raises(OutputError, match="must not hold a run"):
        replace(FIG3, load=lambda config: pytest.fail("read the data")).record(QUICK, tmp_path, command="")
