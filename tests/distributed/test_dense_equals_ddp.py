"""What torch has itself: with density 1 training goes as DDP's without a hook, PowerSGD as torch's."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import regtopk
from tests.distributed.ranks import on_ranks
from tests.distributed.test_updates import is_same_on_all_ranks
from tests.distributed.training import SMALL_BUCKETS, batch, closing, flat_parameters, make_net

NUM_STEPS = 6


@dataclass(frozen=True)
class Case:
    name: str
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    leaves_out: str = "nothing"  # or "unused", "every third", "on some ranks"
    frozen: tuple[str, ...] = ()
    accumulates: bool = False
    is_autocast: bool = False
    clips: bool = False
    dtype: torch.dtype = torch.float32
    zeroes_in_place: bool = False

    def __str__(self) -> str:
        return self.name


UNUSED = {"find_unused_parameters": True, **SMALL_BUCKETS}
CASES = [
    Case("one bucket"),
    Case("several buckets", SMALL_BUCKETS),
    Case("views of buckets", {"gradient_as_bucket_view": True, **SMALL_BUCKETS}),
    Case("static graph", {"static_graph": True, **SMALL_BUCKETS}),
    Case("static graph with unused parameters", {"static_graph": True, **SMALL_BUCKETS}, leaves_out="unused"),
    Case("unused parameters", UNUSED, "adamw", leaves_out="unused", dtype=torch.float64),
    Case("unused every third step", UNUSED, "adamw", leaves_out="every third", dtype=torch.float64),
    Case("unused on some ranks", UNUSED, "momentum", leaves_out="on some ranks"),
    Case(
        "unused, views, zeroed in place",
        {"gradient_as_bucket_view": True, **UNUSED},
        "momentum",
        leaves_out="every third",
        zeroes_in_place=True,
    ),
    Case("frozen parameters", SMALL_BUCKETS, frozen=("first.weight", "middle.bias")),
    Case("accumulation with no_sync", SMALL_BUCKETS, "momentum", accumulates=True),
    Case("bf16 autocast", SMALL_BUCKETS, is_autocast=True),
    Case("bf16 parameters", SMALL_BUCKETS, dtype=torch.bfloat16),
    Case("momentum and clipping", SMALL_BUCKETS, "momentum", clips=True),
    Case("adam", SMALL_BUCKETS, "adam", dtype=torch.float64),
    Case("adamw", SMALL_BUCKETS, "adamw", dtype=torch.float64),
]
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


@pytest.mark.parametrize("case", CASES, ids=str)
@on_ranks(2)
def test_two_ranks_are_bit_identical(case: Case) -> None:
    assert torch.equal(train(case, is_hooked=False), train(case, is_hooked=True))


@on_ranks(4)
def test_four_ranks_agree_up_to_the_order_of_addition() -> None:
    """Adam divides by the gradient's own size, so it blows differences up: this case is in float64."""
    (case,) = [case for case in CASES if case.name == "unused every third step"]
    plain, hooked = train(case, is_hooked=False), train(case, is_hooked=True)
    assert is_same_on_all_ranks(hooked)
    torch.testing.assert_close(hooked, plain, rtol=0, atol=1e-12)


def train(case: Case, *, is_hooked: bool) -> Tensor:
    """The parameters after training, without a hook or with ours."""
    net = make_net().to(case.dtype)
    for name, p in net.named_parameters():
        p.requires_grad_(name not in case.frozen)
    model = DistributedDataParallel(net, **case.ddp)
    hooked = closing(regtopk.attach(model, regtopk.TopK(density=1.0))) if is_hooked else nullcontext()
    optimizer = OPTIMIZERS[case.optimizer](p for p in net.parameters() if p.requires_grad)
    with hooked:
        for step in range(NUM_STEPS):
            optimizer.zero_grad(set_to_none=not case.zeroes_in_place)
            if case.accumulates:
                with model.no_sync():
                    backward(case, model, step + 100)
            backward(case, model, step)
            if case.clips:
                nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
    return flat_parameters(net)


def backward(case: Case, model: nn.Module, step: int) -> None:
    with_extra = {
        "nothing": True,
        "unused": False,
        "every third": step % 3 != 1,
        "on some ranks": (step + dist.get_rank()) % 3 != 1,
    }[case.leaves_out]
    context = torch.autocast("cpu", dtype=torch.bfloat16) if case.is_autocast else nullcontext()
    with context:
        loss = model(batch(step).to(case.dtype), with_extra=with_extra).square().mean()
    loss.backward()


def gradient(model: nn.Module, step: int) -> Tensor:
    """What the ranks make of their gradients of a weight."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    model.zero_grad()
    inputs, factors = torch.randn(30, 24, generator=generator), torch.randn(30, 40, generator=generator)
    (model(inputs) * factors).sum().backward()
    (weight,) = model.parameters()
    assert weight.grad is not None
    return weight.grad


@on_ranks(2)
def test_it_is_torchs_hook_from_the_same_factor_on() -> None:
    theirs, ours = (DistributedDataParallel(nn.Linear(24, 40, bias=False)) for _ in range(2))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=3, start_powerSGD_iter=2)
    theirs.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(4):  # two dense ones, and two from a random factor on
        gradient(theirs, step)
    exchange = regtopk.attach(ours, regtopk.PowerSGD(rank=3))
    saved = exchange.state_dict()
    (worker,) = saved["workers"].values()
    worker["groups"][0]["factors"] = state.q_memory_dict[0].clone()
    worker["entries"]["weight"]["residual"] = state.error_dict[0].view(40, 24).clone()
    exchange.load_state_dict(saved)
    for step in range(4, 12):
        torch.testing.assert_close(gradient(ours, step), gradient(theirs, step), rtol=1e-4, atol=1e-4)
