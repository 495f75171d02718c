"""Sums that come back in part, on ranks: what owners owe is kept through everything that happens to a run."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import regtopk
from regtopk.core.requests import FromOwners
from regtopk.core.sparse import SparseGradient
from regtopk.distributed.transport.collectives import Collectives
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.test_alike import make_step
from tests.distributed.test_damage import answer
from tests.distributed.test_fsdp_dcp import Job
from tests.distributed.training import merged, refusal, steps_of

J = 403  # of no number of ranks a multiple
WEIGHTS = {4: [0.25] * 4, 3: [0.5, 0.25, 0.25], 5: [0.5, 0.125, 0.125, 0.125, 0.125]}
ALGORITHM = regtopk.TopK(density=0.05, returned=0.02)


def grads_of(step: int, rank: int) -> Tensor:
    """Small whole numbers: with weights that are powers of two, every sum is exact."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-3, 4, (J,), generator=generator).float()


def step_on_ranks(files: list[Path], steps: range, folder: Path) -> Tensor:
    """Go on from what was saved, on whatever ranks, and save; what was applied on the way, (J,)."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    vector = nn.Parameter(torch.zeros(J))
    exchange = regtopk.Exchange([vector], ALGORITHM, weight=WEIGHTS[num_ranks][rank])
    if files:
        parts = [torch.load(path, weights_only=True) for path in files]
        exchange.load_state_dict(regtopk.merge_state_dicts(parts))
    applied = torch.zeros(J, dtype=torch.float64)
    for step in steps:
        grad = grads_of(step, rank)
        if step % 4 == 1 and rank == 1:
            grad[5] = torch.nan  # nothing of this step counts
        vector.grad = grad
        exchange.step()
        if bool(vector.grad.isfinite().all()):
            applied += vector.grad
    torch.save(exchange.state_dict(), folder / f"{num_ranks}-{rank}.pt")
    return applied


def kept(saved: dict[str, Any]) -> Tensor:
    """sum_n w_n e_n and what owners owe, in float64."""
    total, num_ranks = torch.zeros(J, dtype=torch.float64), len(saved["weights"])
    for rank, weight in enumerate(saved["weights"]):
        worker = saved["workers"][str(rank)]
        total += weight * worker["entries"]["0"]["residual"].double()
        owed_by_rank = worker["groups"][0].get("owed", torch.zeros(0))
        for place, owed in enumerate(owed_by_rank.tolist()):
            entry = place * num_ranks + rank
            if entry < J:
                total[entry] += owed
            else:
                assert owed == 0
    return total


def test_nothing_is_lost_on_four_then_three_then_five_ranks(four_ranks: Ranks, tmp_path: Path) -> None:
    files: list[Path] = []
    balance = torch.zeros(J, dtype=torch.float64)
    with Ranks(3) as three, Ranks(5) as five:
        for number, ranks in enumerate((four_ranks, three, five)):
            num_ranks, steps = ranks.num_ranks, range(6 * number, 6 * number + 4)
            applied, *alike = ranks.run(step_on_ranks, files, steps, tmp_path)
            assert all(torch.equal(theirs, applied) for theirs in alike)
            files = sorted(tmp_path.glob(f"{num_ranks}-*.pt"))
            assert len(files) == num_ranks
            for step in steps:
                if step % 4 != 1:
                    for rank, weight in enumerate(WEIGHTS[num_ranks]):
                        balance += weight * grads_of(step, rank)
            balance -= applied
            saved = regtopk.merge_state_dicts([torch.load(path, weights_only=True) for path in files])
            assert torch.equal(kept(saved), balance) and bool(balance.any())


@on_ranks(4)
def test_what_owners_owe_in_ef21_arrives_among_other_weights() -> None:
    """The aggregate ends at the mean gradient to the bit: with a sum lost on the way it never would."""
    rank, weights = dist.get_rank(), [0.5, 0.25, 0.125, 0.125]
    algorithm, vector = regtopk.EF21(density=0.2, returned=0.1), nn.Parameter(torch.zeros(J))

    def run(exchange: regtopk.Exchange, num_steps: int) -> Tensor:
        for _ in range(num_steps):
            vector.grad = grads_of(0, rank)
            exchange.step()
        assert vector.grad is not None
        return vector.grad

    before = regtopk.Exchange([vector], algorithm)
    run(before, 3)
    saved = merged(before)
    owed = saved["workers"][str(rank)]["groups"][0]["owed"]
    assert owed.any() and before.total.residual_norm == pytest.approx(4 * float(owed.norm()))
    after = regtopk.Exchange([vector], algorithm, weight=weights[rank])
    after.load_state_dict(saved)
    mean = sum(weight * grads_of(0, n) for n, weight in enumerate(weights))
    assert torch.equal(run(after, 30), torch.as_tensor(mean))


def step_of(sizes: dict[str, int]) -> tuple[list[Tensor], list[str]]:
    """The aggregates of units of these sizes, and the trips over the network that a step takes."""
    steps, rank = steps_of(ALGORITHM, sizes), dist.get_rank()
    grads = {name: grads_of(len(name), rank)[:size] for name, size in sizes.items()}
    with patch.object(Collectives, "_send", autospec=True, side_effect=Collectives._send) as sent:
        make_step(steps, grads)
    return list(grads.values()), [call.args[1] for call in sent.call_args_list]


@on_ranks(4)
def test_units_travel_together() -> None:
    sizes = {"a": 400, "bb": 90, "ccc": 400, "dddd": 33}
    together, trips = step_of(sizes)
    assert trips == ["all_gather", "all_to_all", "all_to_all", "all_gather"]  # the first is the agreement
    for (name, size), aggregate in zip(sizes.items(), together, strict=True):
        (alone,), its_trips = step_of({name: size})
        assert torch.equal(alone, aggregate) and bool(alone.any()) and its_trips == trips


@on_ranks(2)
def test_a_run_may_begin_or_cease_to_have_sums_come_back_in_part() -> None:
    for before, after in ((ALGORITHM, regtopk.TopK(density=0.05)), (regtopk.TopK(density=0.05), ALGORITHM)):
        vector = nn.Parameter(torch.zeros(J))
        exchange, other = (regtopk.Exchange([vector], algorithm) for algorithm in (before, after))
        vector.grad = grads_of(0, dist.get_rank())
        exchange.step()
        other.load_state_dict(exchange.state_dict())
        sums = [kept(merged(each)) for each in (exchange, other)]
        assert torch.equal(*sums) and bool(sums[0].any())


def mass(job: Job) -> tuple[float, float]:
    """The sum over all entries of the weighted residuals, and of what owners owe."""
    buckets, weight = job.exchange._steps.buckets.all, job.exchange.weights[job.exchange.rank]
    states: list[Any] = [bucket.state for bucket in buckets]
    residual = sum(weight * state.residual.double().sum() for state in states)
    found = torch.stack([torch.as_tensor(residual), sum(state.owed.double().sum() for state in states)])
    dist.all_reduce(found)
    return float(found[0]), float(found[1])


@on_ranks(4)
def test_a_sharded_checkpoint_keeps_what_is_owed_on_every_mesh(tmp_path: Path) -> None:
    algorithm = regtopk.TopK(density=0.3, returned=0.02)
    job = Job("attach", (2, 2), algorithm)
    job.train(range(5))
    job.save(tmp_path / "saved")
    residual, owed = mass(job)
    assert abs(owed) > 0.01
    for shape, is_same in (((2, 2), True), ((4, 1), False), ((1, 4), False)):
        other = Job("attach", shape, algorithm)
        other.load(tmp_path / "saved")
        if is_same:
            assert mass(other) == (residual, owed)
        else:
            assert mass(other)[1] == 0 and abs(mass(other)[0] - residual - owed) < 1e-6


def overflow() -> str:
    """The gradients are finite, but on rank 1 they overflow together with the residual."""
    vector = nn.Parameter(torch.zeros(J))
    exchange = regtopk.Exchange([vector], ALGORITHM)

    def step() -> None:
        vector.grad = torch.full((J,), 3e38 if dist.get_rank() == 1 else 1.0)
        exchange.step()

    step()
    return ": ".join(refusal(step))


def test_a_message_that_no_owner_can_add_up_is_refused_by_all_at_once(four_ranks: Ranks) -> None:
    for said in four_ranks.run(overflow, timeout_s=30):  # the group's own limit is longer
        assert said.startswith("WireFormatError: message of rank ") and "values must be finite" in said


def owner_with_nan() -> str:
    values = torch.full((3,), torch.nan if dist.get_rank() == 0 else 1.0)
    return answer(Collectives, FromOwners(SparseGradient(torch.arange(3), values, 500), 1000))


def test_what_an_owner_could_not_add_up_is_refused_by_all(two_ranks: Ranks) -> None:
    for said in two_ranks.run(owner_with_nan, timeout_s=30):
        assert said.startswith("WireFormatError: message of rank 0 is refused: the sender's values must be")
