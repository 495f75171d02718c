"""State dicts of an `UpdateExchange`: what they hold beside that of checkpoint.py.

::

    updates      {every, delay, fragments, inner, outer, start, outer_state}       the same on all ranks
        inner        the class of the ranks' optimizers
        outer        {class, option: value, ...}
        start        {parameter: tensor}                 theta_start, in at least float32
        outer_state  (state dict of the outer optimizer,)              or ({},)
    workers      {"3": {..., updates}}
        updates      ({num_steps, optimizer, parameters, buffers, sent},)         what differs by rank
            num_steps   optimizer steps so far
            optimizer   its state dict
            parameters  {name: tensor}, or {} at a round's end, when they are theta_start
            sent        {name: tensor}, as they were sent in rounds whose aggregate is not applied yet
            skipped     of each fragment, whether its round is such a one, and was not finite
            buffers     {"now": {name: tensor}, "start": {name: tensor}}

Where a tuple stands torch.distributed.checkpoint keeps what is in it as one, whatever it holds.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from regtopk.distributed.state.parameters import is_dtensor
from regtopk.distributed.state.saved import kept_ranks
from regtopk.distributed.state.shards import like, local
from regtopk.distributed.updates.model import LocalModel
from regtopk.distributed.updates.optimizers import average_optimizer_states, describe_outer, weighted_mean
from regtopk.errors import StateError
from regtopk.rounds import Rounds

_TIMES = ("every", "delay", "fragments")


class LoadedModel(NamedTuple):
    """What to go on with."""

    num_steps: int
    start: dict[str, Tensor]
    outer_state: dict[str, Any]
    optimizer: dict[str, Any]
    parameters: dict[str, Tensor]
    buffers: dict[str, dict[str, Tensor]]
    sent: dict[str, Tensor]
    skipped: list[bool]


def add_to(
    saved: dict[str, Any],
    model: LocalModel,
    rounds: Rounds,
    num_steps: int,
    sent: dict[str, Tensor] | None,
    skipped: list[bool],
) -> dict[str, Any]:
    """A rank's state dict with what belongs to updates; `sent` is None if the model is theta_start."""
    named = model.parameters.named
    mine = {
        "num_steps": num_steps,
        "optimizer": copied(model.optimizer.state_dict()),
        "parameters": {} if sent is None else _finite(copied(dict(named)), model.start),
        "buffers": copied(model.buffers.saved()),
        "sent": _finite(copied(sent or {}), model.start),
        "skipped": skipped if sent else [],
    }
    for worker in saved["workers"].values():
        worker["updates"] = (mine,)
    updates = {
        **{time: getattr(rounds, time) for time in _TIMES},
        "inner": type(model.optimizer).__name__,
        "outer": describe_outer(model.outer),
        "start": copied(model.start),
        "outer_state": ({} if model.outer is None else copied(model.outer.state_dict()),),
    }
    return {**saved, "updates": updates}


def at_a_rounds_end(saved: dict[str, Any], weights: list[float], *, is_sharded: bool) -> dict[str, Any]:
    """A state from inside a round, for other ranks: what a rank has learned since goes into its residual.

    e_n := e_n + theta_start - theta_n, so that nothing is lost; then all go on from theta_start.

    Raises:
        StateError: the algorithm keeps no residual of some parameter, or the model is sharded.
    """
    try:
        workers = saved["workers"]
        is_same_cluster = saved["weights"] == weights and not saved.get("lost")
        if is_same_cluster or not any(worker["updates"][0]["parameters"] for worker in workers.values()):
            return saved
        if is_sharded:
            raise StateError(
                "the saved state must be from a round's end to be loaded on other ranks or with other "
                "weights, as the model is sharded: call finish() before you save"
            )
        start = saved["updates"]["start"]
        return {**saved, "workers": {n: _ended(worker, start) for n, worker in workers.items()}}
    except StateError:
        raise
    except Exception as error:
        raise StateError(f"the saved state is malformed: {type(error).__name__}: {error}") from error


def _ended(worker: dict[str, Any], start: dict[str, Tensor]) -> dict[str, Any]:
    (mine,) = worker["updates"]
    if any(mine.get("skipped", [])):  # what it has learned is taken back
        return {**worker, "updates": ({**mine, "parameters": {}, "sent": {}, "skipped": []},)}
    entries = {}
    for name, parts in worker["entries"].items():
        if "residual" not in parts:
            raise StateError(
                f"the saved state must be from a round's end, or after finish(): {name!r} has no residual to "
                "take up what was learned since, and the ranks or their weights have changed"
            )
        own, residual = mine["parameters"][name], parts["residual"]
        before = mine.get("sent", {}).get(name, start[name]).to(own.dtype)  # as the round began, rounded
        entries[name] = {**parts, "residual": residual + (before.to(residual) - own.to(residual))}
    ended = {**mine, "parameters": {}, "sent": {}, "skipped": []}
    return {**worker, "entries": entries, "updates": (ended,)}


def loaded(
    model: LocalModel, saved: dict[str, Any], rounds: Rounds, rank: int, weights: list[float]
) -> LoadedModel:
    """What a rank goes on with; nothing changes yet.

    On other ranks, or with other weights, than were saved, every rank gets the weighted mean of the saved
    ranks' optimizer states and buffers.

    Raises:
        StateError: it does not fit, or is damaged.
    """
    try:
        return _loaded(model, saved, rounds, rank, weights)
    except StateError:
        raise
    except Exception as error:
        raise StateError(f"the saved state is malformed: {type(error).__name__}: {error}") from error


def _loaded(
    model: LocalModel, saved: dict[str, Any], rounds: Rounds, rank: int, weights: list[float]
) -> LoadedModel:
    updates = saved["updates"]
    times = {"delay": 0, "fragments": 1, **updates, "every": updates["every"]}  # versions before had no other
    for time in _TIMES:
        own, theirs = getattr(rounds, time), times[time]
        if theirs != own:
            raise StateError(f"{time} must be that of the saved state, {theirs!r}, got {own}")
    inner = type(model.optimizer).__name__
    if updates.get("inner", inner) != inner:  # versions before did not save it
        raise StateError(f"optimizer in the saved state must be {inner!r}, got {updates['inner']!r}")
    _check_outer(describe_outer(model.outer), updates["outer"])
    _check_shapes(model, updates["start"], "start")
    old_weights = saved["weights"]
    workers = saved["workers"]
    if old_weights == weights and not saved.get("lost"):
        mine = workers[str(rank)]["updates"][0]
    else:
        kept = kept_ranks(saved)
        mine = _for_other_ranks([workers[str(n)]["updates"][0] for n in kept], [old_weights[n] for n in kept])
    mine = {"sent": {}, "skipped": [], **mine}  # versions before did not save them
    if mine["parameters"]:
        _check_shapes(model, mine["parameters"], "parameters")
    _check_groups(model, mine["optimizer"])
    _check_buffers(model, mine["buffers"])
    return LoadedModel(start=updates["start"], outer_state=updates["outer_state"][0], **mine)


def _for_other_ranks(workers: list[dict[str, Any]], weights: list[float]) -> dict[str, Any]:
    return {
        "num_steps": workers[0]["num_steps"],
        "optimizer": average_optimizer_states([worker["optimizer"] for worker in workers], weights),
        "parameters": {},
        "buffers": weighted_mean([worker["buffers"] for worker in workers], weights),
    }


def load_into(model: LocalModel, new: LoadedModel) -> None:
    """Go on from what was loaded."""
    for name, start in new.start.items():
        model.start[name].copy_(start)
    model.write_back()
    for name, tensor in new.parameters.items():
        model.parameters.named[name].copy_(tensor)
    model.buffers.load(new.buffers)
    model.optimizer.load_state_dict(deepcopy(new.optimizer))  # which would go on in the saved tensors
    if model.is_sharded:
        shard_state(model.optimizer)
    if model.outer is not None:
        model.outer.load_state_dict(deepcopy(new.outer_state))


def shard_state(optimizer: Optimizer) -> None:
    """Make DTensors of what was saved of them: this rank's parts, which have a part's shape."""
    for p, state in optimizer.state.items():
        for key, saved in state.items():
            if isinstance(saved, Tensor) and saved.shape == local(p).shape and not is_dtensor(saved):
                state[key] = like(saved, p)


def _check_outer(mine: dict[str, Any], saved: dict[str, Any]) -> None:
    """Options that only one of them knows do not count: torch adds some from version to version."""
    for option in [option for option in mine if option in saved]:
        if mine[option] != saved[option]:
            what = "outer" if option == "class" else f"{option} of outer"
            raise StateError(f"{what} in the saved state must be {mine[option]!r}, got {saved[option]!r}")


def _check_shapes(model: LocalModel, saved: dict[str, Tensor], what: str) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if found != model.parameters.shapes:
        raise StateError(f"{what} of the saved state must hold {model.parameters.shapes}, got {found}")
    for name, tensor in saved.items():
        if not bool(torch.isfinite(tensor).all()):
            raise StateError(f"{what} of {name!r} in the saved state must be finite, got a NaN or inf")


def _check_groups(model: LocalModel, saved: dict[str, Any]) -> None:
    expected = [len(group["params"]) for group in model.optimizer.param_groups]
    found = [len(group["params"]) for group in saved["param_groups"]]
    if found != expected:
        raise StateError(
            f"optimizer of the saved state must have groups of {expected} parameters, got {found}"
        )


def _check_buffers(model: LocalModel, saved: dict[str, dict[str, Tensor]]) -> None:
    mine = {name: tuple(buffer.shape) for name, buffer in model.buffers.saved()["now"].items()}
    now, start = ({name: tuple(b.shape) for name, b in saved[when].items()} for when in ("now", "start"))
    if now != mine or not start.items() <= mine.items():
        raise StateError(f"buffers of the saved state must hold {mine}, got {now} and, at first, {start}")


def _finite(parameters: dict[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters that a NaN has spoiled are saved as theta_start, which they will return to."""
    return {
        name: tensor if bool(torch.isfinite(tensor).all()) else copied(start[name]).to(tensor.dtype)
        for name, tensor in parameters.items()
    }


def copied(thing: Any) -> Any:
    """A copy on the CPU; of a DTensor, of this rank's part."""
    if isinstance(thing, Tensor):
        return local(thing).detach().to("cpu", copy=True)
    if isinstance(thing, dict):
        return {key: copied(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return type(thing)(copied(value) for value in thing)
    return thing
