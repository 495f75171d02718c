"""The callback of the Hugging Face Trainer: what is evaluated and saved, other ranks, and wrong use."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import regtopk
from regtopk.errors import ArgumentError, StateError
from tests.distributed.ranks import Ranks
from tests.integrations.scripts import TELL, bits_of, needs, replaced, run, script_of

pytestmark = [needs("transformers", "huggingface"), pytest.mark.filterwarnings("default")]
SCRIPT = script_of("huggingface")
TOLD = SCRIPT + TELL.format(model="model")
IN_ROUNDS = replaced(SCRIPT, "every=2)", "every=3, fragments=2)")

LOOK_AND_TRAIN = """
import hashlib, logging, sys
logging.getLogger("regtopk").addHandler(logging.StreamHandler(sys.stdout))
seen = {True: [], False: []}

def look(module, *_):
    bits = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
    seen[module.training].append(hashlib.sha256(bits).hexdigest())

model.register_forward_pre_hook(look)
trainer.train("""
TELL_SEEN = """
print("trained", *seen[True])
print("evaluated", *seen[False])
assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric
from safetensors.torch import load_file
best = load_file(trainer.state.best_model_checkpoint + "/model.safetensors")
assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in best.items())
exchange = callback.exchange
trainer.train()
assert callback.exchange is exchange and exchange.num_steps == 24
assert not trainer.model_wrapped.require_backward_grad_sync  # wrapped anew, it averages nothing
"""


def words_after(printed: str, first: str) -> list[str]:
    (line,) = [line for line in printed.splitlines() if line.startswith(f"{first} ")]
    return line.split()[1:]


def test_ranks_evaluate_the_same_model_and_end_with_the_best(new_ranks: Ranks, tmp_path: Path) -> None:
    source = replaced(
        IN_ROUNDS, "save_steps=5,", "save_steps=4, load_best_model_at_end=True, auto_find_batch_size=True,"
    )
    source = replaced(source, "devices=False", "devices=True")
    source = replaced(source, "trainer.train(", LOOK_AND_TRAIN) + TELL_SEEN
    here, elsewhere = run(new_ranks, source, tmp_path)
    assert words_after(here, "evaluated") == words_after(elsewhere, "evaluated")
    assert len(set(words_after(here, "evaluated"))) == 3
    advice = "average_tokens_across_devices=True makes all ranks meet in every step"
    assert advice in here and advice not in elsewhere
    trained, trained_elsewhere = words_after(here, "trained"), words_after(elsewhere, "trained")
    assert trained[0] == trained_elsewhere[0] and trained != trained_elsewhere  # each rank its own, in rounds
    (part,) = tmp_path.glob("out/gpt2/checkpoint-8/regtopk/*/rank-1.pt")
    start = torch.load(part, weights_only=True)["exchange"]["updates"]["start"]
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "out" / "gpt2" / "checkpoint-8" / "model.safetensors")
    assert saved and all(torch.equal(start[name], tensor) for name, tensor in saved.items() if name in start)


def test_on_another_number_of_ranks(new_ranks: Ranks, tmp_path: Path) -> None:
    gradients = replaced(SCRIPT, "every=2)", "exchange='gradients')")
    run(new_ranks, gradients, tmp_path)
    longer = replaced(gradients, "max_steps=12", "max_steps=14")
    (printed,) = run(Ranks(1), longer, tmp_path)
    # of 2 batches each: on one process Accelerate lets DDP synchronise after every batch
    assert "topk: 4 steps on 1 worker since step 12, when the ranks changed; this rank:" in printed


def test_an_unfinished_checkpoint_is_skipped(new_ranks: Ranks, tmp_path: Path) -> None:
    def unfinish() -> None:
        """As if rank 1 had been killed before it was done."""
        (part,) = tmp_path.glob("out/gpt2/checkpoint-12/regtopk/*/rank-1.json")
        part.unlink()

    undisturbed = run(new_ranks, TOLD, tmp_path)
    unfinish()
    assert bits_of(run(new_ranks, TOLD, tmp_path)) == bits_of(undisturbed)
    unfinish()
    insists = replaced(TOLD, 'newest_checkpoint("out/gpt2")', "'out/gpt2/checkpoint-12'")
    with pytest.raises(AssertionError, match="checkpoint must hold the exchange's state of every rank, got"):
        run(new_ranks, insists, tmp_path)


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """A Trainer of one process."""
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"loss": super().forward(x).square().mean()}

    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True
    )
    rows = [{"x": row} for row in torch.randn(8, 3)]
    return Trainer(model=Model(3, 2), args=arguments, train_dataset=rows)


def callback(*args: Any, **options: Any) -> Any:
    from regtopk.integrations.huggingface import HuggingFaceCallback

    return HuggingFaceCallback(*args, **options)


TOPK = regtopk.TopK(density=0.1)


def test_wrong_use_is_refused(trainer: Any) -> None:
    make_first = "make the Trainer first, then trainer.add_callback(HuggingFaceCallback(trainer, ...))"
    with pytest.raises(ArgumentError) as refused:
        callback(TOPK, trainer)
    assert str(refused.value) == f"trainer must be a transformers.Trainer, got TopK: {make_first}"
    mine = callback(trainer, TOPK)
    with pytest.raises(ArgumentError) as refused:
        trainer.train()
    one = "trainer must have one HuggingFaceCallback, the one that was made with it"
    assert str(refused.value) == f"{one}, got 0: trainer.add_callback(callback)"
    other = type(trainer)(model=trainer.model, args=deepcopy(trainer.args), callbacks=[mine])
    other.train_dataset = trainer.train_dataset
    with pytest.raises(ArgumentError, match="must be added to the trainer that it was made with"):
        other.train()
    for _ in range(2):
        trainer.add_callback(mine)
    with pytest.raises(ArgumentError, match=r"trainer must have one HuggingFaceCallback, .*, got 2"):
        trainer.train()


@pytest.mark.parametrize("exchange", ["updates", "gradients"])
def test_one_process_trains_and_goes_on(
    trainer: Any, caplog: pytest.LogCaptureFixture, exchange: Any, tmp_path: Path
) -> None:
    trainer.add_callback(callback(trainer, TOPK, exchange=exchange))
    trainer.train()
    assert "there is one process: nothing is exchanged" in caplog.text
    assert ("max_grad_norm=1.0 clips sparse aggregates" in caplog.text) == (exchange == "gradients")
    ended = trainer.model.weight.clone()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(trainer.model.weight, ended)
    assert "save_total_limit" not in caplog.text
    trainer.args.save_total_limit = 1
    trainer.train()
    assert "save_total_limit=1 removes a checkpoint before the next one is complete" in caplog.text


def test_a_checkpoint_without_an_exchange_is_refused(trainer: Any, tmp_path: Path) -> None:
    trainer.train()
    trainer.add_callback(callback(trainer, TOPK))
    with pytest.raises(StateError, match=r"must hold the exchange's state of every rank, got .*-4"):
        trainer.train(True)
    assert not (tmp_path / "checkpoint-4" / "regtopk").exists()
