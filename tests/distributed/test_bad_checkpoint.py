"""Saved states that do not fit, or are damaged: refused as a whole, and the exchange is as it was."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regtopk
from regtopk.algorithms import SIDCo
from regtopk.errors import StateError
from tests.distributed.ranks import on_ranks
from tests.distributed.training import listening, make_net, refusal, same

REGTOPK = regtopk.RegTopK(density=0.1)
Damage = Callable[[dict[str, Any], dict[str, Any]], Any]  # of the state dict and the worker in it


def saved_by(change: Callable[[Any], None] = lambda net: None, **options: Any) -> Damage:
    """What another model has saved, in the place of it."""

    def replace(saved: dict[str, Any], worker: dict[str, Any]) -> None:
        net = make_net()
        change(net)
        saved.clear()
        saved.update(regtopk.attach(net, REGTOPK, **options).state_dict())

    return replace


def put(**values: Any) -> Damage:
    return lambda saved, worker: saved.update(values)


def put_in_worker(**values: Any) -> Damage:
    return lambda saved, worker: worker.update(values)


def residual_of(values: Tensor) -> Damage:
    return lambda saved, worker: worker["entries"]["last.bias"].update(residual=values)


def selection(indices: list[float], own: list[float], dtype: torch.dtype = torch.int64) -> Damage:
    at = torch.tensor(indices, dtype=dtype)
    return put_in_worker(groups=({"indices": at, "own": torch.tensor(own), "aggregate": torch.ones(2)},))


PARAMETERS = "parameters of the saved state must be this model's: "
KEYS = ["algorithm", "format", "groups", "num_steps", "parameters", "skip", "weights", "workers"]
RESIDUAL = "residual of parameter 'last.bias' of rank 0 must be"
OTHERS = "to be loaded on rank 0 of 1 with these weights: gather it, or merge the rank files "
OTHERS += "(regtopk.merge_state_dicts)"
OF_SAVED = "must be that of the saved state"
MALFORMED = "the saved state is malformed: "
STEPS = f"{MALFORMED}ArgumentError: num_steps must be an integer in 0..2147483647, got "
WEIGHTS = f"{MALFORMED}ArgumentError: weights must"
COUNTER = f"{MALFORMED}ArgumentError: sent_bytes must be finite and >= 0, got "
FIRST = "first_step must be in [0, 5], got 6"
GROUPS = "groups of the saved state must hold all 8 parameters once, got "
BUCKET = "of bucket 0 of rank 0 must"
ASCENDING = f"indices {BUCKET} be ascending, distinct and in 0..3362, got "
NOT_FINITE = "finite in torch.float32, got a NaN or inf"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "another layer": (
        saved_by(lambda net: setattr(net, "middle", nn.Linear(40, 21))),
        f"{PARAMETERS}('middle.weight', (20, 40)), got ('middle.weight', (21, 40))",
    ),
    "a layer less": (
        saved_by(lambda net: delattr(net, "last")),
        f"{PARAMETERS}('last.weight', (3, 20)), got None",
    ),
    "a layer more": (
        saved_by(lambda net: setattr(net, "x", nn.Linear(2, 1))),
        f"{PARAMETERS}None, got ('x.weight', (1, 2))",
    ),
    "another skip": (
        saved_by(skip=lambda name, p: name == "last.bias"),
        f"skip {OF_SAVED}, ['last.bias'], got []",
    ),
    "another algorithm": (put(algorithm="topk"), f"algorithm {OF_SAVED}, 'topk', got 'regtopk'"),
    "other ranks": (put(weights=[0.7, 0.3]), f"the saved state of 2 ranks must hold rank(s) [1] {OTHERS}"),
    "another rank's": (put(workers={"1": {}}), f"the saved state of 1 ranks must hold rank(s) [0] {OTHERS}"),
    "ranks lost": (put(lost=[5]), "lost of the saved state must be some of its 1 ranks, got [5]"),
    "another format": (put(format=99), "format of the saved state must be 1, got 99"),
    "other keys": (
        put(state=1),
        f"a saved exchange must hold {KEYS}, got {sorted([*KEYS, 'options', 'state'])}",
    ),
    "other groups": (put(groups=[["last.bias"]]), f"{GROUPS}1 groups of 1 names"),
    "an empty group": (lambda saved, worker: saved["groups"].append([]), f"{GROUPS}2 groups of 8 names"),
    "a field missing": (
        lambda saved, worker: worker["entries"]["last.bias"].clear(),
        "state of parameter 'last.bias' of rank 0 must hold {'residual': (3,)}, got {}",
    ),
    "a field of a group missing": (
        lambda saved, worker: worker["groups"][0].pop("own"),
        f"state {BUCKET} hold {{'indices': (336,), 'own': (336,), 'aggregate': (336,)}}, got "
        "{'indices': (336,), 'aggregate': (336,)}",
    ),
    "a negative step": (put(num_steps=-1), f"{STEPS}-1"),
    "half a step": (put(num_steps=3.5), f"{STEPS}3.5"),
    "a step too far": (put(num_steps=2**40), f"{STEPS}1099511627776"),
    "NaN": (residual_of(torch.tensor([0, math.nan, 0])), f"{RESIDUAL} {NOT_FINITE}"),
    "inf": (residual_of(torch.tensor([0, math.inf, 0])), f"{RESIDUAL} {NOT_FINITE}"),
    "too large": (residual_of(torch.full((3,), 1e300, dtype=torch.float64)), f"{RESIDUAL} {NOT_FINITE}"),
    "complex": (residual_of(torch.zeros(3) + 0j), f"{RESIDUAL} of torch.float32, got torch.complex64"),
    "a NaN weight": (put(weights=[math.nan]), f"{WEIGHTS} be finite and >= 0, got nan for worker 0"),
    "a weight of two": (put(weights=[2.0]), f"{WEIGHTS} sum to 1 within 1e-6, got a sum of 2.0"),
    "no weights": (put(weights=None), f"{MALFORMED}TypeError: "),
    "workers of a kind": (put(workers=3), f"{MALFORMED}TypeError: "),
    "parameters of a kind": (put(parameters=[3]), f"{MALFORMED}TypeError: "),
    "no total": (put_in_worker(total=None), f"{MALFORMED}TypeError: "),
    "a counter of a kind": (put_in_worker(total={"sent_bytes": "many"}), f"{COUNTER}'many'"),
    "a NaN counter": (put_in_worker(total={"sent_bytes": math.nan}), f"{COUNTER}nan"),
    "a later first step": (put_in_worker(first_step=6), f"{MALFORMED}ArgumentError: {FIRST}"),
    "a report of three": (put_in_worker(report=[1.0, 2.0, 3.0]), f"{MALFORMED}TypeError: "),
    "no entries": (put_in_worker(entries=None), f"{MALFORMED}AttributeError: "),
    "no buckets": (put_in_worker(groups=()), f"{MALFORMED}IndexError: "),
    "indices beyond the model": (selection([3, 3363], [1.0, 1.0]), f"{ASCENDING}[3, 3363]"),
    "negative indices": (selection([-1, 3], [1.0, 1.0]), f"{ASCENDING}[-1, 3]"),
    "an index twice": (selection([3, 3], [1.0, 1.0]), f"{ASCENDING}[3, 3]"),
    "values missing": (
        selection([3, 4], [1.0]),
        f"state {BUCKET} hold {{'indices': (2,), 'own': (2,), 'aggregate': (2,)}}, got "
        "{'indices': (2,), 'own': (1,), 'aggregate': (2,)}",
    ),
    "indices of a kind": (
        selection([3, 4], [1.0, 1.0], torch.float32),
        f"indices {BUCKET} be of torch.int64, got torch.float32",
    ),
    "a selection of inf": (selection([3, 4], [1.0, math.inf]), f"own {BUCKET} be {NOT_FINITE}"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_refused_as_a_whole(case: str) -> None:
    damage, text = DAMAGES[case]
    exchange = regtopk.attach(make_net(), REGTOPK)
    exchange.report(loss=1.0, time_s=2.0)
    before, saved = exchange.state_dict(), exchange.state_dict()
    saved["num_steps"] = 5
    damage(saved, saved["workers"]["0"])
    kind, said = refusal(lambda: exchange.load_state_dict(saved))
    assert kind == "StateError"
    assert said == text or (text.endswith("Error: ") and said.startswith(text))  # then in Python's words
    assert same(exchange.state_dict(), before)


def test_what_is_no_dict() -> None:
    with pytest.raises(StateError, match=r"^a saved exchange must hold \['algorithm', .*, got list$"):
        regtopk.attach(make_net(), REGTOPK).load_state_dict([1])  # type: ignore[arg-type]


def test_fields_of_a_fixed_size_keep_it() -> None:
    exchange = regtopk.attach(make_net(), SIDCo(density=0.1))
    saved = exchange.state_dict()
    saved["workers"]["0"]["groups"][0]["num_found"] = torch.zeros(7)
    with pytest.raises(StateError, match=r"^state of bucket 0 of rank 0 must hold .*'num_found': \(7,\)"):
        exchange.load_state_dict(saved)


def test_files_of_older_and_newer_versions_load() -> None:
    """An older one does not say what its counts begin with; a newer one may count more."""
    exchange = regtopk.attach(make_net(), REGTOPK)
    saved = exchange.state_dict()
    worker = saved["workers"]["0"]
    del worker["first_step"]
    worker["total"] |= {"sent_bytes": 70, "num_retries": 3}
    saved["num_steps"] = 5
    residual: Tensor = worker["entries"]["last.bias"]["residual"].fill_(0.5)
    exchange.load_state_dict(saved)
    assert exchange.num_steps == 5 and exchange.total.sent_bytes == 70
    again = exchange.state_dict()["workers"]["0"]["entries"]["last.bias"]["residual"]
    assert torch.equal(again, residual)


def test_rank_files_of_different_moments_are_not_merged() -> None:
    first = regtopk.attach(make_net(), REGTOPK).state_dict()
    differ = r"^rank states must come from one moment of one run: num_steps differs$"
    with pytest.raises(StateError, match=differ):
        regtopk.merge_state_dicts([first, {**first, "num_steps": 1}])
    with pytest.raises(StateError, match=r"^parts must hold at least one rank's state, got none$"):
        regtopk.merge_state_dicts([])
    with pytest.raises(StateError, match=r"^a saved exchange must hold .*, got \[\]$"):
        regtopk.merge_state_dicts([first, {}])


@on_ranks(2)
def test_other_options_are_taken_and_said_once() -> None:
    exchange = regtopk.Exchange(make_net(), regtopk.RegTopK(density=0.2))
    saved = regtopk.Exchange(make_net(), REGTOPK).state_dict()
    with listening() as told:
        exchange.load_state_dict(saved)
    assert len(told) == (exchange.rank == 0)
    for line in told:
        assert line.startswith("goes on with other options: {'density': 0.2") and "'density': 0.1" in line
