"""PowerSGD against the hook that torch ships, on two ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import regtopk
from tests.distributed.ranks import on_ranks


def backward(model: nn.Module, step: int) -> Tensor:
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
        backward(theirs, step)
    exchange = regtopk.attach(ours, regtopk.PowerSGD(rank=3))
    saved = exchange.state_dict()
    (worker,) = saved["workers"].values()
    worker["groups"][0]["factors"] = state.q_memory_dict[0].clone()
    worker["entries"]["weight"]["residual"] = state.error_dict[0].view(40, 24).clone()
    exchange.load_state_dict(saved)
    for step in range(4, 12):
        torch.testing.assert_close(backward(ours, step), backward(theirs, step), rtol=1e-4, atol=1e-4)
