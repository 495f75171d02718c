"""Saved states that are damaged: refused as a whole, and the exchange is as it was. No ranks are needed."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regtopk
from regtopk.errors import StateError
from tests.distributed.training import make_net, same

REGTOPK = regtopk.RegTopK(density=0.1)
Damage = Callable[[dict[str, Any], dict[str, Any]], Any]  # of the state dict and the worker in it


def put(key: str, value: Any) -> Damage:
    return lambda saved, worker: saved.__setitem__(key, value)


def put_in_worker(key: str, value: Any) -> Damage:
    return lambda saved, worker: worker.__setitem__(key, value)


def spoil_residual(value: float) -> Damage:
    return lambda saved, worker: worker["entries"]["last.bias"]["residual"].__setitem__(1, value)


def residual_of(values: Tensor) -> Damage:
    return lambda saved, worker: worker["entries"]["last.bias"].__setitem__("residual", values)


def selection(indices: list[float], own: list[float], dtype: torch.dtype = torch.int64) -> Damage:
    fields = {
        "indices": torch.tensor(indices, dtype=dtype),
        "own": torch.tensor(own),
        "aggregate": torch.ones(2),
    }
    return put_in_worker("groups", (fields,))


STEPS = "num_steps of the saved state must be an integer of at least 0 and below 2147483648, got "
ASCENDING = "indices of bucket 0 of rank 0 must be ascending, distinct and in 0..3362, got ["
NOT_FINITE = "must be finite in torch.float32, got a NaN or inf"
MALFORMED = "the saved state is malformed: "
DAMAGES: dict[str, tuple[Damage, str]] = {
    "a negative step": (put("num_steps", -1), STEPS + "-1"),
    "half a step": (put("num_steps", 3.5), STEPS + "3.5"),
    "a step too far": (put("num_steps", 2**40), STEPS + "1099511627776"),
    "NaN": (spoil_residual(math.nan), f"residual of parameter 'last.bias' of rank 0 {NOT_FINITE}"),
    "inf": (spoil_residual(math.inf), f"residual of parameter 'last.bias' of rank 0 {NOT_FINITE}"),
    "too large for float32": (
        residual_of(torch.full((3,), 1e300, dtype=torch.float64)),
        f"residual of parameter 'last.bias' of rank 0 {NOT_FINITE}",
    ),
    "a complex residual": (
        residual_of(torch.zeros(3, dtype=torch.complex64)),
        "residual of parameter 'last.bias' of rank 0 must be of torch.float32, got torch.complex64",
    ),
    "a NaN weight": (
        put("weights", [math.nan]),
        MALFORMED + "ArgumentError: weights must be finite and >= 0, got nan for worker 0",
    ),
    "a weight of two": (
        put("weights", [2.0]),
        MALFORMED + "ArgumentError: weights must sum to 1 within 1e-6, got a sum of 2.0",
    ),
    "no weights": (put("weights", None), MALFORMED + "TypeError: "),
    "workers of a kind": (put("workers", 3), MALFORMED + "TypeError: "),
    "parameters of a kind": (put("parameters", [3]), MALFORMED + "TypeError: "),
    "an empty bucket": (
        lambda saved, worker: saved["groups"].append([]),
        "groups of the saved state must hold each of the 8 parameters once, got 2 groups of 8 names, 8 of ",
    ),
    "no total": (put_in_worker("total", None), MALFORMED + "TypeError: "),
    "a counter of a kind": (
        put_in_worker("total", {"sent_bytes": "many"}),
        "counters of the saved state must be finite numbers >= 0, got 'many'",
    ),
    "a NaN counter": (
        put_in_worker("total", {"sent_bytes": math.nan}),
        "counters of the saved state must be finite numbers >= 0, got nan",
    ),
    "counts from a later step": (
        put_in_worker("first_step", 6),
        "first_step of the saved state must be at most 5, got 6",
    ),
    "a report of three": (put_in_worker("report", [1.0, 2.0, 3.0]), MALFORMED + "TypeError: "),
    "no entries": (put_in_worker("entries", None), MALFORMED + "AttributeError: "),
    "no buckets": (put_in_worker("groups", ()), MALFORMED + "IndexError: "),
    "indices beyond the model": (selection([3, 3363], [1.0, 1.0]), ASCENDING),
    "negative indices": (selection([-1, 3], [1.0, 1.0]), ASCENDING),
    "an index twice": (selection([3, 3], [1.0, 1.0]), ASCENDING),
    "values missing": (
        selection([3, 4], [1.0]),
        "own of bucket 0 of rank 0 must be of shape (2,), got (1,)",
    ),
    "indices of a kind": (
        selection([3, 4], [1.0, 1.0], torch.float32),
        "indices of bucket 0 of rank 0 must be of torch.int64, got torch.float32",
    ),
    "a selection of inf": (selection([3, 4], [1.0, math.inf]), f"own of bucket 0 of rank 0 {NOT_FINITE}"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_refused_as_a_whole(case: str) -> None:
    damage, text = DAMAGES[case]
    exchange = regtopk.attach(make_net(), REGTOPK)
    exchange.report(loss=1.0, time_s=2.0)
    before, saved = exchange.state_dict(), exchange.state_dict()
    saved["num_steps"] = 5
    damage(saved, saved["workers"]["0"])
    with pytest.raises(StateError) as refused:
        exchange.load_state_dict(saved)
    assert str(refused.value).startswith(text)
    assert same(exchange.state_dict(), before)


def test_fields_of_a_fixed_size_keep_it() -> None:
    exchange = regtopk.attach(make_net(), regtopk.algorithms.SIDCo(density=0.1))
    saved = exchange.state_dict()
    saved["workers"]["0"]["groups"][0]["num_found"] = torch.zeros(7)
    with pytest.raises(StateError, match=r"^num_found of bucket 0 of rank 0 must be of shape "):
        exchange.load_state_dict(saved)


def test_numbers_that_are_no_selection_are_finite() -> None:
    exchange = regtopk.attach(make_net(), regtopk.algorithms.FairTopK(density=0.1))
    saved = exchange.state_dict()
    saved["workers"]["0"]["groups"][0]["k"].fill_(math.nan)
    with pytest.raises(StateError, match=f"^k of bucket 0 of rank 0 {NOT_FINITE}"):
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
