"""An exchange of updates saved and resumed: bit for bit at any step, and nothing lost on other ranks."""

import io
from functools import partial, reduce
from itertools import product
from operator import getitem
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import regtopk
from regtopk.distributed.updates.optimizers import check_saved, weighted_mean
from regtopk.errors import StateError
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.test_checkpoint import relative_change, weighted_sum
from tests.distributed.test_updates import nesterov
from tests.distributed.training import algorithm_state, batch, flat_parameters, made, merged, refusal, same

WEIGHTS = {2: [0.7, 0.3], 4: [0.4, 0.3, 0.2, 0.1]}


class Training:
    """A model with batch norm, AdamW by a schedule, and an exchange, as users write them."""

    def __init__(self, weights: list[float] | None = None, **options: Any) -> None:
        torch.manual_seed(dist.get_rank())
        self.net = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)
        weight = None if weights is None else weights[dist.get_rank()]
        algorithm = options.pop("algorithm", regtopk.RegTopK(density=0.1, value_code="4bit"))
        settings = {"every": 4, "outer": nesterov, **options}
        self.exchange = regtopk.UpdateExchange(self.net, self.optimizer, algorithm, weight=weight, **settings)

    def train_until(self, last: int) -> None:
        for step in range(self.exchange.num_steps, last):
            self.optimizer.zero_grad()
            self.net(batch(step)).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()

    def result(self) -> Any:
        """What must be the same with and without an interruption."""
        sent = self.exchange.summary().splitlines()[:2]
        return algorithm_state(self.exchange), self.net.state_dict(), self.optimizer.state_dict(), sent


def through_a_file(saved: Any) -> Any:
    """As torch.load reads what torch.save wrote."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


UNDER_WAY = [{"delay": 3}, {"delay": 2, "fragments": 2}, {"every": 2, "fragments": 2}]


@pytest.mark.parametrize("options", [{}, *UNDER_WAY], ids=str)
@on_ranks(2)
def test_resumed_at_any_step_bit_for_bit(options: dict[str, Any]) -> None:
    """A round's end, steps inside one, or after it while it is under way."""
    saved: list[tuple[tuple[int, int], Any, Any]] = []
    with made(Training, **options) as (straight, exchange):
        for step in range(4, 9):
            straight.train_until(step)
            gathered = [exchange.gather_state_dict(dst=1)]
            dist.broadcast_object_list(gathered, 1)
            mine = exchange.state_dict()
            (own,) = mine["workers"][str(dist.get_rank())]["updates"]
            assert options or bool(own["parameters"]) == (step % 4 != 0)
            states = through_a_file(mine), through_a_file(gathered[0])
            saved.append(((step, exchange.num_rounds), states, straight.scheduler.state_dict()))
        straight.train_until(12)
        expected = straight.result()
    for counts, states, schedule in saved:
        for state in states:
            with made(Training, **options) as (resumed, exchange):
                resumed.train_until(2)  # all of it is replaced
                exchange.load_state_dict(state)
                resumed.scheduler.load_state_dict(schedule)
                assert (exchange.num_steps, exchange.num_rounds) == counts
                resumed.train_until(12)
                assert same(resumed.result(), expected), counts


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4)])
def test_other_ranks_go_on_from_a_rounds_end(two_ranks: Ranks, four_ranks: Ranks, old: int, new: int) -> None:
    ranks = {2: two_ranks, 4: four_ranks}
    before = through_a_file(ranks[old].run(save_some, WEIGHTS[old])[0])
    answers = ranks[new].run(load_some, WEIGHTS[new], before)
    after = regtopk.merge_state_dicts([state for state, _ in answers])
    assert relative_change(weighted_sum(before), weighted_sum(after)) < 1e-6
    assert same(after["updates"], before["updates"])  # theta_start and the outer optimizer's state
    old_states = [before["workers"][str(n)]["updates"][0] for n in range(old)]
    for state, parameters in answers:
        assert torch.equal(parameters, answers[0][1])
        (mine,) = next(iter(state["workers"].values()))["updates"]
        assert mine["num_steps"] == mine["optimizer"]["state"][0]["step"] == 8
        for i, key in product(range(6), ("exp_avg", "exp_avg_sq")):
            states = torch.stack([each["optimizer"]["state"][i][key] for each in old_states]).double()
            assert not torch.equal(states[0], states[1])
            mean = torch.tensordot(torch.tensor(WEIGHTS[old], dtype=torch.float64), states, 1)
            assert torch.allclose(mine["optimizer"]["state"][i][key].double(), mean, rtol=1e-6, atol=0)


def save_some(weights: list[float], num_steps: int = 8, fragments: int = 1) -> Any:
    with made(Training, weights, fragments=fragments) as (training, exchange):
        training.train_until(num_steps)
        return exchange.gather_state_dict()


@pytest.mark.parametrize("fragments", [1, 2])
def test_dense_bytes_on_other_ranks_are_those_of_the_steps_made_there(
    two_ranks: Ranks, four_ranks: Ranks, fragments: int
) -> None:
    """A round that was cut short, or that finish() ends, is no whole one."""
    before = through_a_file(four_ranks.run(save_some, WEIGHTS[4], 6, fragments)[0])
    for total, summary in two_ranks.run(finish_some, WEIGHTS[2], before, fragments):
        assert total.dense_bytes == 5 * 4 * 419  # two ranks send all of it
        assert f"sent      {total.sent_bytes / 5:.3g} B per step" in summary
        assert "dense     1.68 kB per step" in summary


def finish_some(weights: list[float], saved: dict[str, Any], fragments: int) -> tuple[Any, str]:
    with made(Training, weights, fragments=fragments) as (training, exchange):
        exchange.load_state_dict(saved)
        training.train_until(11)
        exchange.finish()
        return exchange.total, exchange.summary()


def load_some(weights: list[float], saved: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    with made(Training, weights) as (training, exchange):
        exchange.load_state_dict(saved)
        state = exchange.state_dict()
        start = torch.cat([t.flatten() for t in saved["updates"]["start"].values()])
        assert torch.equal(flat_parameters(training.net), start)
        training.train_until(12)  # and it trains
        assert exchange.num_rounds == 3
        return state, flat_parameters(training.net)


def put_in(*path: Any, **values: Any) -> Any:
    """Put these in a place of what this rank has saved."""
    return lambda saved, mine: reduce(getitem, path, mine).update(values)


in_group, in_state = partial(put_in, "optimizer", "param_groups", 0), partial(put_in, "optimizer", "state", 0)
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"every": 2}, "every must be that of the saved state, 2, got 4"),
    ({"outer": None}, "class of outer must be that of the saved state, 'None', got 'SGD'"),
    ({"outer": partial(nesterov, lr=0.5)}, "lr of outer must be that of the saved state, 0.5, got 0.7"),
    ({"algorithm": regtopk.TopK(density=0.1)}, "algorithm must be that of the saved state, 'topk'"),
]
NO_UPDATES = "must hold 'updates': this was saved by something else"
OF_SAVED, SIX = "of the saved optimizer must be", "must be [[0, 1, 2, 3, 4, 5]]"
SMALLER = {"1.running_mean": torch.zeros(3)}
MOMENT = "exp_avg of the saved optimizer must have its parameter's shape, ("
MEAN, OWN = "shape of '1.running_mean'", "must be that of the saved state"
DAMAGES: list[tuple[Any, str]] = [
    (
        lambda saved, mine: saved["updates"]["start"]["0.bias"].fill_(torch.nan),
        "start of '0.bias' in the saved state must be finite, got a NaN or inf",
    ),
    (
        lambda saved, mine: saved["updates"]["start"].update({"0.bias": torch.zeros(3)}),
        f"shape of '0.bias' (where the round began) {OWN}, (3,), got (16,)",
    ),
    (in_group(params=[0, 1, 2, 3, 4]), f"parameters of the optimizer's groups {SIX}, got [[0, 1, 2, 3, 4]]"),
    (in_group(params=[1, 0, 2, 3, 4, 5]), f"{SIX}, got [[1, 0, 2, 3, 4, 5]]"),
    (in_group(betas=(0.9, "a")), f"betas {OF_SAVED} like (0.9, 0.999), got"),
    (in_group(maximize=3.5), f"maximize {OF_SAVED} like False, got 3.5"),
    (in_group(lr="a"), f"lr {OF_SAVED} a finite number, got 'a'"),
    (lambda saved, mine: mine["optimizer"].pop("state"), "the saved state is malformed: KeyError: 'state'"),
    (put_in("optimizer", state=[1]), "the saved state is malformed: AttributeError"),
    (lambda saved, mine: mine["optimizer"]["state"].update({70: {}}), "of its parameters, got number 70"),
    (in_state(exp_avg=torch.zeros(3)), MOMENT),
    (in_state(exp_avg=(1, 2)), MOMENT),
    (in_state(step="a"), f"step {OF_SAVED} a finite number, got 'a'"),
    (lambda saved, mine: saved["updates"].pop("every"), "the saved state is malformed: KeyError: 'every'"),
    (lambda saved, mine: saved["updates"].update(inner="SGD"), "saved state, 'SGD', got 'AdamW'"),
    (
        lambda saved, mine: mine["buffers"]["now"].pop("1.running_mean"),
        f"{MEAN} (a buffer) {OWN}, None, got (16,)",
    ),
    (
        put_in("buffers", "now", **SMALLER),
        f"{MEAN} (a buffer) {OWN}, (3,), got (16,)",
    ),
    (
        put_in("buffers", "start", **SMALLER),
        f"{MEAN} (a buffer, where the round began) {OWN}, (3,), got (16,)",
    ),
    (lambda saved, mine: saved.pop("updates"), f"a saved UpdateExchange {NO_UPDATES}"),
    (put_in(parameters=None), "the saved state is malformed: TypeError"),
    (lambda saved, mine: mine.pop("sent"), "the saved state is malformed: TypeError"),
    (put_in(num_steps=-7), "num_steps must be an integer of at least 0, got -7"),
    (put_in(skipped="ab"), "skipped fragments must be that of the saved state, 2"),
    (
        put_in(sent={"0.bias": torch.zeros(3)}),
        f"shape of '0.bias' (what was sent) {OWN}, (3,), got (16,)",
    ),
    (
        lambda saved, mine: saved["updates"]["outer_state"][0].update(state=[1]),
        "the saved state is malformed: AttributeError",
    ),
]


@on_ranks(2)
def test_states_that_do_not_fit() -> None:
    others: list[Any] = []
    for options, _ in OTHERS:
        with made(Training, **{"weights": WEIGHTS[2], **options}) as (other, exchange):
            other.train_until(5)
            others.append(merged(exchange))
    with made(Training, WEIGHTS[2]) as (training, exchange):
        training.train_until(5)
        for damage, _ in DAMAGES:
            saved = exchange.state_dict()
            damage(saved, saved["workers"][str(dist.get_rank())]["updates"][0])
            others.append(saved)
        before = exchange.state_dict(), training.result()
        for other, (_, text) in zip(others, OTHERS + DAMAGES, strict=True):
            kind, told = refusal(partial(exchange.load_state_dict, other))
            assert kind == "StateError" and text in told, (text, told)
        assert same((exchange.state_dict(), training.result()), before)
        one, two = exchange.state_dict(), exchange.state_dict()
        two["updates"]["start"]["0.bias"] += 1
        assert "updates differs" in refusal(lambda: regtopk.merge_state_dicts([one, two]))[1]
        del one["workers"][str(dist.get_rank())]
        assert "must hold rank(s)" in refusal(partial(exchange.load_state_dict, one))[1]


@on_ranks(2)
def test_inside_a_round_without_a_residual() -> None:
    """What was learned since the round began has nowhere to go if ranks or weights change."""
    for algorithm in (regtopk.Dense(), regtopk.EF21(density=0.2, returned=0.2)):
        with made(Training, algorithm=algorithm) as (training, exchange):
            training.train_until(5)
            saved: list[Any] = [exchange.gather_state_dict()]
        dist.broadcast_object_list(saved)
        with made(Training, WEIGHTS[2], algorithm=algorithm) as (_, other):
            refused = refusal(partial(other.load_state_dict, saved[0]))
        assert refused == (
            "StateError",
            "the saved state must be from a round's end, or after finish(): '0.weight' has no residual to "
            "take up what was learned since, and the ranks or their weights have changed",
        )


WITH: dict[str, Any] = {"Adam": {"amsgrad": True}, "RMSprop": {"momentum": 0.9, "centered": True}}
OTHER = ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "LBFGS", "Muon", "NAdam", "Rprop", "SGD"]


@pytest.mark.parametrize("kind", [*WITH, *OTHER])
def test_a_saved_optimizer_must_hold_what_a_step_looks_up(kind: str) -> None:
    p = nn.Parameter(torch.ones(3, 2))
    p.grad = torch.ones(3, 2)
    optimizer = getattr(torch.optim, kind)([p], **WITH.get(kind, {}))
    optimizer.step(lambda: 1.0)
    saved = optimizer.state_dict()
    check_saved([optimizer], saved)  # which knows nothing of LBFGS, and SGD keeps nothing here
    for field, value in saved["state"][0].items() if kind not in ("LBFGS", "SGD") else ():
        others = {key: other for key, other in saved["state"][0].items() if key != field}
        with pytest.raises(StateError, match=f"must hold '{field}' of parameter 0, got "):
            check_saved([optimizer], {**saved, "state": {0: others or {"x": 1}}})
        for bad in (None, value.new_zeros(2, 3)):
            with pytest.raises(StateError, match=f"{field} of the saved optimizer must "):
                check_saved([optimizer], {**saved, "state": {0: {**others, field: bad}}})
    if kind == "Adagrad":  # the only one whose step does not make a missing state
        with pytest.raises(StateError, match="must hold 'step' of parameter 0"):
            check_saved([optimizer], {**saved, "state": {}})


def test_the_mean_of_optimizer_states() -> None:
    def state(m: float, **extra: Any) -> dict[int, Any]:
        moments = {"m": torch.tensor([m, 1.0]), "step": torch.tensor(5.0), "k": 3, "n": torch.tensor(2)}
        return {0: {**moments, **extra}}

    states = [state(1.0), state(3.0, late=torch.tensor(8.0)), state(100.0)]
    states[1][1] = {"m": torch.tensor([7.0], dtype=torch.bfloat16)}
    expected = state(2.0, late=torch.tensor(8.0)) | {1: states[1][1]}
    assert same(weighted_mean(states, [0.5, 0.5, 0.0]), expected)
    assert same(weighted_mean(states, [0.0, 0.0, 1.0])[1], states[1][1])
