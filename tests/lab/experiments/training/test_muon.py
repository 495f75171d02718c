"""Muon of many models at once: against torch's own, step by step; and interrupted."""

import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from regtopk.lab.experiments.compare.config import CompareConfig, MethodAt
from regtopk.lab.experiments.networks.flat import flatten, layout_of
from regtopk.lab.experiments.networks.gpt import GPT
from regtopk.lab.experiments.tasks import Problem
from regtopk.lab.experiments.training.optimizers import OPTIMIZERS, Descent
from regtopk.lab.experiments.training.trainer import Trainer
from regtopk.lab.method import Method

pytestmark = pytest.mark.usefixtures("small_products")
LR = 0.01


def as_one_writes_it(network: nn.Module) -> list[Any]:
    """Muon for the matrices in blocks, AdamW for the rest; embeddings decay, norms and biases do not."""
    named = list(network.named_parameters())
    matrices = [p for name, p in named if "blocks" in name and p.dim() == 2]
    embeddings = [p for name, p in named if name in ("token.weight", "position.weight")]
    others = [p for name, p in named if p.dim() == 1]
    assert len(matrices) == 8 and len(matrices + embeddings + others) == len(named)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": embeddings, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            LR,
            betas=(0.9, 0.95),
        ),
    ]
    warm_up = (torch.optim.lr_scheduler.LambdaLR(own, lambda step: (step + 1) / 100) for own in optimizers)
    return [*optimizers, *warm_up]


def check_against_torch(device: str, bound: float) -> None:
    """The models of 2 seeds and 2 workers go as four networks do; gradients are drawn, too small to clip."""
    torch.manual_seed(0)
    networks = [GPT(40, context=16, width=24, num_layers=2, num_heads=1).to(device) for _ in range(4)]
    models = torch.stack([flatten(network) for network in networks]).unflatten(0, (2, 2))
    start, layout = models.clone(), layout_of(networks[0])
    descent = Descent(models, OPTIMIZERS["muon"], LR, num_steps=1000, layout=layout)
    plain = [as_one_writes_it(network) for network in networks]
    for step in range(4):
        models.grad = (1e-3 * torch.randn(2, 2, layout.numel)).to(device)
        for network, grad in zip(networks, models.grad.flatten(0, 1), strict=True):
            for p, own in zip(
                network.parameters(), grad.split([x.numel for x in layout.layers]), strict=True
            ):
                p.grad = own.view_as(p)
        for each in (part for own in plain for part in own):
            each.step()
        descent.step(step)
        expected = torch.stack([flatten(network) for network in networks]).view_as(models)
        assert (models - expected).norm() < bound * (expected - start).norm()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_all_models_go_as_with_torchs_muon_and_adamw(device: str) -> None:
    """But for the last bit of what decays, 1e-5 of a step, and sums that a batch may add in another order."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    are_torchs_bits = device == "cpu" and (platform.machine() == "x86_64" or not has_bfloat16)
    check_against_torch(device, bound=5e-5 if are_torchs_bits else 0.02)


def test_lmo_takes_steps_of_a_given_size_without_momentum() -> None:
    """Torch's Muon for matrices in blocks and signs elsewhere; of a network and of flat models."""
    torch.manual_seed(0)
    network, control = (GPT(40, context=16, width=24, num_layers=2, num_heads=1) for _ in range(2))
    control.load_state_dict(network.state_dict())
    models, layout = flatten(network)[None].clone(), layout_of(network)
    start, named = models.clone(), dict(control.named_parameters())
    muon = torch.optim.Muon(
        [p for name, p in named.items() if name.startswith("blocks") and p.dim() == 2],
        momentum=0, weight_decay=0, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    lmo = OPTIMIZERS["lmo"]
    descents = [Descent(network, lmo, LR, 1000), Descent(models, lmo, LR, 1000, layout)]
    for step in range(3):
        models.grad = torch.randn(1, layout.numel) * 10.0**-step  # of any size
        for layer, p, own in zip(layout.layers, named.values(), network.parameters(), strict=True):
            p.grad = own.grad = models.grad[0, layer.entries].view(layer.shape)
            if not (layer.name.startswith("blocks") and len(layer.shape) == 2):
                p.data -= LR * (step + 1) / 100 * p.grad.sign()
        muon.param_groups[0]["lr"] = LR * (step + 1) / 100
        muon.step()
        for descent in descents:
            descent.step(step)
    for found in (models[0], flatten(network)):
        assert (found - flatten(control)).norm() < 0.02 * (flatten(control) - start[0]).norm()


@pytest.mark.parametrize(
    "words", ["dense", "topk:exchange=updates:every=4:fragments=2:delay=1:outer=nesterov"]
)
def test_an_interrupted_training_goes_on_to_the_same_bits(words: str, text_file: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_layers": 1, "width": 16, "context": 16, "batch_size": 2, "num_workers": 2}
    config = CompareConfig("gpt", data=text_file, num_steps=12, optimizer="muon", **sizes)

    def make() -> Trainer:
        method = config.complete(Method.parse(words))
        algorithm = config.build(MethodAt(method, 0.1))
        return Trainer(Problem(config).task([0, 1]), algorithm, method, lr=0.01, num_steps=12)

    whole, first, second = make(), make(), make()
    whole.run_until(12)
    first.run_until(6)
    first.take_losses()
    torch.save(first.state_dict(), tmp_path / "state")
    second.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    second.run_until(12)
    assert torch.equal(second.models, whole.models) and not torch.equal(first.models, whole.models)
