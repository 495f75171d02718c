"""Sharded models through torch.distributed.checkpoint: the same mesh, and other numbers of either axis."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import regtopk
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.sharding import attached, grid, sharded, whole_parameters
from tests.distributed.test_updates import nesterov, train
from tests.distributed.training import algorithm_state, make_net, refusal, same, whole

KINDS = ("attach", "updates")
REGTOPK = regtopk.RegTopK(density=0.05, value_code="4bit")
Shape = tuple[int, int]  # replicas, shards


class Job:
    """A sharded net that trains by either kind of exchange."""

    def __init__(self, kind: str, shape: Shape, algorithm: Any = REGTOPK, **options: Any) -> None:
        options["process_group"] = grid(*shape)["replicate"]
        self.model = sharded(grid(*shape)["shard"])
        self.optimizer: torch.optim.Optimizer
        self.exchange: Any
        if kind == "attach":
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            self.exchange = regtopk.attach(self.model, algorithm, **options)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
            options |= {"every": 2, "outer": nesterov}
            self.exchange = regtopk.UpdateExchange(self.model, self.optimizer, algorithm, **options)

    def train(self, steps: range) -> None:
        train(self.model, self.optimizer, steps)

    def save(self, folder: Path) -> None:
        content = {"model": get_model_state_dict(self.model), "exchange": self.exchange.sharded_state_dict()}
        save(content, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        if not isinstance(self.exchange, regtopk.UpdateExchange):  # whose state holds the model
            content = {"model": get_model_state_dict(self.model)}
            load(content, checkpoint_id=folder)
            set_model_state_dict(self.model, content["model"])
        self.exchange.load_sharded(folder)

    def owed(self) -> dict[str, Tensor]:
        """This rank's part of the residual, by parameter."""
        entries = self.exchange.sharded_state_dict()["replicas"][str(self.exchange.rank)]["entries"]
        return {name: fields["residual"].to_local() for name, fields in entries.items() if fields}


@pytest.mark.parametrize(
    ("kind", "shape", "residual_dtype"), [("attach", (1, 4), "bfloat16"), ("updates", (2, 2), "float32")]
)
@on_ranks(4)
def test_the_same_mesh_goes_on_bit_for_bit(
    tmp_path: Path, kind: str, shape: Shape, residual_dtype: str
) -> None:
    """A straight and a resumed run."""
    jobs = [Job(kind, shape, residual_dtype=residual_dtype) for _ in range(2)]
    jobs[0].train(range(3))
    jobs[0].save(tmp_path)
    jobs[1].train(range(20, 21))  # elsewhere
    jobs[1].load(tmp_path)
    for job in jobs:
        job.train(range(3, 5))
    assert same(*(algorithm_state(job.exchange) for job in jobs))
    assert jobs[1].exchange.total.sent_bytes == jobs[0].exchange.total.sent_bytes
    assert torch.equal(*(whole_parameters(job.model) for job in jobs))


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_an_exchange_that_dcp_saves_itself_keeps_every_part(tmp_path: Path, kind: str) -> None:
    first, second = Job(kind, (2, 2)), Job(kind, (2, 2))
    first.train(range(3))
    save({"exchange": first.exchange}, checkpoint_id=tmp_path)
    load({"exchange": second.exchange}, checkpoint_id=tmp_path)
    assert second.exchange.num_steps == first.exchange.num_steps
    assert same(algorithm_state(first.exchange), algorithm_state(second.exchange))


def test_killed_and_resumed_it_ends_with_the_same_bits(four_ranks: Ranks, tmp_path: Path) -> None:
    with Ranks(4) as ranks:  # which end by SIGKILL, somewhere in a step
        ranks.start(train_saving, tmp_path / "killed", range(100_000))
        while not (tmp_path / "killed" / "2" / ".metadata").exists():  # what DCP writes last
            time.sleep(0.01)
    runs = (("killed", range(2, 4)), ("straight", range(4)))
    resumed, straight = (four_ranks.run(train_saving, tmp_path / name, steps) for name, steps in runs)
    assert all(map(torch.equal, straight, resumed))


def train_saving(folder: Path, steps: range) -> Tensor:
    """Train from the checkpoint of the first step, if it is not the very first, and save that of step 2."""
    job = Job("updates", (2, 2))
    if steps.start > 0:
        job.load(folder / str(steps.start))
    for step in steps:
        job.train(range(step, step + 1))
        if step == 1:
            job.save(folder / "2")
    return whole_parameters(job.model)


# Other numbers.


@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_of_the_residuals_is_kept_on_every_mesh(
    four_ranks: Ranks, two_ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    before: tuple[Tensor, Any] | None = None
    for number, shape in enumerate([(2, 2), (1, 4), (2, 1), (4, 1)]):
        ranks = four_ranks if shape[0] * shape[1] == 4 else two_ranks
        results = ranks.run(go_on, tmp_path, kind, shape, number)
        loaded, saved = ([each[i] for each in results] for i in (0, 1))
        if before is not None:
            found = sum_of([each[0] for each in loaded], shape)
            torch.testing.assert_close(found, before[0], rtol=1e-6, atol=0)
            assert all(same(each[1], before[1]) for each in loaded)
        before = sum_of([each[0] for each in saved], shape), saved[0][1]
        assert before[0].abs().sum() > 0


def go_on(folder: Path, kind: str, shape: Shape, number: int) -> list[tuple[dict[str, Tensor], Any]]:
    """What a job has after loading what the last mesh saved, and after training on, when it saves."""
    job = Job(kind, shape, regtopk.TopK(density=0.05))
    if number > 0:
        job.load(folder / str(number - 1))
        assert job.exchange.num_steps == 2 * number
    found = [(job.owed(), facts(job))]
    job.train(range(2 * number, 2 * number + 2))
    job.save(folder / str(number))
    return [*found, (job.owed(), facts(job))]


def facts(job: Job) -> dict[str, Any]:
    """What must be the same on every mesh: the model, and both optimizers of updates."""
    found = {"model": whole_parameters(job.model), "num_steps": job.exchange.num_steps}
    if job.exchange.num_steps and isinstance(job.exchange, regtopk.UpdateExchange):
        outer: Any = job.exchange.outer
        wholes = dict(job.model.named_parameters())
        buffers = job.exchange.sharded_state_dict()["outer"]
        assert outer.state and len(buffers) == len(wholes)
        found["adam's steps"] = {int(state["step"]) for state in job.optimizer.state.values()}
        found["adam's shapes"] = [state["exp_avg"].shape for state in job.optimizer.state.values()]
    return found


def sum_of(parts: list[dict[str, Tensor]], shape: Shape) -> Tensor:
    """The weighted sum of all replicas' residuals, put together from every rank's part."""
    replicas, shards = shape
    sizes = {name: p.shape for name, p in make_net().named_parameters()}
    total = []
    for name, size in sizes.items():
        rows = [
            torch.cat([parts[r * shards + s][name] for s in range(shards) if name in parts[r * shards + s]])
            for r in range(replicas)
        ]
        assert all(row.shape == size for row in rows)
        total.append(torch.stack(rows).double().mean(0).flatten())
    return torch.cat(total)


@on_ranks(4)
def test_adams_state_is_the_mean_and_the_outer_state_is_kept(tmp_path: Path) -> None:
    job, other = Job("updates", (2, 2)), Job("updates", (1, 4))
    job.train(range(4))
    job.save(tmp_path)
    other.load(tmp_path)
    saved: list[Any] = [None] * 4
    dist.all_gather_object(saved, states_of(job))
    mean, momentum = states_of(other)
    both = torch.stack([saved[0][0], saved[2][0]]).double().mean(0).float()
    assert torch.equal(mean, both) and not torch.equal(saved[0][0], saved[2][0])
    assert torch.equal(momentum, saved[0][1])


def states_of(job: Job) -> tuple[Tensor, Tensor]:
    """All of Adam's mean of one parameter, and of its outer momentum."""
    p = job.model.middle.weight
    start = job.exchange._model.start["middle.weight"]
    momentum = p.detach().clone()
    momentum.to_local().copy_(job.exchange.outer.state[start]["momentum_buffer"])
    return whole(job.optimizer.state[p]["exp_avg"]), whole(momentum)


@on_ranks(4)
def test_what_does_not_fit_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    job = Job("updates", (2, 2))
    job.train(range(3))
    job.save(tmp_path)
    elsewhere, other = Job("updates", (1, 4)), Job("updates", (2, 2), regtopk.TopK(density=0.05))
    net = make_net()
    net.extra.requires_grad_(False)
    _, partly = attached(REGTOPK, net)
    before = algorithm_state(elsewhere.exchange), algorithm_state(other.exchange)
    (part,), mine = job.exchange.state_dict()["shards"].values(), dist.get_rank() % 2
    rule = "must hold a sharded exchange of this model, which was saved as {"
    state_dict = ": exchange.sharded_state_dict()}, got "
    cases: dict[str, Callable[[], Any]] = {
        f"{tmp_path / 'no'} {rule}'exchange'{state_dict}": lambda: job.load(tmp_path / "no"),
        f"{tmp_path} {rule}'k'{state_dict}": lambda: job.exchange.load_sharded(tmp_path, key="k"),
        "the saved state must be from a round's end to be loaded on other ranks or with other weights, as "
        "the model is sharded: call finish() before you save": lambda: elsewhere.load(tmp_path),
        "what sharded_state_dict() gave must be loaded by load_sharded(folder)": lambda: (
            job.exchange.load_state_dict(job.exchange.sharded_state_dict())
        ),
        f"shard of the saved state must be [{mine}, 2], got [{1 - mine}, 2]": lambda: (
            job.exchange.load_state_dict({**part, "shard": [1 - mine, 2]})
        ),
        "parameters of the saved state must be this model's, got a difference in ['extra.bias', "
        "'extra.weight']": lambda: partly.load_sharded(tmp_path),
        "algorithm must be that of the saved state, 'regtopk', got 'topk'": lambda: other.load(tmp_path),
    }
    for text, act in cases.items():
        kind, found = refusal(act)
        is_from_torch = found.startswith(text) and found.endswith(" is loaded by dcp.load alike)")
        assert kind == "StateError" and (found == text or is_from_torch) and "\n" not in found
    assert same(before, (algorithm_state(elsewhere.exchange), algorithm_state(other.exchange)))


@on_ranks(2)
def test_a_model_that_is_not_sharded_has_no_sharded_state() -> None:
    net = make_net()
    exchange = regtopk.UpdateExchange(net, torch.optim.SGD(net.parameters(), lr=0.1), REGTOPK)
    found = [refusal(exchange.sharded_state_dict), refusal(lambda: exchange.load_sharded("nowhere"))]
    exchange.close()
    message = "the model must be sharded by fully_shard: of this one save state_dict()"
    assert found == [("ClusterError", message)] * 2


@on_ranks(4)
def test_a_state_that_cannot_be_cut_anew(tmp_path: Path) -> None:
    """A state with a number for each row, as factored optimizers keep it."""
    jobs = Job("updates", (2, 2)), Job("updates", (1, 4))
    jobs[0].train(range(2))
    state = jobs[0].optimizer.state[jobs[0].model.first.weight]
    state["row_var"] = torch.ones(20, 1)
    jobs[0].save(tmp_path)
    assert refusal(lambda: jobs[1].load(tmp_path)) == (
        "StateError",
        "row_var of parameter 'first.weight' must have the parameter's shape, or be one number, to be loaded "
        "on another number of shards, got shape (20, 1)",
    )
