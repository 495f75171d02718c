"""An optimizer that does not go with the algorithm, two momenta or Adam: said once, with a remedy."""

import gc
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import regtopk
from tests.distributed.ranks import Ranks
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


def attach_with_momenta() -> list[Any]:
    dgc = regtopk.DGC(density=0.1)
    loud = [said_of(dgc, sgd), said_of(dgc, sgd, is_given=True), said_of(dgc, torch.optim.AdamW)]
    for momentum in (0.9, 0.0):
        net = make_net()
        optimizer = sgd(net.parameters(), momentum)
        with listening() as said, closing(regtopk.UpdateExchange(net, optimizer, dgc)):
            loud.append(list(said))
    quiet = [
        said_of(dgc, lambda parameters: sgd(parameters, momentum=0.0)),
        said_of(regtopk.DGC(density=0.1, momentum=0.0), sgd),
        said_of(regtopk.TopK(density=0.1), sgd, is_given=True),
    ]
    assert quiet == [[], [], []]
    given: Any = "adam"
    return [*loud, refusal(lambda: regtopk.attach(ddp(), dgc, optimizer=given))]


def lose_a_model_inside_a_step() -> bool:
    held: list[Any] = [ddp()]
    gone = weakref.ref(held[0])

    def lose(*_: Any) -> None:
        held.clear()
        gc.collect()

    hook = register_optimizer_step_pre_hook(lose)  # others follow it
    regtopk.attach(held[0], regtopk.TopK(density=0.1)).detach()
    sgd([nn.Parameter(torch.zeros(1))]).step()
    hook.remove()
    return gone() is None


def test_a_model_may_go_inside_a_step_of_another_optimizer(two_ranks: Ranks) -> None:
    assert two_ranks.run(lose_a_model_inside_a_step) == [True, True]


def test_two_momenta_are_said_once_on_rank_0(two_ranks: Ranks) -> None:
    here, elsewhere = two_ranks.run(attach_with_momenta)
    first, given, adam, updates, plain, refused = here
    assert elsewhere == [[], [], [], [], [], refused]
    assert first == given == updates == [MESSAGE]
    assert len(adam) == 1 and "AdamW with betas=(0.9, 0.999)" in adam[0] and plain == []
    assert refused[0] == "ArgumentError" and "optimizer" in refused[1] and "str" in refused[1]


def attach_with_adam() -> list[list[str]]:
    topk = regtopk.TopK(density=0.1)
    loud = [said_of(topk, torch.optim.Adam), said_of(topk, torch.optim.Adam, is_given=True)]
    for quiet in (regtopk.Dense(), regtopk.EF21(density=0.1)):  # every entry arrives in every step
        assert said_of(quiet, torch.optim.Adam) == []
    net = make_net()
    with listening() as said, closing(regtopk.UpdateExchange(net, torch.optim.Adam(net.parameters()), topk)):
        assert list(said) == []
    return loud


def test_adam_behind_a_sparse_gradient_is_said_once_on_rank_0(two_ranks: Ranks) -> None:
    assert two_ranks.run(attach_with_adam) == [[[ADAM], [ADAM]], [[], []]]
