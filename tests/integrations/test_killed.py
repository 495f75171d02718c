"""The guide's scripts for other frameworks: a rank is killed, and the run goes on with the same bits.

`make test-integrations` alone runs these: each starts a script three times.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import Ranks
from tests.integrations.scripts import DIE, TELL, bits_of, needs, replaced, run, run_and_kill, script_of
from tests.processes import ended

pytestmark = pytest.mark.filterwarnings("default")  # what these libraries warn of is theirs
KILLER = f"""{DIE}
from transformers import TrainerCallback

class Killer(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 8:
            _die(args.process_index)

trainer.add_callback(Killer())
trainer.train("""


def check(ranks: Ranks, source: str, deadly: str, folder: Path) -> None:
    """The killed run ends with the bits of an undisturbed one, on both ranks."""
    undisturbed = run(ranks, source, folder / "undisturbed")
    resumed = run_and_kill(ranks, source, deadly, folder / "killed")
    assert len(set(bits_of(undisturbed))) == 1 and bits_of(resumed) == bits_of(undisturbed)
    assert "on 2 workers; this rank:" in resumed[0] and "workers" not in resumed[1]


@needs("transformers", "huggingface")
@pytest.mark.parametrize(
    "options", ["every=2", "every=3, fragments=2", "every=4, delay=2", "exchange='gradients'"]
)
def test_huggingface(new_ranks: Ranks, tmp_path: Path, options: str) -> None:
    source = replaced(script_of("huggingface"), "every=2", options) + TELL.format(model="model")
    check(new_ranks, source, replaced(source, "trainer.train(", KILLER), tmp_path)
    for folder in ("undisturbed", "killed"):
        saved = {path.name for path in (tmp_path / folder / "out" / "gpt2").iterdir()}
        assert saved == {"checkpoint-10", "checkpoint-12"}


@needs("accelerate", "accelerate")
@pytest.mark.parametrize("options", ["exchange='updates', every=4, fragments=2", "exchange='gradients'"])
def test_accelerate(new_ranks: Ranks, tmp_path: Path, options: str) -> None:
    source = replaced(script_of("accelerate").replace('exchange="updates", ', ""), "every=2", options)
    if "gradients" in options:
        source = replaced(source, "exchange.finish()\n", "")
    source += TELL.format(model="accelerator.unwrap_model(model)")
    save = "    if number % 18 == 0:"
    deadly = replaced(source, save, f"    if number == 25: _die(accelerator.process_index)\n{save}")
    check(new_ranks, source, DIE + deadly, tmp_path)


@needs("lightning", "lightning")
@pytest.mark.parametrize("options", ["every=4, fragments=2", "exchange='gradients'"])
def test_lightning(new_ranks: Ranks, tmp_path: Path, options: str) -> None:
    source = replaced(script_of("lightning"), "every=2", options) + TELL.format(model="module")
    step = "        inputs, targets = batch\n"
    dies = f"        if self.global_step == 40: _die(self.global_rank)\n{step}"
    check(new_ranks, source, DIE + replaced(source, step, dies), tmp_path)


@needs("ray", "ray")
def test_ray(tmp_path: Path) -> None:
    source = script_of("ray")
    step = "            optimizer.zero_grad()\n"
    is_due = "first == 0 and step == 12 and ray.train.get_context().get_world_rank() == 1"
    dies = (
        f"            if {is_due}: open(config['folder'] + '-killed', 'w'); os.kill(os.getpid(), 9)\n{step}"
    )
    undisturbed = run_with_ray(source, tmp_path / "undisturbed")
    resumed = run_with_ray(replaced(source, step, dies), tmp_path / "killed")
    assert (tmp_path / "killed/out/ray/states-killed").exists()
    assert undisturbed.keys() == resumed.keys()
    assert all(torch.equal(undisturbed[name], resumed[name]) for name in undisturbed)


def run_with_ray(source: str, folder: Path) -> dict[str, torch.Tensor]:
    """The model that it ends with."""
    folder.mkdir()
    (folder / "train.py").write_text(source, encoding="utf-8")
    settings = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    with (folder / "told").open("w") as told:
        words = [sys.executable, "train.py"]
        process = subprocess.Popen(words, cwd=folder, env=settings, stdout=told, stderr=told, text=True)
    with ended(process):
        process.wait(timeout=400)
    said = (folder / "told").read_text(encoding="utf-8")
    assert process.returncode == 0 and "rounds of 2 steps on 2 workers" in said, said
    state: dict[str, torch.Tensor] = torch.load(folder / "out/ray/states/model.pt", weights_only=True)
    return state
