"""What UpdateExchange refuses, before anything has changed; and ranks that step unequally often."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import regtopk
from tests.distributed.ranks import Ranks
from tests.distributed.test_updates import nesterov, sgd, train
from tests.distributed.training import closing, ddp, flat_parameters, make_net, refusal, same

TOPK = regtopk.TopK(density=0.1)


def sharded() -> nn.Module:
    return FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))


def only_first(net: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.first.parameters(), lr=0.1)


def with_another(net: nn.Module) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": net.parameters()}, {"params": [nn.Parameter(torch.ones(3))]}]
    return torch.optim.SGD(groups, lr=0.1)


PLAIN: dict[str, Any] = {"net": make_net, "optimizer": sgd, "algorithm": TOPK}
RULE_OF_OUTER = (
    "outer must be None or a function of a list of parameters that returns a torch optimizer, got "
)
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "every 0": ({"every": 0}, "ArgumentError", "every must be an integer of at least 1, got 0"),
    "every half": ({"every": 1.5}, "ArgumentError", "every must be an integer of at least 1, got 1.5"),
    "every True": ({"every": True}, "ArgumentError", "every must be an integer of at least 1, got True"),
    "dense_steps": (
        {"dense_steps": -1, "every": 2},
        "ArgumentError",
        "dense_steps must be an integer of at least 0, got -1",
    ),
    "buffers": (
        {"buffers": "means"},
        "ArgumentError",
        "buffers must be one of mean, rank0, local, got 'means' (did you mean 'mean'?)",
    ),
    "no optimizer": (
        {"optimizer": lambda net: "adam"},
        "ArgumentError",
        "optimizer must be a torch.optim.Optimizer, got str",
    ),
    "optimizer of less": (
        {"optimizer": only_first},
        "ArgumentError",
        "optimizer must hold every parameter that is exchanged, got one without 'extra.weight': was it "
        "made from another model?",
    ),
    "optimizer of another model": (
        {"optimizer": lambda net: sgd(make_net())},
        "ArgumentError",
        "optimizer must hold every parameter that is exchanged, got one without 'first.weight': was it "
        "made from another model?",
    ),
    "optimizer of more": (
        {"optimizer": with_another},
        "ArgumentError",
        "optimizer must hold no parameter that is not exchanged, got one of shape (3,) in its group 1",
    ),
    "outer is an optimizer": ({"outer": sgd(make_net())}, "ArgumentError", f"{RULE_OF_OUTER}SGD"),
    "outer returns nothing": (
        {"outer": lambda p: None},
        "ArgumentError",
        "outer must return a torch.optim.Optimizer, got NoneType",
    ),
    "outer of others": (
        {"outer": lambda p: nesterov(p[1:])},
        "ArgumentError",
        "outer must return an optimizer of the parameters that it is given, got others",
    ),
    "DDP": (
        {"net": ddp},
        "ClusterError",
        "parameters must be a plain model, got a DistributedDataParallel, which averages gradients in every "
        "backward: hand over the module inside it and train that, or exchange gradients by regtopk.attach",
    ),
    "compiled DDP": (
        {"net": lambda: torch.compile(ddp(), backend="eager")},
        "ClusterError",
        "parameters must be a plain model, got a DistributedDataParallel, which averages gradients in every "
        "backward: hand over the module inside it and train that, or exchange gradients by regtopk.attach",
    ),
    "FSDP": (
        {"net": sharded},
        "ClusterError",
        "parameters must be a plain model or one of fully_shard (FSDP2), got FullyShardedDataParallel",
    ),
    "algorithm": (
        {"algorithm": "topk"},
        "ArgumentError",
        "algorithm must be an Algorithm such as RegTopK(density=0.001), got 'topk'",
    ),
    "ranks differ in every": (
        {"every": lambda: 1 + dist.get_rank()},
        "ClusterError",
        "all ranks must have the same every, got 1 on rank 0, 2 on rank 1",
    ),
    "ranks differ in buffers": (
        {"net": lambda: with_buffer(nn.Linear(2, 2), 1 + dist.get_rank())},
        "ClusterError",
        "all ranks must have the same buffers of the model, got [('b', (1,), 'torch.float32')] on rank 0, "
        "[('b', (2,), 'torch.float32')] on rank 1",
    ),
    "ranks differ in the inner optimizer": (
        {
            "net": lambda: nn.Linear(2, 2),
            "optimizer": lambda net: [sgd, adagrad][dist.get_rank()](net),
        },
        "ClusterError",
        "all ranks must have the same optimizer, got ('SGD', [['weight', 'bias']]) on rank 0, ('Adagrad', "
        "[['weight', 'bias']]) on rank 1",
    ),
}


def with_buffer(net: nn.Module, size: int) -> nn.Module:
    net.register_buffer("b", torch.zeros(size))
    return net


def adagrad(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(net.parameters())


def test_bad_input(two_ranks: Ranks) -> None:
    for answers in two_ranks.run(refuse_all):
        assert answers == {case: (kind, text) for case, (_, kind, text) in CASES.items()}


def refuse_all() -> dict[str, tuple[str, str]]:
    answers = {}
    for case, (changes, _, _) in CASES.items():
        options = {**PLAIN, **changes}
        if callable(options.get("every")):
            options["every"] = options["every"]()
        torch.manual_seed(0)
        net = options.pop("net")()
        optimizer = options.pop("optimizer")(net)
        before = {name: p.clone() for name, p in net.named_parameters()}
        answers[case] = refusal(lambda: regtopk.UpdateExchange(net, optimizer, **options))  # noqa: B023
        assert same(before, {name: p.clone() for name, p in net.named_parameters()})
        if isinstance(optimizer, torch.optim.Optimizer):
            assert not optimizer._optimizer_step_post_hooks
    return answers


def test_an_optimizer_has_one_exchange(two_ranks: Ranks) -> None:
    text = "optimizer must have one UpdateExchange, got a second: close() the first one"
    assert two_ranks.run(exchange_twice) == [("ClusterError", text)] * 2


def exchange_twice() -> tuple[str, str]:
    net = make_net()
    optimizer = sgd(net)
    with closing(regtopk.UpdateExchange(net, optimizer, TOPK)) as exchange:
        refused = refusal(lambda: regtopk.UpdateExchange(net, optimizer, TOPK))
        train(net, optimizer, range(1))
        assert exchange.num_rounds == 1  # the first still works
    train(net, optimizer, range(1, 2))  # after close() steps stay on the rank
    parameters = flat_parameters(net)
    assert exchange.num_steps == 1
    assert refusal(exchange.state_dict)[1] == "the exchange must not be used after close()"
    with closing(regtopk.UpdateExchange(net, optimizer, TOPK)):  # and another may follow
        assert torch.equal(parameters, flat_parameters(net)) == (dist.get_rank() == 0)
    net.middle.requires_grad_(False)
    with closing(regtopk.UpdateExchange(net, optimizer, TOPK)):
        net.middle.requires_grad_(True)
        said = refusal(lambda: train(net, optimizer, range(1)))
        assert said[1].startswith("parameter 'middle.weight' of shape (20, 40) must have been there")
    return refused


def test_unequally_many_steps_end_with_an_error() -> None:
    ranks = Ranks(2, timeout_s=3)
    try:
        (kind, text), fine = ranks.run(step_unequally, timeout_s=60)
    finally:
        ranks.stop()
    assert fine == ("fine", "3 steps") and kind == "ClusterError"
    assert text.startswith("all_gather failed: ") and text.endswith(
        "Round 1 did not begin at step 4 of this rank. If no rank has stopped: did every rank call "
        "optimizer.step() equally often? A step that a GradScaler skips on one rank is none: count by "
        "num_steps, not by batches"
    )


def step_unequally() -> tuple[str, str]:
    """Rank 1 has one batch less."""
    net = make_net()
    optimizer = sgd(net)
    exchange = regtopk.UpdateExchange(net, optimizer, TOPK, every=2)
    act: Callable[[], None] = lambda: train(net, optimizer, range(4 - dist.get_rank()))  # noqa: E731
    if dist.get_rank() == 0:
        said = refusal(act)
        assert exchange.state_dict()["num_steps"] == 1  # whole, and may be saved
        return said
    act()
    return "fine", f"{exchange.num_steps} steps"


def test_resumed_from_different_rounds(two_ranks: Ranks) -> None:
    for kind, text in two_ranks.run(resume_differently):
        assert kind == "ClusterError"
        assert text.startswith(
            "all ranks must exchange the same parameters at the same step, got step 1 on rank 0, "
            "step 2 on rank 1"
        )


def resume_differently() -> tuple[str, str]:
    net = make_net()
    optimizer = sgd(net)
    with closing(regtopk.UpdateExchange(net, optimizer, TOPK)) as exchange:
        train(net, optimizer, range(1))
        saved = exchange.state_dict()
        train(net, optimizer, range(1, 2))
        if dist.get_rank() == 0:
            exchange.load_state_dict(saved)
        return refusal(lambda: train(net, optimizer, range(2, 3)))


def test_typos() -> None:
    with pytest.raises(TypeError, match=r"unexpected option 'evry' \(did you mean 'every'\?\)"):
        regtopk.UpdateExchange(make_net(), sgd(make_net()), TOPK, evry=2)  # type: ignore[call-arg]
