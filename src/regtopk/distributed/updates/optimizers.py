"""The optimizer that applies an aggregate of updates (outer), and what is done to optimizers' states."""

import json
from collections.abc import Callable, Iterable
from inspect import unwrap
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from regtopk.distributed.state.shards import local
from regtopk.distributed.transport.collectives import Collectives
from regtopk.errors import ArgumentError, StateError

Outer = Callable[[list[nn.Parameter]], Optimizer]
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")  # of others than torch's, too
_OPTIONS = ("amsgrad", "centered", "momentum")  # with which they keep more
_OF_ANOTHER_STEP = (torch.optim.LBFGS, torch.optim.SparseAdam)  # with a closure, or sparse gradients


def names_in(groups: list[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> list[list[str | None]]:
    """The names of the parameters in each group of optimizers; None for one that is not exchanged."""
    names = {p: name for name, p in parameters.items()}
    return [[names.get(p) for p in group["params"]] for group in groups]


def make_outer(factory: Outer | None, parameters: list[nn.Parameter]) -> Optimizer | None:
    """The outer optimizer of these parameters."""
    if factory is None:
        return None
    outer = factory(parameters) if callable(factory) else factory
    if not callable(factory) or not isinstance(outer, Optimizer):
        raise ArgumentError(
            "outer must be None or a function of a list of parameters that returns a torch.optim.Optimizer, "
            f"got {type(outer).__name__}"
        )
    held = [id(p) for group in outer.param_groups for p in group["params"]]
    if sorted(held) != sorted(map(id, parameters)):
        raise ArgumentError(
            f"outer must return an optimizer of all {len(parameters)} parameters that it is given and no "
            f"others, got one of {len(held)}"
        )
    return outer


def describe_outer(outer: Optimizer | None) -> dict[str, Any]:
    """Its class and its options: what ranks compare, and a checkpoint with its exchange."""
    if outer is None:
        return {"class": "None"}
    options = json.dumps(outer.defaults, default=lambda x: x.tolist() if isinstance(x, Tensor) else repr(x))
    return {"class": type(outer).__name__, **json.loads(options)}


def restart_spoiled(optimizer: Optimizer, shards: Collectives | None) -> None:
    """Let the state of a parameter start anew if it holds a NaN or inf, which would never leave it.

    `shards` are the ranks that hold the other parts of the parameters: all parts start anew, or none.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    spoiled = torch.tensor([_is_spoiled(optimizer.state.get(p, {})) for p in parameters])
    if shards is not None:
        spoiled = shards.maximum(spoiled.to(parameters[0].device, torch.int64))
    for p, is_spoiled in zip(parameters, spoiled.tolist(), strict=True):
        state = optimizer.state.get(p)
        if not is_spoiled or not state:
            continue
        if isinstance(optimizer, Adagrad):  # the only one of torch's whose step does not make a missing state
            state["step"].zero_()
            state["sum"].fill_(optimizer.defaults["initial_accumulator_value"])
        else:
            del optimizer.state[p]


def _is_spoiled(state: dict[str, Any]) -> bool:
    floats = [local(t) for t in state.values() if isinstance(t, Tensor) and t.is_floating_point()]
    return not all(bool(t.isfinite().all()) for t in floats)


def weighted_mean(things: list[Any], weights: list[float]) -> Any:
    """The weighted mean of several ranks' dicts of tensors, such as optimizers' states, in rank order.

    What is the same on all ranks, such as a count of steps, is kept as it is. What is no floating-point
    tensor is that of the first rank. Where some ranks have nothing for a key, the others' weights count.
    """
    first = things[0]
    if isinstance(first, dict):
        means = {}
        for key in {key: None for each in things for key in each}:
            holders = [n for n, each in enumerate(things) if key in each]
            shares = [weights[n] for n in holders]
            shares = shares if any(shares) else [1.0] * len(holders)
            means[key] = weighted_mean([things[n][key] for n in holders], shares)
        return means
    is_number = isinstance(first, Tensor) and first.is_floating_point()
    if not is_number or all(torch.equal(first, other) for other in things[1:]):
        return first
    total = torch.zeros_like(first, dtype=torch.float64)
    for weight, tensor in zip(weights, things, strict=True):
        total += weight / sum(weights) * tensor.double()
    return total.to(first.dtype)


def check_saved(optimizers: Iterable[Optimizer], saved: dict[str, Any]) -> None:
    """Refuse the state of other groups, without what these look up, or with moments that cannot be."""
    owners = [(each, group) for each in optimizers for group in each.param_groups]
    numbers = iter(range(sum(len(group["params"]) for _, group in owners)))
    expected = [list(islice(numbers, len(group["params"]))) for _, group in owners]
    found = [list(group["params"]) for group in saved["param_groups"]]
    if found != expected:
        raise StateError(f"parameters of the optimizer's groups must be {expected}, got {found}")
    if others := saved["state"].keys() - {number for group in expected for number in group}:
        raise StateError(f"state of the saved optimizer must be of its parameters, got number {min(others)}")
    for (optimizer, own), group in zip(owners, saved["param_groups"], strict=True):
        for key, value in own.items():
            other = group.get(key, None if key == "lr" else value)  # an older torch has fewer
            if key != "params" and not _is_like(value, other):
                rule = "a finite number" if _is_number(value) else f"like {value!r}"
                raise StateError(f"{key} of the saved optimizer must be {rule}, got {other!r}")
        fresh = {ndim: _after_a_step(optimizer, group, ndim) for ndim in {p.ndim for p in own["params"]}}
        for number, p in zip(group["params"], own["params"], strict=True):
            state = saved["state"].get(number, {})
            is_needed = bool(state) or isinstance(optimizer, Adagrad)  # whose step does not make one
            if is_needed and (missing := fresh[p.ndim].keys() - state.keys()):
                told = f"{min(missing)!r} of parameter {number}, got {list(state)}"
                raise StateError(f"state of the saved optimizer must hold {told}")
            for key, value in state.items():
                _check_field(key, value, p, fresh[p.ndim].get(key), optimizer)


def _check_field(key: str, value: Any, p: nn.Parameter, like: Any, optimizer: Optimizer) -> None:
    """Refuse what cannot be a field of a parameter; `like` is that of a small one, if it is known."""
    if key == "step" or (like is not None and like.dim() < p.dim()):
        if not _is_number(value):
            raise StateError(f"{key} of the saved optimizer must be a finite number, got {value!r}")
        return
    is_not_made = value is None and key == "momentum_buffer" and isinstance(optimizer, torch.optim.SGD)
    if is_not_made or (like is None and key not in _MOMENTS):
        return
    sides = (2,) * p.dim() if like is None else like.shape  # one of 1 stays so
    shapes = {
        tuple(size if side > 1 else 1 for size, side in zip(each.shape, sides, strict=True))
        for each in (p, local(p))
    }
    # a NaN in it is that of a step that is skipped, or will be
    shape = tuple(value.shape) if isinstance(value, Tensor) else value
    if shape not in shapes:
        rule = f"have its parameter's shape, {min(shapes)}"
        raise StateError(f"{key} of the saved optimizer must {rule}, got {shape!r}")


def _after_a_step(optimizer: Optimizer, group: dict[str, Any], ndim: int) -> dict[str, Any]:
    """What one of torch's optimizers keeps of a parameter of two entries a side after a step."""
    kind: Any = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) != kind or kind in _OF_ANOTHER_STEP:
        return {}
    p = nn.Parameter(torch.zeros([2] * ndim, device="cpu"), requires_grad=False)
    p.grad = torch.zeros_like(p)
    fresh = kind([p])
    fresh.param_groups[0] |= {key: group[key] for key in _OPTIONS if key in group}
    unwrap(kind.step)(fresh)  # nobody's hooks hear of it
    return dict(fresh.state[p])


def _is_like(value: Any, other: Any) -> bool:
    """Whether an option can take the place of another."""
    if isinstance(value, (tuple, list)):
        is_list = isinstance(other, (tuple, list)) and len(other) == len(value)
        return is_list and all(map(_is_like, value, other))
    if value is None or isinstance(value, bool):
        return other is None or isinstance(other, bool)
    return _is_number(other) if _is_number(value) else type(other) is type(value)


def _is_number(value: object) -> bool:
    """Whether it is a finite one, perhaps in a tensor."""
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_real and not (isinstance(value, Tensor) and value.numel() == 1):
        return False
    return bool(torch.isfinite(torch.as_tensor(value)))
