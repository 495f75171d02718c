"""Small models, batches and loops that the ranks of these tests run."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import regtopk
from regtopk.distributed.options import Options
from regtopk.distributed.state.parameters import Parameters
from regtopk.distributed.steps.agreement import Agreement
from regtopk.distributed.steps.step import Kind, Steps
from regtopk.distributed.transport.collectives import Collectives, group_or_default
from tests.refusals import refusal as refusal

SMALL_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.004}  # of 4 kB: several, even in these models
closing: Any = contextlib.closing  # an exchange afterwards


@contextmanager
def made(kind: Callable[..., Any], *arguments: Any, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A training of a test's own kind, and its exchange, which is closed afterwards."""
    training = kind(*arguments, **options)
    with closing(training.exchange) as exchange:
        yield training, exchange


class Net(nn.Module):
    """Three layers (about 3,000 parameters) and an extra one that some steps and ranks leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 40)
        self.extra = nn.Linear(40, 40)
        self.middle = nn.Linear(40, 20)
        self.last = nn.Linear(20, 3)

    def forward(self, x: Tensor, with_extra: bool = True) -> Tensor:
        x = torch.tanh(self.first(x))
        if with_extra:
            x = x + torch.tanh(self.extra(x))
        result: Tensor = self.last(torch.tanh(self.middle(x)))
        return result


def make_net() -> Net:
    """The same net on every rank."""
    torch.manual_seed(0)
    return Net()


def batch(step: int, rank: int | None = None) -> Tensor:
    """A rank's inputs of a step, (8, 20): the same in every process and after a resume."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, step: int, **arguments: Any) -> Tensor:
    """A loss whose gradients differ from rank to rank."""
    loss: Tensor = model(batch(step), **arguments).square().mean()
    return loss


def ddp(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(make_net(), **options)


def steps_of(algorithm: Any, sizes: dict[str, int], **options: Any) -> Steps:
    """The steps of an exchange of parameters by name, each in a bucket of its own."""
    parameters = Parameters([(name, nn.Parameter(torch.zeros(size))) for name, size in sizes.items()])
    kind = Kind("test", parts=tuple((name,) for name in sizes))
    return Steps(parameters, algorithm, Collectives(group_or_default(None)), Options(**options), kind)


def flat_parameters(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def whole(tensor: Tensor) -> Tensor:
    """All parts of a tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def flat_gradients(model: nn.Module) -> Tensor:
    """All gradients as one vector, the parts of other ranks too; zero where there is none."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([whole(grad.detach()).flatten() for grad in grads])


def same(left: Any, right: Any) -> bool:
    """Whether two nested structures are equal, tensors bit for bit."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def algorithm_state(exchange: Any) -> dict[str, Any]:
    """What must not change in a skipped step: all of the state dict but the counts of bytes and times."""
    saved: dict[str, Any] = exchange.state_dict()
    if exchange.is_sharded:
        ((_, saved),) = saved["shards"].items()
    for worker in saved["workers"].values():
        del worker["total"]
    return saved


def merged(exchange: Any) -> dict[str, Any]:
    """What all ranks save, as one state."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, exchange.state_dict())
    return regtopk.merge_state_dicts(parts)


@contextmanager
def listening() -> Iterator[list[str]]:
    """What the library logs meanwhile."""
    handler = logging.Handler()
    said: list[str] = []
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("regtopk").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("regtopk").removeHandler(handler)


noted_go_on = partial(patch.object, Agreement, "go_on", autospec=True, side_effect=Agreement.go_on)


@contextmanager
def answers_on_the_device() -> Iterator[Mock]:
    """Let ranks go on without the others' answers, as they do over NCCL; called when they did not wait."""
    with patch.object(Collectives, "is_on_device", lambda self, device: True), noted_go_on() as late:
        yield late


def flip_a_bit(collectives: Collectives, tensor: Tensor, real: Any = Collectives.all_gather) -> Tensor:
    """In the place of `all_gather`: the message of rank 1 is damaged on its way."""
    gathered: Tensor = real(collectives, tensor)
    if tensor.dtype == torch.uint8 and len(gathered) > 1:
        gathered[1, 40] ^= 1
    return gathered
