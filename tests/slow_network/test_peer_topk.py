"""Top-k as peers send it does what Top-k does: nothing is lost, and everything sent is DDP without a hook."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.slow_network.peer_topk import PeerTopK, peer_topk_hook
from tests.distributed.ranks import Ranks
from tests.distributed.training import SMALL_BUCKETS, loss_of, make_net


def test_peer_topk() -> None:
    with Ranks(2) as ranks:
        ranks.run(compare_with_no_hook)
        ranks.run(add_up)


def hooked(density: float) -> tuple[DistributedDataParallel, PeerTopK]:
    model, state = DistributedDataParallel(make_net(), **SMALL_BUCKETS), PeerTopK(density)
    model.register_comm_hook(state, peer_topk_hook)
    return model, state


def compare_with_no_hook() -> None:
    plain = DistributedDataParallel(make_net())
    model, _ = hooked(1.0)
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            loss_of(each, step).backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def add_up() -> None:
    """What was received and what is carried, over all ranks, is all gradients of the steps since."""
    model, state = hooked(0.1)
    plain = DistributedDataParallel(make_net())
    numel = sum(p.numel() for p in model.parameters())
    expected, received = 0.0, 0.0
    for step in range(6):
        if step == 2:  # DDP has made its buckets
            state.residuals.clear()
        for each in (plain, model):
            each.zero_grad()
            loss_of(each, step).backward()
        if step >= 2:
            expected += sum(float(p.grad.double().sum()) for p in plain.parameters() if p.grad is not None)
            received += sum(float(p.grad.double().sum()) for p in model.parameters() if p.grad is not None)
    carried = torch.tensor(sum(float(r.double().sum()) for r in state.residuals.values()))
    dist.all_reduce(carried)
    assert received + float(carried) / 2 == pytest.approx(expected, rel=1e-4)
    assert state.num_entries == pytest.approx(0.1 * numel, rel=0.05)
    assert state.sent_bytes() == 8 * state.num_entries
