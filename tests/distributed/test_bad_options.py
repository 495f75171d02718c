"""Bad options: every rank gets an error that says what is wrong, and the model is as it was."""

from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import regtopk
from regtopk.distributed.options import Options
from regtopk.distributed.steps import handshake
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.training import closing, ddp, loss_of, make_net, refusal

TOPK = regtopk.TopK(density=0.1)
WEIGHT = "weight must be a number >= 0 on every rank and positive on one, or None on all, got "

# What attach refuses on every rank: its options, and the error.
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "algorithm": (
        {"algorithm": "topk"},
        "ArgumentError: algorithm must be an Algorithm such as RegTopK(density=0.001), got 'topk'",
    ),
    "oracle": (
        {"algorithm": regtopk.GlobalTopK(density=0.1)},
        "OracleError: algorithm peeks at the sum of all workers' vectors before anything is sent: ",
    ),
    "k": (
        {"algorithm": regtopk.TopK(k=10_000)},
        "ArgumentError: k must be at most the number of entries, J = 3363, got 10000",
    ),
    "dense_steps": (
        {"dense_steps": 2.5},
        "ArgumentError: dense_steps must be an integer of at least 0, got 2.5",
    ),
    "skip": (
        {"skip": "bias"},
        "ArgumentError: skip must be a callable of (name, parameter), got 'bias'",
    ),
    "grad_scaler": (
        {"grad_scaler": 2.0},
        "ArgumentError: grad_scaler must be a torch.amp.GradScaler, got 2.0",
    ),
    "collective": (
        {"collective": "ring"},
        "ArgumentError: collective must be one of auto, all_gather, split, got 'ring'",
    ),
    "writer": (
        {"writer": "runs/today"},
        "ArgumentError: writer must have a method add_scalar, got 'runs/today'",
    ),
    "handshake_timeout_s": (
        {"handshake_timeout_s": 0},
        "ArgumentError: handshake_timeout_s must be positive and finite, got 0",
    ),
    "index_code": (
        {"index_code": "huffman"},
        "ArgumentError: index_code must be one of elias-fano, rice, raw32, got 'huffman'",
    ),
    "process_group": (
        {"process_group": "all"},
        "ArgumentError: process_group must be None for a model in DistributedDataParallel, which has its "
        "own, got 'all'",
    ),
    "weight of one": ({"weight": [0.5, None]}, f"ArgumentError: {WEIGHT}0.5 on rank 0, None on rank 1"),
    "weight of a kind": ({"weight": [1, "one"]}, f"ArgumentError: {WEIGHT}1 on rank 0, 'one' on rank 1"),
    "negative weight": ({"weight": [1.5, -0.5]}, f"ArgumentError: {WEIGHT}1.5 on rank 0, -0.5 on rank 1"),
    "no weight": ({"weight": [0, 0.0]}, f"ArgumentError: {WEIGHT}0 on rank 0, 0.0 on rank 1"),
}


@pytest.mark.parametrize("case", OPTIONS)
@on_ranks(2)
def test_options(case: str) -> None:
    options = {"algorithm": TOPK, **OPTIONS[case][0]}
    if "weight" in options:
        options["weight"] = options["weight"][dist.get_rank()]
    found = attach_in_vain(options)
    assert found.startswith(OPTIONS[case][1])


def attach_in_vain(options: dict[str, Any]) -> str:
    """The error; the model is as it was."""
    model = ddp()
    refused = refusal(lambda: regtopk.attach(model, options.pop("algorithm"), **options))
    with closing(regtopk.attach(model, TOPK)) as exchange:
        loss_of(model, 0).backward()
        assert exchange.num_steps == 1
    return ": ".join(refused)


def test_weights_are_shares_of_their_sum(two_ranks: Ranks) -> None:
    for given, shares in (
        ((3, 1), [0.75, 0.25]),
        ((0, 7.5), [0.0, 1.0]),
        ((0.1, 0.9000001), [0.1, 0.9000001]),
    ):
        assert two_ranks.run(weights_of, given) == [shares] * 2


def weights_of(given: tuple[float, float]) -> list[float]:
    return regtopk.Exchange(make_net(), TOPK, weight=given[dist.get_rank()]).weights


@pytest.mark.parametrize(("option", "hint"), [("wieght", " (did you mean 'weight'?)"), ("quorum", "")])
@pytest.mark.parametrize("call", [regtopk.attach, regtopk.SparseHookState, regtopk.Exchange])
def test_an_option_that_does_not_exist(call: Callable[..., Any], option: str, hint: str) -> None:
    """The error names the nearest option, and none if none is near."""
    with pytest.raises(TypeError) as refused:
        call(make_net(), TOPK, **{option: 1.0})
    assert str(refused.value) == f"{call.__name__}() got an unexpected option {option!r}{hint}"


def wrong_calls(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Never called: mypy refuses each line."""
    regtopk.attach(model, TOPK, wieght=0.5)  # type: ignore[call-arg]
    regtopk.attach(model, TOPK, weight="half")  # type: ignore[arg-type]
    regtopk.SparseHookState(model, TOPK, collective="ring")  # type: ignore[arg-type]
    regtopk.Exchange(model, TOPK, dense_steps=None)  # type: ignore[arg-type]
    regtopk.UpdateExchange(model, optimizer, TOPK, grad_scaler=None)  # type: ignore[call-arg]


def test_options_have_one_list_and_one_set_of_defaults() -> None:
    shared = set(regtopk.ExchangeOptions.__annotations__)
    assert {field.name for field in fields(Options)} == shared | {"grad_scaler"}
    own = {
        name
        for call in (regtopk.attach, regtopk.SparseHookState, regtopk.Exchange, regtopk.UpdateExchange)
        for name in signature(call).parameters
    }
    assert own & shared == set()  # no call states one again


# Ranks that differ: what rank 1 does otherwise, and how all name it.
DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "algorithm": ({"algorithm": regtopk.RegTopK(density=0.1)}, "'topk' on rank 0, 'regtopk' on rank 1"),
    "topk density": (
        {"algorithm": regtopk.TopK(density=regtopk.WarmUp(density=0.1, num_steps=5))},
        "0.1 on rank 0, 'WarmUp(density=0.1, num_steps=5, start=0.25, num_stages=4)' on rank 1",
    ),
    "topk value_code": (
        {"algorithm": regtopk.TopK(density=0.1, value_code="4bit")},
        "'float32' on rank 0, '4bit' on rank 1",
    ),
    "index_code": ({"index_code": "rice"}, "'elias-fano' on rank 0, 'rice' on rank 1"),
    "collective": ({"collective": "split"}, "'auto' on rank 0, 'split' on rank 1"),
    "deterministic": ({"deterministic": False}, "True on rank 0, False on rank 1"),
    "dense_steps": ({"dense_steps": 3}, "0 on rank 0, 3 on rank 1"),
    "skip": ({"skip": lambda name, p: name == "last.bias"}, "[] on rank 0, ['last.bias'] on rank 1"),
    "grad_scaler": ({"grad_scaler": torch.amp.GradScaler("cpu")}, "False on rank 0, True on rank 1"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
@on_ranks(2)
def test_ranks_that_differ(case: str) -> None:
    difference = DIFFERENCES[case][0] if dist.get_rank() == 1 else {}
    expected = f"ClusterError: all ranks must have the same {case}, got {DIFFERENCES[case][1]}"
    assert attach_in_vain({"algorithm": TOPK, **difference}) == expected


def test_versions_that_differ(two_ranks: Ranks) -> None:
    versions = f"'{regtopk.__version__}' on rank 0, 'other' on rank 1"
    expected = f"all ranks must have the same regtopk version, got {versions}"
    assert two_ranks.run(attach_with_another_version) == [("ClusterError", expected)] * 2


def attach_with_another_version() -> tuple[str, str]:
    version = "other" if dist.get_rank() == 1 else regtopk.__version__
    with patch.object(handshake, "__version__", version):
        return refusal(lambda: regtopk.Exchange(make_net(), TOPK))
