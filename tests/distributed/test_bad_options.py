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
from tests.distributed.ranks import Ranks
from tests.distributed.training import closing, ddp, loss_of, make_net, refusal

TOPK = regtopk.TopK(density=0.1)

# What attach refuses on every rank: its options, and the error.
OPTIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "algorithm": (
        {"algorithm": "topk"},
        "ArgumentError",
        "algorithm must be an Algorithm such as RegTopK(density=0.001), got 'topk'",
    ),
    "oracle": (
        {"algorithm": regtopk.GlobalTopK(density=0.1)},
        "OracleError",
        "algorithm 'global-topk' peeks at the sum of all workers' vectors before anything is sent: only a "
        "simulator can answer that (regtopk.simulate.Cluster), a real cluster cannot",
    ),
    "k": (
        {"algorithm": regtopk.TopK(k=10_000)},
        "ArgumentError",
        "k must be at most the number of entries, J = 3363, got 10000",
    ),
    "dense_steps": (
        {"dense_steps": -1},
        "ArgumentError",
        "dense_steps must be an integer of at least 0, got -1",
    ),
    "dense_steps of a kind": (
        {"dense_steps": 2.5},
        "ArgumentError",
        "dense_steps must be an integer of at least 0, got 2.5",
    ),
    "skip": ({"skip": "bias"}, "ArgumentError", "skip must be a callable of (name, parameter), got 'bias'"),
    "grad_scaler": (
        {"grad_scaler": 2.0},
        "ArgumentError",
        "grad_scaler must be a torch.amp.GradScaler, got 2.0",
    ),
    "collective": (
        {"collective": "ring"},
        "ArgumentError",
        "collective must be one of auto, all_gather, split, got 'ring'",
    ),
    "writer": (
        {"writer": "runs/today"},
        "ArgumentError",
        "writer must have a method add_scalar, got 'runs/today'",
    ),
    "handshake_timeout_s": (
        {"handshake_timeout_s": 0},
        "ArgumentError",
        "handshake_timeout_s must be positive and finite, got 0",
    ),
    "index_code": (
        {"index_code": "huffman"},
        "ArgumentError",
        "index_code must be one of elias-fano, rice, raw32, got 'huffman'",
    ),
    "weights": (
        {"weight": [0.9, 0.9]},
        "ArgumentError",
        "weights must sum to 1 within 1e-6, got a sum of 1.8",
    ),
    "weight of one": (
        {"weight": [0.5, None]},
        "ArgumentError",
        "weight must be given on all ranks or on none, got [0.5, None]",
    ),
    "weight of a kind": (
        {"weight": [0.5, "half"]},
        "ArgumentError",
        "weight must be a number on every rank, got [0.5, 'half']",
    ),
    "negative weight": (
        {"weight": [1.5, -0.5]},
        "ArgumentError",
        "weights must be finite and >= 0, got -0.5 for worker 1",
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options(two_ranks: Ranks, case: str) -> None:
    _, kind, text = OPTIONS[case]
    assert two_ranks.run(attach_refused_then_accepted, case) == [(kind, text)] * 2


def attach_refused_then_accepted(case: str) -> tuple[str, str]:
    options = {"algorithm": TOPK, **OPTIONS[case][0]}
    if "weight" in options:
        options["weight"] = options["weight"][dist.get_rank()]
    model = ddp()
    refused = refusal(lambda: regtopk.attach(model, options.pop("algorithm"), **options))
    assert_still_attaches(model)
    return refused


def assert_still_attaches(model: DistributedDataParallel) -> None:
    """A refused attach has left the model as it was."""
    with closing(regtopk.attach(model, TOPK)) as exchange:
        loss_of(model, 0).backward()
        assert exchange.num_steps == 1


@pytest.mark.parametrize(
    ("option", "question"),
    [("wieght", " (did you mean 'weight'?)"), ("quorum", "")],
)
def test_an_option_that_does_not_exist(option: str, question: str) -> None:
    """The error names the nearest option, and none if none is near."""
    net, options = make_net(), {option: 1.0}
    with pytest.raises(TypeError) as refused:
        regtopk.attach(net, TOPK, **options)  # type: ignore[arg-type]
    assert str(refused.value) == f"attach() got an unexpected option {option!r}{question}"
    with pytest.raises(TypeError) as refused:
        regtopk.SparseHookState(net, TOPK, **options)
    assert str(refused.value) == f"SparseHookState() got an unexpected option {option!r}{question}"
    with pytest.raises(TypeError) as refused:
        regtopk.Exchange(net, TOPK, **options)  # type: ignore[arg-type]
    assert str(refused.value) == f"Exchange() got an unexpected option {option!r}{question}"


def test_options_have_the_same_defaults_everywhere() -> None:
    options = {field.name: field.default for field in fields(Options)}
    assert keywords(regtopk.attach) == options | {"replicate_group": None}
    assert keywords(regtopk.Exchange) == options | {"process_group": None}


def keywords(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


# Ranks that differ: what rank 1 does otherwise, and how all name it.
DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "algorithm": (
        {"algorithm": regtopk.RegTopK(density=0.1)},
        "all ranks must have the same algorithm, got 'topk' on rank 0, 'regtopk' on rank 1",
    ),
    "density": (
        {"algorithm": regtopk.TopK(density=0.2)},
        "all ranks must have the same topk density, got 0.1 on rank 0, 0.2 on rank 1",
    ),
    "schedule": (
        {"algorithm": regtopk.TopK(density=regtopk.WarmUp(density=0.1, num_steps=5))},
        "all ranks must have the same topk density, got 0.1 on rank 0, "
        "'WarmUp(density=0.1, num_steps=5, start=0.25, num_stages=4)' on rank 1",
    ),
    "value_code": (
        {"algorithm": regtopk.TopK(density=0.1, value_code="4bit")},
        "all ranks must have the same topk value_code, got 'float32' on rank 0, '4bit' on rank 1",
    ),
    "index_code": (
        {"index_code": "rice"},
        "all ranks must have the same index_code, got 'elias-fano' on rank 0, 'rice' on rank 1",
    ),
    "collective": (
        {"collective": "split"},
        "all ranks must have the same collective, got 'auto' on rank 0, 'split' on rank 1",
    ),
    "deterministic": (
        {"deterministic": False},
        "all ranks must have the same deterministic, got True on rank 0, False on rank 1",
    ),
    "dense_steps": (
        {"dense_steps": 3},
        "all ranks must have the same dense_steps, got 0 on rank 0, 3 on rank 1",
    ),
    "skip": (
        {"skip": lambda name, p: name == "last.bias"},
        "all ranks must have the same skip, got [] on rank 0, ['last.bias'] on rank 1",
    ),
    "grad_scaler": (
        {"grad_scaler": torch.amp.GradScaler("cpu")},
        "all ranks must have the same grad_scaler, got False on rank 0, True on rank 1",
    ),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_ranks_that_differ(two_ranks: Ranks, case: str) -> None:
    expected = "ClusterError", DIFFERENCES[case][1]
    assert two_ranks.run(attach_with_a_difference, case) == [expected] * 2


def attach_with_a_difference(case: str) -> tuple[str, str]:
    options: dict[str, Any] = {"algorithm": TOPK}
    if dist.get_rank() == 1:
        options |= DIFFERENCES[case][0]
    model = ddp()
    refused = refusal(lambda: regtopk.attach(model, options.pop("algorithm"), **options))
    assert_still_attaches(model)
    return refused


def test_versions_that_differ(two_ranks: Ranks) -> None:
    versions = f"'{regtopk.__version__}' on rank 0, 'other' on rank 1"
    expected = f"all ranks must have the same regtopk version, got {versions}"
    assert two_ranks.run(attach_with_another_version) == [("ClusterError", expected)] * 2


def attach_with_another_version() -> tuple[str, str]:
    version = "other" if dist.get_rank() == 1 else regtopk.__version__
    with patch.object(handshake, "__version__", version):
        return refusal(lambda: regtopk.Exchange(make_net(), TOPK))
