"""Saved and resumed: bit for bit on the same ranks, and nothing lost on others."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import regtopk
from regtopk.algorithms import EF21, FairTopK
from regtopk.core.algorithm import Algorithm
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.training import (
    SMALL_BUCKETS,
    algorithm_state,
    ddp,
    flat_parameters,
    loss_of,
    made,
    make_net,
    same,
)

WEIGHTS = {2: [0.7, 0.3], 3: [0.25, 0.0, 0.75], 4: [0.4, 0.3, 0.2, 0.1]}
ALGORITHMS: dict[str, Algorithm[Any]] = {
    "regtopk": regtopk.RegTopK(density=0.05, value_code="4bit"),
    "regtopk warming up": regtopk.RegTopK(density=regtopk.WarmUp(density=0.02, num_steps=14)),
    "ef21": EF21(density=0.05),
    "returned": regtopk.TopK(density=0.05, value_code="4bit", returned=0.02),
    "fair-topk": FairTopK(density=0.05, trial=4),  # listens to reports
}


class Training:
    """A model, its optimizer and its exchange, as users write them."""

    def __init__(self, algorithm: str, weights: list[float] | None = None) -> None:
        self.model = ddp(**SMALL_BUCKETS)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        weight = None if weights is None else weights[dist.get_rank()]
        self.exchange = regtopk.attach(self.model, ALGORITHMS[algorithm], weight=weight)
        self.things: dict[str, Any] = {"optimizer": self.optimizer, "exchange": self.exchange}
        self.things["model"] = self.model.module
        self.num_steps = 0

    def train_until(self, last: int) -> None:
        for step in range(self.num_steps, last):
            self.optimizer.zero_grad()
            loss = loss_of(self.model, step)
            loss.backward()
            self.optimizer.step()
            self.exchange.report(loss=loss.item(), time_s=1.0 + step % 3)
        self.num_steps = last

    def save(self, path: Path) -> None:
        states = {name: thing.state_dict() for name, thing in self.things.items()}
        torch.save({"step": self.num_steps, **states}, path)

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        self.num_steps = saved["step"]
        for name, thing in self.things.items():
            thing.load_state_dict(saved[name])

    def result(self) -> tuple[Tensor, dict[str, Any], list[str]]:
        """What must be the same with and without an interruption."""
        sent = self.exchange.summary().splitlines()[:2]
        return flat_parameters(self.model), algorithm_state(self.exchange), sent


def test_resumed_in_new_processes_bit_for_bit(two_ranks: Ranks, new_ranks: Ranks, tmp_path: Path) -> None:
    straight = two_ranks.run(train, tmp_path, False)
    assert same(new_ranks.run(train, tmp_path, True), straight)


def train(folder: Path, is_resumed: bool) -> list[Any]:
    """What 10 steps end with, if they are saved after 5 of them, or resumed there."""
    results = []
    for name in ALGORITHMS:
        path = folder / f"{name}-rank{dist.get_rank()}.pt"
        with made(Training, name) as (training, _):
            if is_resumed:
                training.load(path)
            else:
                training.train_until(5)
                training.save(path)
            training.train_until(10)
            results.append(training.result())
    return results


# Other numbers of ranks.


@pytest.mark.parametrize(
    ("old", "weights", "is_gathered"),
    [(4, WEIGHTS[2], True), (2, WEIGHTS[4], False), (2, [0.5, 0.5], True), (2, [1.0, 0.0], True)],
)
def test_weighted_residual_survives_other_ranks_or_weights(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, old: int, weights: list[float], is_gathered: bool
) -> None:
    ranks, new = {2: two_ranks, 4: four_ranks}, len(weights)
    for algorithm, field in (("regtopk", "residual"), ("ef21", "estimate")):
        ranks[old].run(save_some, tmp_path, algorithm, WEIGHTS[old], is_gathered)
        files = sorted(tmp_path.glob("*.pt"))
        assert len(files) == (1 if is_gathered else old)
        before = regtopk.merge_state_dicts([torch.load(path, weights_only=True) for path in files])
        after = regtopk.merge_state_dicts(ranks[new].run(load_some, files, algorithm, weights))
        assert after["num_steps"] == before["num_steps"] == 7 and len(after["workers"]) == new
        assert relative_change(weighted_sum(before, field), weighted_sum(after, field)) < 1e-6
        if algorithm == "ef21":  # what all know is still the sum of what each keeps
            known = flat({name: e["aggregate"] for name, e in after["workers"]["0"]["entries"].items()})
            assert relative_change(known, weighted_sum(after, field)) < 1e-5
        for path in files:
            path.unlink()


def test_a_state_of_several_buckets_keeps_the_residual(two_ranks: Ranks, tmp_path: Path) -> None:
    """As earlier versions saved with scope="bucket"."""
    two_ranks.run(save_some, tmp_path, "regtopk", WEIGHTS[2], True)
    (file,) = tmp_path.glob("*.pt")
    before = torch.load(file, weights_only=True)
    names, others = before["groups"][0], [worker["groups"][0] for worker in before["workers"].values()]
    before["groups"] = [names[:3], names[3:]]
    for worker, fields in zip(before["workers"].values(), others, strict=True):
        worker["groups"] = (fields, fields)
    torch.save(before, file)
    parts = two_ranks.run(load_some, [file], "regtopk", WEIGHTS[2])
    assert len(parts[0]["groups"]) == 1  # of the whole model
    after = regtopk.merge_state_dicts(parts)
    assert relative_change(weighted_sum(before), weighted_sum(after)) == 0


def save_some(folder: Path, algorithm: str, weights: list[float], is_gathered: bool) -> None:
    with made(Training, algorithm, weights) as (training, _):
        training.train_until(7)
        if not is_gathered:
            torch.save(training.exchange.state_dict(), folder / f"rank{dist.get_rank()}.pt")
            return
        state = training.exchange.gather_state_dict(dst=1)
        assert (state is None) == (dist.get_rank() != 1)
        if state is not None:
            torch.save(state, folder / "all.pt")


def load_some(files: list[Path], algorithm: str, weights: list[float]) -> dict[str, Any]:
    with made(Training, algorithm, weights) as (training, exchange):
        parts = [torch.load(path, weights_only=True) for path in files]
        exchange.load_state_dict(regtopk.merge_state_dicts(parts))
        state: dict[str, Any] = exchange.state_dict()
        training.train_until(3)  # and it trains
        assert exchange.num_steps == 10
        is_resized = len(regtopk.merge_state_dicts(parts)["weights"]) != len(weights)
        # what other ranks sent is not this rank's
        since = " since step 7, when the ranks changed" if is_resized else ""
        expected = f"{3 if is_resized else 10} steps on {len(weights)} workers{since}; this rank:"
        assert exchange.summary().splitlines()[0].endswith(expected)
        before = exchange.summary().splitlines()[:6]  # which rank was slow is not saved
        exchange.load_state_dict(exchange.state_dict())  # on the same ranks it counts on
        assert exchange.summary().splitlines()[:6] == before
        return state


def weighted_sum(saved: dict[str, Any], field: str = "residual") -> Tensor:
    """sum_n w_n e_n over all parameters, in float64."""
    return sum(
        (
            weight * flat({name: e[field] for name, e in saved["workers"][str(rank)]["entries"].items()})
            for rank, weight in enumerate(saved["weights"])
        ),
        torch.zeros((), dtype=torch.float64),
    )


def flat(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([parts[name].double().flatten() for name in sorted(parts)])


def relative_change(before: Tensor, after: Tensor) -> float:
    assert before.norm() > 0
    return float((after - before).norm() / before.norm())


# torch.distributed.checkpoint.


def test_distributed_checkpoint_keeps_every_ranks_residual(
    two_ranks: Ranks, new_ranks: Ranks, tmp_path: Path
) -> None:
    saved = two_ranks.run(save_with_dcp, tmp_path)
    loaded = new_ranks.run(load_with_dcp, tmp_path)
    assert same(loaded, saved)
    entries = [saved[rank][0]["workers"][str(rank)]["entries"] for rank in range(2)]
    assert not any(same(entries[0][name], entries[1][name]) for name in entries[0] if "weight" in name)


def save_with_dcp(folder: Path) -> Any:
    with made(Training, "regtopk warming up") as (training, exchange):
        training.train_until(12)
        parts = {"model": training.model.module.state_dict(), "exchange": exchange.state_dict()}
        save(parts, checkpoint_id=folder / "plain")
        save({"exchange": exchange}, checkpoint_id=folder / "stateful")  # it saves itself
        state = algorithm_state(exchange)
        training.optimizer.state.clear()
        training.train_until(15)
        return state, flat_parameters(training.model)


def load_with_dcp(folder: Path) -> Any:
    with made(Training, "regtopk warming up") as (training, exchange):
        load({"exchange": exchange}, checkpoint_id=folder / "stateful")
        state = algorithm_state(exchange)
    with made(Training, "regtopk warming up") as (training, exchange):
        parts = {"model": training.model.module.state_dict(), "exchange": exchange.state_dict()}
        load(parts, checkpoint_id=folder / "plain")
        training.model.module.load_state_dict(parts["model"])
        exchange.load_state_dict(parts["exchange"])
        assert same(algorithm_state(exchange), state)
        training.num_steps = 12
        training.train_until(15)
        return state, flat_parameters(training.model)


@on_ranks(2)
def test_state_dict_is_a_copy_on_the_cpu() -> None:
    net = make_net()
    exchange = regtopk.Exchange(net, regtopk.RegTopK(density=0.1))
    for step in range(2):
        loss_of(net, step).backward()
        exchange.step()
    saved, again = exchange.state_dict(), exchange.state_dict()
    exchange.load_state_dict(saved)
    for step in range(2):
        loss_of(net, step).backward()
        exchange.step()
    assert same(saved, again)  # neither training nor loading writes into it
