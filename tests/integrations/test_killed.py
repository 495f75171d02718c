"""The guide's scripts for other frameworks: a rank is killed, and the run goes on with the same bits.

`make test-integrations` alone runs these: each starts a script once to three times.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import Ranks
from tests.integrations.scripts import DIE, TELL, bits_of, needs, replaced, run, run_and_kill, script_of
from tests.processes import ended

pytestmark = pytest.mark.filterwarnings("default")  # what these libraries warn of is theirs
NO_ONEDNN = "import torch\ntorch.backends.mkldnn.enabled = False\n"
KILLER = f"""{DIE}
from transformers import TrainerCallback

class Killer(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 8:
            _die(args.process_index)

trainer.add_callback(Killer())
trainer.train("""


def check(ranks: Ranks, source: str, deadly: str, folder: Path, goes_on_from: str | None = None) -> list[str]:
    """The killed run ends with the bits of an undisturbed one, on both ranks. Returns what it prints."""
    if "optim.Muon" in source:  # as the guide tells users of CPUs without bfloat16
        source, deadly = f"{NO_ONEDNN}{source}", f"{NO_ONEDNN}{deadly}"
    undisturbed = run(ranks, source, folder / "undisturbed")
    resumed = run_and_kill(ranks, source, deadly, folder / "killed")
    assert len(set(bits_of(undisturbed))) == 1 and bits_of(resumed) == bits_of(undisturbed)
    assert "on 2 workers; this rank:" in resumed[0] and "workers" not in resumed[1]
    if goes_on_from is not None:
        assert re.findall("resumes from (.*)", undisturbed[0] + resumed[0]) == ["None", goes_on_from]
    return undisturbed


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
    source = replaced(source, "first = int", 'print("resumes from", folder)\nfirst = int')
    source += TELL.format(model="accelerator.unwrap_model(model)")
    save = "    if number % 18 == 0:"
    deadly = replaced(source, save, f"    if number == 25: _die(accelerator.process_index)\n{save}")
    check(new_ranks, source, DIE + deadly, tmp_path, "out/digits/checkpoint-18")


VALIDATE = """
    def validation_step(self, batch, index):
        bits = b"".join(p.detach().numpy().tobytes() for p in self.parameters())
        print("\\nvalidated", __import__("hashlib").sha256(bits).hexdigest())

    def configure_optimizers(self):"""


@needs("lightning", "lightning")
@pytest.mark.parametrize("options", ["every=4, fragments=2", "exchange='gradients'"])
def test_lightning(new_ranks: Ranks, tmp_path: Path, options: str) -> None:
    source = replaced(script_of("lightning"), "every=2", options) + TELL.format(model="module")
    source = replaced(source, "\n    def configure_optimizers(self):", VALIDATE)
    source = replaced(source, "trainer.fit(module, loader, ", "trainer.fit(module, loader, loader, ")
    exists = "print('resumes from', last if os.path.exists(last) else None)\n"
    source = replaced(source, "trainer.fit(", f"{exists}trainer.fit(")
    step = "        inputs, targets = batch\n"
    dies = f"        if self.global_step == 40: _die(self.global_rank)\n{step}"
    deadly = DIE + replaced(source, step, dies)
    printed = check(new_ranks, source, deadly, tmp_path, "out/lightning/last.ckpt")
    here, elsewhere = (re.findall("validated (.*)", text) for text in printed)
    assert len(set(here)) > 1 and set(here) == set(elsewhere)  # theta_start, the same on all ranks
    saved = torch.load(tmp_path / "undisturbed/out/lightning/last.ckpt", weights_only=True)
    for state in saved["callbacks"].values():
        start = state.get("updates", {}).get("start", {})
        assert all(torch.equal(saved["state_dict"][name], tensor) for name, tensor in start.items())


STEP = "        return nn.functional.cross_entropy(self.network(inputs), targets)\n"
MANUAL_STEP = """\
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.network(inputs), targets))
        grads.append(self.network[0].weight.grad.sum().item())
        optimizer.step()
"""


@needs("lightning", "lightning")
def test_with_manual_optimization_ddp_sends_nothing(new_ranks: Ranks, tmp_path: Path) -> None:
    source = replaced(script_of("lightning"), STEP, MANUAL_STEP)
    source = replaced(source, "module = Digits()", "module = Digits()\nmodule.automatic_optimization = False")
    source = replaced(source, "    gradient_clip_val=1.0,\n", "    limit_train_batches=3,\n")
    source = "grads = []\n" + source + "print('grads', *grads)"
    mine, theirs = (printed.splitlines()[-1].split() for printed in run(new_ranks, source, tmp_path))
    assert len(mine) == 1 + 2 * 3 and mine[0] == theirs[0] == "grads"
    assert all(own != elsewhere for own, elsewhere in zip(mine[1:], theirs[1:], strict=True))


@needs("lightning", "lightning")
def test_after_a_validation_that_failed_fit_may_be_called_again(new_ranks: Ranks, tmp_path: Path) -> None:
    fails = (
        "    def validation_step(self, batch, index):\n        assert not self.trainer.global_step, 'bad'\n\n"
    )
    source = replaced(script_of("lightning"), "    def configure_opt", fails + "    def configure_opt")
    source = replaced(source, "    gradient_clip_val=1.0,\n", "    limit_train_batches=3,\n")
    source = replaced(source, "trainer.fit(module, loader, ", "trainer.fit(module, loader, loader, ")
    begin, fit = source.split("trainer.fit(")
    fit, end = fit.split("\n", 1)
    again = f"""
try:
    trainer.fit({fit}
except AssertionError as error:
    assert str(error) == "bad"
Digits.validation_step = lambda *_: None
trainer.fit({fit}
print("steps", sparse.exchange.num_steps)
"""
    assert all("steps 6" in printed for printed in run(new_ranks, begin + again + end, tmp_path))


# Several optimizers.

ADAMW = "torch.optim.AdamW({model}.parameters(), lr=1e-3)"
MUON = (
    "[torch.optim.Muon([p for p in {model}.parameters() if p.ndim == 2], lr=1e-3), "
    "torch.optim.AdamW([p for p in {model}.parameters() if p.ndim != 2], lr=1e-3)]"
)


@needs("accelerate", "accelerate")
def test_accelerate_with_muon(new_ranks: Ranks, tmp_path: Path) -> None:
    source = replaced(script_of("accelerate"), ADAMW.format(model="model"), MUON.format(model="model"))
    source = replaced(
        source, "model, optimizer, loader = ", "optimizer = list(map(accelerator.prepare, optimizer))\n"
    ).replace(
        "accelerator.prepare(model, optimizer, loader)", "model, loader = accelerator.prepare(model, loader)"
    )
    for call in ("step", "zero_grad"):
        new = f"        for each in optimizer: each.{call}()"
        source = replaced(source, f"        optimizer.{call}()", new)
    source += TELL.format(model="accelerator.unwrap_model(model)")
    save = "    if number % 18 == 0:"
    deadly = replaced(source, save, f"    if number == 25: _die(accelerator.process_index)\n{save}")
    check(new_ranks, source, DIE + deadly, tmp_path)


@needs("lightning", "lightning")
def test_lightning_with_muon(new_ranks: Ranks, tmp_path: Path) -> None:
    """Lightning itself asks for a manual optimization then."""
    source = replaced(script_of("lightning"), ADAMW.format(model="self"), MUON.format(model="self"))
    step = MANUAL_STEP.replace("        grads", "        # grads").replace("optimizer.zero", "self.zero")
    step = replaced(step, "        optimizer.step()", "        for each in optimizer: each.step()")
    source = replaced(source, STEP, step) + TELL.format(model="module")
    source = replaced(source, "module = Digits()", "module = Digits()\nmodule.automatic_optimization = False")
    source = replaced(source, "    gradient_clip_val=1.0,\n", "")
    first = "        inputs, targets = batch\n"
    dies = f"        if self.global_step == 80: _die(self.global_rank)\n{first}"
    check(new_ranks, source, DIE + replaced(source, first, dies), tmp_path)


BOTH = """
class Both(torch.optim.Optimizer):
    optimizers = []
    groups = lambda self: [group for each in self.optimizers for group in each.param_groups]
    param_groups = property(groups, lambda *_: None)

    def __init__(self, optimizers):
        super().__init__(model.parameters(), {})
        self.optimizers = optimizers

    def step(self, closure=None):
        for each in self.optimizers:
            each.step()

    def state_dict(self):
        return {"states": [each.state_dict() for each in self.optimizers]}

    def load_state_dict(self, saved):
        for each, state in zip(self.optimizers, saved["states"]):
            each.load_state_dict(state)

is_hidden = {p: p.ndim == 2 and ".h." in name for name, p in model.named_parameters()}
muon = torch.optim.Muon([p for p in is_hidden if is_hidden[p]], lr=1e-3)
adamw = torch.optim.AdamW([p for p in is_hidden if not is_hidden[p]], lr=1e-3)
trainer = Trainer(optimizers=(Both([muon, adamw]), None), """


@needs("transformers", "huggingface")
def test_huggingface_with_muon(new_ranks: Ranks, tmp_path: Path) -> None:
    """A Trainer has one optimizer, whose steps are those of others."""
    source = replaced(script_of("huggingface"), "trainer = Trainer(", BOTH) + TELL.format(model="model")
    check(new_ranks, source, replaced(source, "trainer.train(", KILLER), tmp_path)


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
    assert process.returncode == 0 and "rounds on 2 workers" in said, said
    state: dict[str, torch.Tensor] = torch.load(folder / "out/ray/states/model.pt", weights_only=True)
    return state
