"""Bad options and missing ranks: every rank is told what is wrong, and nothing has changed."""

from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import regtopk
from regtopk.distributed.options import Options
from regtopk.distributed.steps import step
from regtopk.errors import ArgumentError
from tests.distributed.ranks import on_ranks
from tests.distributed.training import closing, ddp, loss_of, make_net, refusal

TOPK = regtopk.TopK(density=0.1)
CALLS: list[Callable[..., Any]]
CALLS = [regtopk.attach, regtopk.SparseHookState, regtopk.Exchange, regtopk.UpdateExchange]
WEIGHT = "weight must be a number >= 0 on every rank and positive on one, or None on all, got "
OWN_GROUP = "process_group must be None for a model in DistributedDataParallel, which has its own, got 'all'"
RECIPE, HINT = regtopk.recipes.transformer(2), ": give UpdateExchange recipe.algorithm, **recipe.options"
NOT_ONE = "algorithm must be an Algorithm such as RegTopK(density=0.001), got 'topk'"

# What attach refuses on every rank with an ArgumentError: an option, what is given, and the error.
OPTIONS: list[tuple[str, Any, str]] = [
    ("algorithm", "topk", NOT_ONE),
    ("algorithm", RECIPE, f"{NOT_ONE[:-6]}{RECIPE!r}{HINT}"),
    ("algorithm", regtopk.TopK(k=10_000), "k must be at most J = 3363, got 10000"),
    ("dense_steps", 2.5, "dense_steps must be an integer of at least 0, got 2.5"),
    ("skip", "bias", "skip must be a callable of (name, parameter), got 'bias'"),
    ("grad_scaler", 2.0, "grad_scaler must be a torch.amp.GradScaler, got 2.0"),
    ("collective", "ring", "collective must be one of auto, all_gather, split, got 'ring'"),
    ("link", 1e8, "link must be a regtopk.Link such as Link(bandwidth=1e8), got 100000000.0"),
    ("writer", "runs/today", "writer must have a method add_scalar, got 'runs/today'"),
    ("handshake_timeout_s", 0, "handshake_timeout_s must be positive and finite, got 0"),
    ("index_code", "huffman", "index_code must be one of elias-fano, rice, raw32, got 'huffman'"),
    ("residual_dtype", "int8", "residual_dtype must be one of float32, bfloat16, got 'int8'"),
    ("process_group", "all", OWN_GROUP),
    ("weight", [0.5, None], f"{WEIGHT}0.5 on rank 0, None on rank 1"),
    ("weight", [1, "one"], f"{WEIGHT}1 on rank 0, 'one' on rank 1"),
    ("weight", [1.5, -0.5], f"{WEIGHT}1.5 on rank 0, -0.5 on rank 1"),
    ("weight", [0, 0.0], f"{WEIGHT}0 on rank 0, 0.0 on rank 1"),
]


@pytest.mark.parametrize("case", range(len(OPTIONS)), ids=lambda case: OPTIONS[case][0])
@on_ranks(2)
def test_options(case: int) -> None:
    option, given, text = OPTIONS[case]
    value = given[dist.get_rank()] if option == "weight" else given
    assert attach_in_vain({option: value}) == ("ArgumentError", text)


@on_ranks(2)
def test_options_that_do_not_go_together() -> None:
    found = attach_in_vain({"algorithm": regtopk.Dense(), "residual_dtype": "bfloat16"})
    text = "residual_dtype must be 'float32' for 'dense', which keeps no residual, got 'bfloat16'"
    assert found == ("ArgumentError", text)
    net: Any = make_net()
    optimizer, update_exchange = torch.optim.SGD(net.parameters()), cast(Any, regtopk.UpdateExchange)
    refused = refusal(lambda: update_exchange(net, optimizer, TOPK, anchors="disk"))
    assert refused == ("ArgumentError", "anchors must be one of device, cpu, got 'disk'")


@on_ranks(2)
def test_an_oracle() -> None:
    kind, text = attach_in_vain({"algorithm": regtopk.GlobalTopK(density=0.1)})
    assert kind == "OracleError" and text.startswith(
        "algorithm 'global-topk' peeks at the sum of all workers' vectors"
    )


def attach_in_vain(options: dict[str, Any]) -> tuple[str, str]:
    """The error; the model is as it was."""
    model, given = ddp(), {"algorithm": TOPK, **options}
    refused = refusal(lambda: regtopk.attach(model, **given))
    with closing(regtopk.attach(model, TOPK)) as exchange:
        loss_of(model, 0).backward()
        assert exchange.num_steps == 1
    return refused


@on_ranks(2)
def test_weights_are_shares_of_their_sum() -> None:
    shares = {(3, 1): [0.75, 0.25], (0, 7.5): [0.0, 1.0], (0.1, 0.9000001): [0.1, 0.9000001]}
    for given, expected in shares.items():
        assert regtopk.Exchange(make_net(), TOPK, weight=given[dist.get_rank()]).weights == expected


@pytest.mark.parametrize(("option", "hint"), [("wieght", " (did you mean 'weight'?)"), ("quorum", "")])
@pytest.mark.parametrize("call", CALLS)
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
    regtopk.UpdateExchange(model, optimizer, TOPK, grad_scaler=2.0)  # type: ignore[arg-type]


def test_options_have_one_list_and_one_set_of_defaults() -> None:
    shared = set(regtopk.ExchangeOptions.__annotations__)
    assert {field.name for field in fields(Options)} == shared | {"grad_scaler"}
    assert {name for call in CALLS for name in signature(call).parameters} & shared == set()


# Ranks that differ: what rank 1 does otherwise, and how all name it.
WARM_UP = regtopk.WarmUp(density=0.1, num_steps=5)
DIFFERENCES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "algorithm": ({"algorithm": regtopk.RegTopK(density=0.1)}, "topk", "regtopk"),
    "topk density": ({"algorithm": regtopk.TopK(density=WARM_UP)}, 0.1, str(WARM_UP)),
    "topk value_code": ({"algorithm": regtopk.TopK(density=0.1, value_code="4bit")}, "float32", "4bit"),
    "index_code": ({"index_code": "rice"}, "elias-fano", "rice"),
    "collective": ({"collective": "split"}, "auto", "split"),
    "deterministic": ({"deterministic": False}, True, False),
    "dense_steps": ({"dense_steps": 3}, 0, 3),
    "skip": ({"skip": lambda name, p: name == "last.bias"}, [], ["last.bias"]),
    "grad_scaler": ({"grad_scaler": torch.amp.GradScaler("cpu")}, False, True),
    "regtopk version": ({}, regtopk.__version__, "other"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
@on_ranks(2)
def test_ranks_that_differ(case: str) -> None:
    options, *values = DIFFERENCES[case]
    version = values[dist.get_rank()] if case == "regtopk version" else regtopk.__version__
    model = ddp()
    with patch.object(step, "__version__", version):
        given = {"algorithm": TOPK, **(options if dist.get_rank() == 1 else {})}
        refused = refusal(lambda: regtopk.attach(model, **given))
    text = f"all ranks must have the same {case}, got {values[0]!r} on rank 0, {values[1]!r} on rank 1"
    assert refused == ("ClusterError", text)


# A call that some ranks forget: the others say so after a short wait, and who it is.


def missing(call: str, who: str, option: str = "handshake_timeout_s") -> tuple[str, str]:
    advice = f"if all do, and one is only slow, give them a longer {option}"
    return "ClusterError", f"did every rank call {call}? {who} not after 0.5 s; {advice}"


@on_ranks(2)
def test_attach_on_one_rank() -> None:
    model = ddp()
    if dist.get_rank() == 0:
        refused = refusal(lambda: regtopk.attach(model, TOPK, handshake_timeout_s=0.5))
        assert refused == missing("regtopk.attach", "rank 1 has")
    dist.barrier()
    with closing(regtopk.attach(model, TOPK)) as exchange:  # once all call it, it works
        loss_of(model, 0).backward()
        assert exchange.num_steps == 1


@on_ranks(4)
def test_an_exchange_on_one_rank_of_a_subgroup() -> None:
    group = dist.new_group([0, 1, 3])
    if dist.get_rank() == 0:
        options: dict[str, Any] = {"process_group": group, "handshake_timeout_s": 0.5}
        refused = refusal(lambda: regtopk.Exchange(make_net(), TOPK, **options))
        assert refused == missing("regtopk.Exchange", "ranks 1, 3 have")


@on_ranks(2)
def test_a_checkpoint_gathered_on_one_rank() -> None:
    """The classic mistake: only rank 0 saves. It is named, and nothing is lost."""
    exchange = regtopk.Exchange(make_net(), TOPK)
    if dist.get_rank() == 0:
        refused = refusal(lambda: exchange.gather_state_dict(timeout_s=0.5))
        assert refused == missing("gather_state_dict", "rank 1 has", "timeout_s")
    dist.barrier()
    state = exchange.gather_state_dict()
    assert (None if state is None else sorted(state["workers"])) == [["0", "1"], None][dist.get_rank()]
    with pytest.raises(ArgumentError, match=r"^timeout_s must be positive and finite, got 0$"):
        exchange.gather_state_dict(timeout_s=0)
