"""An optimizer that does not go with the algorithm, two momenta or Adam: said once, with a remedy."""

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import regtopk
from tests.distributed.ranks import on_ranks
from tests.distributed.training import closing, ddp, listening, loss_of, make_net, refusal

MESSAGE = (
    "dgc keeps a momentum of its own, and the optimizer has one, too (SGD with momentum=0.9): steps become "
    "many times too long. Use torch.optim.SGD without momentum, or an algorithm without one, such as TopK"
)
ADAM = (
    "topk sends an entry rarely, as one large value, which spoils Adam's second moments: exchange updates, "
    "by regtopk.UpdateExchange, or use torch.optim.SGD"
)


def said_of(algorithm: Any, make: Any, *, is_given: bool = False) -> list[str]:
    """What is logged when a model is attached, and in two steps."""
    net = ddp()
    optimizer = make(net.parameters())
    with listening() as said:
        with closing(regtopk.attach(net, algorithm, optimizer=optimizer if is_given else None)):
            assert len(said) <= is_given
            for step in range(2):
                other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
                other.step()  # which trains something else
                loss_of(net, step).backward()
                optimizer.step()
        return list(said)


def sgd(parameters: Any, momentum: float = 0.9) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=momentum)


@on_ranks(2)
def test_two_momenta_are_said_once_on_rank_0() -> None:
    dgc, told = regtopk.DGC(density=0.1), [MESSAGE] * (dist.get_rank() == 0)
    assert said_of(dgc, sgd) == said_of(dgc, sgd, is_given=True) == told
    adam = said_of(dgc, torch.optim.AdamW)
    assert len(adam) == len(told) and all("AdamW with betas=(0.9, 0.999)" in line for line in adam)
    for momentum in (0.9, 0.0):
        net = make_net()
        optimizer = sgd(net.parameters(), momentum)
        with listening() as said, closing(regtopk.UpdateExchange(net, optimizer, dgc)):
            assert said == (told if momentum else [])
    quiet = [
        said_of(dgc, lambda parameters: sgd(parameters, momentum=0.0)),
        said_of(regtopk.DGC(density=0.1, momentum=0.0), sgd),
        said_of(regtopk.TopK(density=0.1), sgd, is_given=True),
    ]
    assert quiet == [[], [], []]
    given: Any = "adam"
    kind, text = refusal(lambda: regtopk.attach(ddp(), dgc, optimizer=given))
    assert kind == "ArgumentError" and "optimizer" in text and "str" in text


@on_ranks(2)
def test_a_model_may_go_inside_a_step_of_another_optimizer() -> None:
    held: list[Any] = [ddp()]
    gone = weakref.ref(held[0])

    def lose(*_: Any) -> None:
        held.clear()
        gc.collect()

    hook = register_optimizer_step_pre_hook(lose)  # others follow it
    regtopk.attach(held[0], regtopk.TopK(density=0.1)).detach()
    sgd([nn.Parameter(torch.zeros(1))]).step()
    hook.remove()
    assert gone() is None


@on_ranks(2)
def test_adam_behind_a_sparse_gradient_is_said_once_on_rank_0() -> None:
    topk, told = regtopk.TopK(density=0.1), [ADAM] * (dist.get_rank() == 0)
    assert said_of(topk, torch.optim.Adam) == said_of(topk, torch.optim.Adam, is_given=True) == told
    for quiet in (regtopk.Dense(), regtopk.EF21(density=0.1)):  # every entry arrives in every step
        assert said_of(quiet, torch.optim.Adam) == []
    net = make_net()
    with listening() as said, closing(regtopk.UpdateExchange(net, torch.optim.Adam(net.parameters()), topk)):
        assert list(said) == []
