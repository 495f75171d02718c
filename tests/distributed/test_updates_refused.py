"""What UpdateExchange refuses, before anything has changed; and ranks that step unequally often."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adagrad

import regtopk
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.test_bad_models import META, sharded
from tests.distributed.test_updates import nesterov, sgd, train, updating
from tests.distributed.training import closing, ddp, flat_parameters, make_net, refusal, same

TOPK = regtopk.TopK(density=0.1)


def only_muon(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in net.parameters() if p.ndim == 2])


def schedule_free(net: nn.Module, option: str = "train_mode") -> torch.optim.Optimizer:
    """One with the class and the options of the schedulefree package's."""
    kind: Any = type("AdamWScheduleFree", (torch.optim.Optimizer,), {})
    optimizer: torch.optim.Optimizer = kind(net.parameters(), {"lr": 0.1, option: False})
    return optimizer


def with_another(net: nn.Module) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": net.parameters()}, {"params": [nn.Parameter(torch.ones(3))]}]
    return torch.optim.SGD(groups, lr=0.1)


def with_buffer(net: nn.Module, size: int) -> nn.Module:
    net.register_buffer("b", torch.zeros(size))
    return net


PLAIN = "ClusterError: model must be plain"
AVERAGES = (
    f"{PLAIN}, got a DistributedDataParallel, which averages gradients in every backward: hand over the "
    "module inside it, or exchange gradients by regtopk.attach"
)
AVERAGING = (
    "ArgumentError: optimizer must have in the parameters what it has learned, not an average elsewhere as "
    "schedule-free ones do, got AdamWScheduleFree"
)
HOLDS, ANOTHER = "ArgumentError: optimizer must hold", "was it made from another model?"
WITHOUT = f"{HOLDS} every parameter that is exchanged, got none with"
LIST = "ArgumentError: optimizer must be a torch.optim.Optimizer, or a list of some,"
OUTER = "ArgumentError: outer must be None or a function of a list of parameters that returns a"
OUTER_OF = "ArgumentError: outer must return an optimizer of all 8 parameters that it is given and no others"
SAME, FRAGMENTS = "ClusterError: all ranks must have the same", "ArgumentError: fragments must be"
NAMES = [[name for name, _ in make_net().named_parameters()]]
IN_PARTS = "ArgumentError: k must be None for a model that is exchanged in parts (FSDP units, fragments), "
IN_PARTS += "which differ in size, got 3: give a density"
CASES: list[tuple[dict[str, Any], str]] = [
    ({"every": 0}, "ArgumentError: every must be an integer of at least 1, got 0"),
    ({"dense_steps": -1, "every": 2}, "ArgumentError: dense_steps must be an integer of at least 0, got -1"),
    ({"buffers": "sum"}, "ArgumentError: buffers must be one of mean, rank0, local, got 'sum'"),
    ({"optimizer": lambda net: "adam"}, f"{LIST} got str"),
    ({"optimizer": lambda net: [sgd(net), "adam"]}, f"{LIST} got str"),
    ({"optimizer": lambda net: []}, f"{LIST} got an empty list"),
    (
        {"optimizer": only_muon},
        f"{WITHOUT} 'first.bias', 'extra.bias', 'middle.bias' and 1 more: hand over all optimizers, such as "
        "Muon for the matrices of hidden layers and AdamW for the rest, as UpdateExchange(model, [muon, "
        "adamw], ...)",
    ),
    (
        {"optimizer": lambda net: sgd(make_net())},
        f"{WITHOUT} 'first.weight', 'first.bias', 'extra.weight' and 5 more: {ANOTHER}",
    ),
    (
        {"optimizer": lambda net: [only_muon(net), sgd(net)]},
        f"{HOLDS} every parameter once, got 'first.weight', 'extra.weight', 'middle.weight' and 1 more in "
        "several",
    ),
    ({"optimizer": with_another}, f"{HOLDS} exchanged parameters, got another of shape (3,)"),
    ({"optimizer": schedule_free}, AVERAGING),
    ({"optimizer": partial(schedule_free, option="weight_sum")}, AVERAGING),  # as those with closures have
    ({"grad_scaler": 2.0}, "ArgumentError: grad_scaler must be a torch.amp.GradScaler, got 2.0"),
    ({"outer": sgd(make_net())}, f"{OUTER} torch.optim.Optimizer, got SGD"),
    ({"outer": lambda p: None}, f"{OUTER} torch.optim.Optimizer, got NoneType"),
    ({"outer": lambda p: nesterov(p[1:])}, f"{OUTER_OF}, got one of 7"),
    ({"net": ddp}, AVERAGES),
    ({"net": lambda: torch.compile(ddp(), backend="eager")}, AVERAGES),
    ({"net": sharded}, f"{PLAIN} or of fully_shard (FSDP2), got FullyShardedDataParallel"),
    (
        {"every": lambda: 2 + dist.get_rank(), "delay": 1, "fragments": 2},
        "ArgumentError: delay must be less than the smallest every // fragments, 1, where every differs by "
        "rank, got 1",
    ),
    (
        {"net": lambda: with_buffer(nn.Linear(2, 2), 1 + dist.get_rank())},
        f"{SAME} buffers of the model, got [('b', (1,), 'torch.float32')] on rank 0, "
        "[('b', (2,), 'torch.float32')] on rank 1",
    ),
    (
        {"optimizer": lambda net: (SGD, Adagrad)[dist.get_rank()](net.parameters())},
        f"{SAME} optimizer, got ('SGD', {NAMES}) on rank 0, ('Adagrad', {NAMES}) on rank 1",
    ),
    # delay and fragments
    ({"every": 2, "delay": 2}, "ArgumentError: delay must be an integer from 0 to 1 with every = 2, got 2"),
    ({"every": 2, "fragments": 3}, f"{FRAGMENTS} an integer from 1 to 2 with every = 2, got 3"),
    ({"every": 9, "fragments": 9}, f"{FRAGMENTS} at most 8, one per parameter, got 9"),
    ({"every": 2, "fragments": 2, "algorithm": regtopk.TopK(k=3)}, IN_PARTS),
    ({"every": 2, "delay": 1, "anchors": "cpu"}, "ArgumentError: delay must be 0 with anchors='cpu', got 1"),
    ({"mix": math.nan}, "ArgumentError: mix must be in [0, 1], got nan"),
]


@on_ranks(2)
def test_bad_input() -> None:
    for changes, text in CASES:
        options = {"net": make_net, "optimizer": sgd, "algorithm": TOPK, **changes}
        if callable(options.get("every")):
            options["every"] = options["every"]()
        torch.manual_seed(0)
        net = options.pop("net")()
        optimizer = options.pop("optimizer")(net)
        before = {name: p.clone() for name, p in net.named_parameters()}
        said = ": ".join(refusal(lambda: regtopk.UpdateExchange(net, optimizer, **options)))  # noqa: B023
        assert said == text
        assert same(before, {name: p.clone() for name, p in net.named_parameters()})
        for each in optimizer if isinstance(optimizer, list) else [optimizer]:
            assert not getattr(each, "_optimizer_step_post_hooks", {})


@on_ranks(2)
def test_an_optimizer_has_one_exchange() -> None:
    with updating() as (net, optimizer, exchange):
        refused = refusal(lambda: regtopk.UpdateExchange(net, optimizer, TOPK))
        assert refused[1] == "optimizer must have one UpdateExchange, got a second: close() the first one"
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


def test_unequally_many_steps_end_with_an_error() -> None:
    with Ranks(2, timeout_s=8) as ranks:
        (kind, text), fine = ranks.run(step_unequally)
    assert fine == ("fine", "3 steps") and kind == "ClusterError"
    assert text.startswith("all_gather failed: ") and text.endswith(
        "Round 1 did not begin. If no rank has stopped: did every rank call optimizer.step() as often as its "
        "`every` says? A step that a GradScaler skips does not count: count by num_steps, not by batches"
    )


def step_unequally() -> tuple[str, str]:
    """Rank 1 has one batch less."""
    with updating(every=2) as (net, optimizer, exchange):
        act: Callable[[], None] = lambda: train(net, optimizer, range(4 - dist.get_rank()))  # noqa: E731
        if dist.get_rank() == 0:
            said = refusal(act)
            assert exchange.state_dict()["num_steps"] == 1  # whole, and may be saved
            return said
        act()
        return "fine", f"{exchange.num_steps} steps"


@on_ranks(2)
def test_states_that_are_not_of_one_moment_of_one_run() -> None:
    """What one rank must not load, no rank loads, and nothing has changed."""
    with updating(every=2, outer=nesterov) as (net, optimizer, exchange):
        train(net, optimizer, range(4))
        earlier = exchange.state_dict()
        train(net, optimizer, range(4, 6))
        others = [exchange.state_dict() for _ in range(3)]
        moved, pushed, damaged = others
        moved["updates"]["start"]["last.bias"] += 1
        pushed["updates"]["outer_state"][0]["state"][0]["momentum_buffer"] += 1
        damaged["workers"] = 3
        right, before = exchange.state_dict(), flat_parameters(net)
        said = [
            refusal(lambda: exchange.load_state_dict(wrong if dist.get_rank() == 1 else right))  # noqa: B023
            for wrong in (earlier, *others)
        ]
        assert {kind for kind, _ in said} == {"StateError"}
        start = "saved states must be of one moment of one run, with the same "
        assert said[0][1] == f"{start}number of exchanges, got 3 on rank 0, 2 on rank 1"
        for _, text in said[1:3]:
            assert text.startswith(f"{start}theta_start") and text.endswith(" on rank 1")
        theirs = "rank 1 cannot load the state: StateError: " if dist.get_rank() == 0 else ""
        assert said[-1][1].startswith(f"{theirs}the saved state is malformed: TypeError")
        assert same(exchange.state_dict(), right) and torch.equal(flat_parameters(net), before)


@on_ranks(2)
def test_a_model_without_memory_frozen_or_not() -> None:
    for of_it in ("first", "last"):
        net = make_net().to("meta")
        for name, p in [] if of_it == "first" else list(net.named_parameters()):
            p.requires_grad_(not name.startswith("last"))
        text = refusal(lambda: regtopk.UpdateExchange(net, sgd(net), TOPK))  # noqa: B023
        assert text == ("ClusterError", f"parameter '{of_it}.weight' {META}")
    net = make_net()
    net.register_buffer("b", torch.zeros(2, device="meta"))
    text = refusal(lambda: regtopk.UpdateExchange(net, sgd(net), TOPK))
    assert text == ("ClusterError", f"buffer 'b' {META}")
