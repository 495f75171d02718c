"""An exchange of the updates of several optimizers: Muon for matrices, AdamW for the rest."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

import regtopk
from tests.distributed.ranks import on_ranks
from tests.distributed.sharding import grid, sharded, whole_parameters
from tests.distributed.test_updates import TOPK, is_same_on_all_ranks, nesterov
from tests.distributed.training import (
    algorithm_state,
    closing,
    flat_parameters,
    loss_of,
    made,
    make_net,
    refusal,
    same,
)

REGTOPK = regtopk.RegTopK(density=0.1, value_code="4bit")


class Training:
    """A net, both optimizers by a schedule each, and an exchange, as users write them."""

    def __init__(
        self, algorithm: Any = TOPK, *, model: Any = None, fused: bool = False, **options: Any
    ) -> None:
        self.net = make_net() if model is None else model
        named = list(self.net.named_parameters())
        is_matrix = {name: p.ndim == 2 and not name.startswith("last") for name, p in named}
        self.muon = torch.optim.Muon([p for name, p in named if is_matrix[name]], lr=0.01)
        rest = [p for name, p in named if not is_matrix[name]]
        groups: list[dict[str, Any]] = [{"params": rest[:1], "weight_decay": 0.0}, {"params": rest[1:]}]
        self.adamw = torch.optim.AdamW(groups, lr=0.01, eps=1e-3, fused=fused)
        self.both = [self.muon, self.adamw]
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.95) for each in self.both]
        self.exchange = regtopk.UpdateExchange(self.net, self.both, algorithm, **{"every": 2, **options})

    def train_until(self, last: int, order: tuple[int, int] = (0, 1)) -> None:
        for step in range(self.exchange.num_steps, last):
            self.net.zero_grad()
            loss_of(self.net, step).backward()
            for place in order:
                self.both[place].step()
                self.schedulers[place].step()

    def result(self) -> Any:
        """What must be the same with and without an interruption."""
        things: list[Any] = [*self.both, *self.schedulers]
        states = [each.state_dict() for each in things]
        sent = self.exchange.summary().splitlines()[:2]
        return algorithm_state(self.exchange), self.net.state_dict(), states, sent


@contextmanager
def training(algorithm: Any = TOPK, **options: Any) -> Iterator[Training]:
    """Where a CPU has no bfloat16, Muon makes torch give up oneDNN, and other tests would get other bits."""
    has_onednn = torch.backends.mkldnn.enabled
    with made(Training, algorithm, **options) as (new, _):
        yield new
    torch.backends.mkldnn.set_flags(has_onednn, _fp32_precision=None)


# What a step is.


@on_ranks(4)
def test_a_round_ends_when_all_have_stepped_in_any_order() -> None:
    ends = []
    for order in ((0, 1), (1, 0)):
        with training() as it:
            for last in (1, 2, 3, 4):
                it.train_until(last, order)
                assert it.exchange.num_steps == last and it.exchange.num_rounds == last // 2
                assert is_same_on_all_ranks(flat_parameters(it.net)) == (last % 2 == 0)
            assert "topk: after 4 steps, 2 rounds on 4 workers" in it.exchange.summary()
            ends.append(it.result()[:2])
    assert same(*ends)


@on_ranks(2)
def test_two_halves_of_adamw_are_one() -> None:
    ends = []
    for halves in (1, 2):
        net = make_net()
        parameters = list(net.parameters())
        size = len(parameters) // halves
        parts = [parameters[i : i + size] for i in range(0, len(parameters), size)]
        several = [torch.optim.AdamW(part, lr=0.01) for part in parts]
        exchange = regtopk.UpdateExchange(net, several, REGTOPK, every=4, fragments=2, outer=nesterov)
        with closing(exchange):
            for step in range(8):
                net.zero_grad()
                loss_of(net, step).backward()
                for each in several:
                    each.step()
            (mine,) = exchange.state_dict()["workers"][str(dist.get_rank())]["updates"]
            ends.append((flat_parameters(net), mine["optimizer"]["state"]))
    assert same(*ends)


@on_ranks(2)
def test_one_that_steps_twice_is_refused() -> None:
    with training() as it:
        it.train_until(1)
        loss_of(it.net, 1).backward()
        kind, text = refusal(it.adamw.step)  # the first was skipped by something that we do not know
        assert kind == "ClusterError" and text == (
            "optimizers must step in the order of the first step, got optimizer[1] (AdamW) before "
            "optimizer[0] (Muon). With a GradScaler, which may skip one of them, pass grad_scaler"
        )
        it.muon.step()
        before = flat_parameters(it.net)
        kind, text = refusal(it.muon.step)
        assert kind == "ClusterError" and text == (
            "every optimizer must step before one steps again, got optimizer[0] (Muon) again before "
            "optimizer[1] (AdamW). With a GradScaler, which may skip one of them, pass grad_scaler"
        )
        for call in (it.exchange.state_dict, it.exchange.finish):
            assert refusal(call)[1] == (
                f"{call.__name__}() must be called when every optimizer has stepped, got a step of "
                "optimizer[0] (Muon) without optimizer[1] (AdamW). With a GradScaler, which may skip one of "
                "them, pass grad_scaler"
            )
        assert torch.equal(flat_parameters(it.net), before)  # nothing has changed
        it.adamw.step()
        assert it.exchange.num_rounds == 1
    it.adamw.step()  # after close() they are the rank's own
    it.adamw.step()


# A GradScaler decides for each optimizer whether it steps.


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_a_grad_scaler_may_skip_one_of_them(fused: bool, order: tuple[int, int]) -> None:
    """Rank 1 overflows in one optimizer's part, then in the other's, then in both: the last is no step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    spoiled = {1: ["first.weight"], 2: ["last.bias"], 4: ["first.weight", "last.bias"]}
    num_batches = 0
    with training(every=6, fused=fused, grad_scaler=scaler) as it:
        while it.exchange.num_steps < 6:
            it.net.zero_grad()
            scaler.scale(loss_of(it.net, num_batches)).backward()
            before = it.net.first.weight.clone(), it.net.last.bias.clone()
            names = spoiled.get(num_batches, []) if dist.get_rank() == 1 else []
            for name in names:
                it.net.get_parameter(name).grad.view(-1)[0] = math.inf  # type: ignore[union-attr]
            num_rounds = it.exchange.num_rounds
            for place in order:
                scaler.step(it.both[place])
            scaler.update()
            num_batches += 1
            if it.exchange.num_rounds == num_rounds:
                kept = map(torch.equal, before, (it.net.first.weight, it.net.last.bias))
                assert list(kept) == ["first.weight" in names, "last.bias" in names]
        assert num_batches == (6, 7)[dist.get_rank()]
        assert it.exchange.num_rounds == 1 and it.exchange.total.num_skipped == 0
        assert is_same_on_all_ranks(flat_parameters(it.net))


@on_ranks(2)
def test_a_grad_scaler_that_is_off_changes_nothing() -> None:
    ends = []
    for scaler in (None, torch.amp.GradScaler("cpu", enabled=False)):
        with training(grad_scaler=scaler) as it:
            it.train_until(2)
            ends.append(it.result()[:2])
    assert same(*ends)


@on_ranks(2)
def test_a_nan_takes_back_the_round_of_all() -> None:
    with training() as it:
        it.train_until(2)
        before = flat_parameters(it.net)
        it.train_until(3)
        loss_of(it.net, 3).backward()
        if dist.get_rank() == 1:
            it.net.first.weight.grad[0, 0] = it.net.last.bias.grad[0] = math.nan  # type: ignore[index]
        for each in it.both:
            each.step()
        assert torch.equal(flat_parameters(it.net), before) and it.exchange.total.num_skipped == 1
        has_state = [it.net.first.weight in it.muon.state, it.net.last.bias in it.adamw.state]
        assert has_state == [dist.get_rank() == 0] * 2
        it.train_until(6)
        assert it.exchange.num_rounds == 2 and is_same_on_all_ranks(flat_parameters(it.net))


@on_ranks(2)
def test_checkpoints_go_on_bit_for_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every": 4, "fragments": 2, "delay": 2, "mix": 0.5, "outer": nesterov}
    with training(REGTOPK, **options) as straight:
        straight.train_until(5)  # inside a round, while the last is under way
        with regtopk.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(5, **things_of(straight))
        straight.train_until(9)
        expected = straight.result()
    with training(REGTOPK, **options) as resumed:
        resumed.train_until(2)  # all of it is replaced
        with regtopk.Checkpoints(tmp_path) as checkpoints:
            checkpoints.load(**things_of(resumed))
        resumed.train_until(9)
        assert same(resumed.result(), expected)


def things_of(it: Training) -> dict[str, Any]:
    muons, adamws = it.schedulers
    return {"exchange": it.exchange, "schedule of muon": muons, "schedule of adamw": adamws}


@on_ranks(2)
def test_two_of_one_class_in_another_order_are_refused() -> None:
    saved: dict[str, Any] = {}
    for order in (1, -1):
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        several = [torch.optim.AdamW(layer.parameters()) for layer in net][::order]
        with closing(regtopk.UpdateExchange(net, several, TOPK)) as exchange:
            if order == 1:
                saved = exchange.state_dict()
            else:
                said = refusal(lambda: exchange.load_state_dict(saved))[1]  # noqa: B023
                assert said.startswith("parameters of each optimizer must be that of the saved state, [['0.w")


@pytest.mark.parametrize("way", ["clipped", "cleared"])
@on_ranks(2)
def test_a_scalers_own_record_of_what_it_skips_counts(way: str) -> None:
    """Gradients may be clipped after unscale_, or be gone, when the others' steps are looked at."""
    torch.manual_seed(0)
    net = nn.Linear(3, 3)
    first, second = (torch.optim.SGD([p], lr=0.1) for p in (net.weight, net.bias))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    bias = net.bias.detach().clone()
    with closing(regtopk.UpdateExchange(net, [first, second], TOPK, every=2, grad_scaler=scaler)) as exchange:
        scaler.scale(net(torch.ones(2, 3)).sum()).backward()
        assert net.bias.grad is not None
        net.bias.grad[0] = torch.inf
        order = [first, second] if way == "clipped" else [second, first]
        if way == "clipped":
            for optimizer in order:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(net.parameters(), 1.0)
        for optimizer in order:
            scaler.step(optimizer)
            if way == "cleared":
                optimizer.zero_grad()
        scaler.update()
        assert (exchange.num_steps, scaler.get_scale()) == (1, 512)
        assert torch.equal(net.bias, bias)


@on_ranks(4)
def test_parts_of_a_sharded_model(tmp_path: Path) -> None:
    """Torch's Muon takes whole matrices of DTensors; the state of both is cut as the parameters are."""

    def make() -> Any:
        group = grid(2, 2)["replicate"]
        return training(REGTOPK, model=sharded(grid(2, 2)["shard"]), process_group=group, every=2)

    with make() as straight:
        straight.train_until(3)
        save({"exchange": straight.exchange.sharded_state_dict()}, checkpoint_id=tmp_path)
        schedules = [each.state_dict() for each in straight.schedulers]
        straight.train_until(6)
        expected = whole_parameters(straight.net)
        assert expected.isfinite().all() and is_same_on_all_ranks(expected)
    with make() as resumed:
        resumed.exchange.load_sharded(tmp_path)
        for scheduler, state in zip(resumed.schedulers, schedules, strict=True):
            scheduler.load_state_dict(state)
        resumed.train_until(6)
        assert torch.equal(whole_parameters(resumed.net), expected)
