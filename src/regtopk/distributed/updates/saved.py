"""State dicts of an `UpdateExchange`: what they hold beside that of state/saved.py.

::

    updates      {every, delay, fragments, inner, outer, start, outer_state}       the same on all ranks
        every        of all ranks; where it differs [every of rank 0, ...]
        inner        the class of the ranks' optimizer; of several "Muon, AdamW", in their order
        outer        {class, option: value, ...}
        start        {parameter: tensor}: theta_start, in at least float32
        outer_state  (state dict of the outer optimizer,) or ({},)
    workers      {"3": {..., updates}}
        updates      ({num_steps, optimizer, parameters, buffers, sent, skipped, tokens},)   what differs
            optimizer   its state dict; of several that of one with all their groups, one after another
            parameters  {name: tensor}, or {} at a round's end, when they are theta_start
            buffers     {"now": {name: tensor}, "start": {name: tensor}}
            sent        {name: tensor}, as they were sent in rounds whose aggregate is not applied yet
            skipped     of each fragment, whether its round is such a one, and was not finite
            tokens      of each fragment, those counted since it was last sent, if weights are by tokens

Where a tuple stands, torch.distributed.checkpoint keeps what is in it as one.
"""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from regtopk.core.clipping import clip_scales, norm_of
from regtopk.core.options import check_integer, check_number, true_or_false
from regtopk.distributed.state.parameters import is_dtensor
from regtopk.distributed.state.saved import MOST_STEPS, kept_ranks, malformed, refuse_missing
from regtopk.distributed.state.shards import copied, like, local, shapes_of
from regtopk.distributed.transport.collectives import as_bytes
from regtopk.distributed.updates.model import LocalModel
from regtopk.distributed.updates.optimizers import check_saved, describe_outer, weighted_mean
from regtopk.errors import StateError
from regtopk.rounds import LocalRounds, Rounds

_TIMES = ("delay", "fragments")
AT_A_ROUNDS_END: dict[str, Any] = {"parameters": {}, "sent": {}, "skipped": ()}  # of `LoadedModel`


class LoadedModel(NamedTuple):
    """What to go on with: see above."""

    start: dict[str, Tensor]
    outer_state: dict[str, Any]
    num_steps: int
    optimizer: dict[str, Any]
    buffers: dict[str, dict[str, Tensor]]
    parameters: Mapping[str, Tensor]
    sent: Mapping[str, Tensor]
    skipped: Sequence[bool]
    tokens: Sequence[float] = ()


def add_to(
    saved: dict[str, Any], model: LocalModel, rounds: LocalRounds, skipped: list[bool], tokens: list[float]
) -> dict[str, Any]:
    """A rank's state dict with what belongs to updates."""
    sent = {
        name: tensor
        for names, tensors in zip(model.fragments, rounds.sent, strict=True)
        for name, tensor in zip(names, tensors, strict=False)  # none of a fragment that is not under way
    }
    mine = {
        "num_steps": rounds.clock,
        "optimizer": copied(model.inner.state_dict()),
        "parameters": {} if rounds.is_start else copied(dict(model.parameters.named)),
        "buffers": copied(model.buffers.saved()),
        "sent": copied(sent),
        "skipped": skipped if sent else [],
        **({"tokens": tokens} if tokens else {}),
    }
    for worker in saved["workers"].values():
        worker["updates"] = (mine,)
    updates = {
        "every": rounds.rounds.told_every,
        **{time: getattr(rounds.rounds, time) for time in _TIMES},
        "inner": model.inner.kinds,
        **({"held": model.inner_names} if len(model.inner.all) > 1 else {}),
        "outer": describe_outer(model.outer),
        "start": copied(model.start),
        "outer_state": ({} if model.outer is None else copied(model.outer.state_dict()),),
    }
    return {**saved, "updates": updates}


def loaded(
    model: LocalModel, saved: dict[str, Any], rounds: Rounds, rank: int, weights: list[float]
) -> tuple[dict[str, Any], LoadedModel]:
    """What the steps and the model of a rank go on with; nothing changes yet.

    On other ranks, or with other weights, than were saved, all begin from theta_start, with what was learned
    inside a round in the residual, and the weighted mean of the ranks' optimizer states and buffers.
    """
    if not isinstance(saved, dict) or "updates" not in saved:
        raise StateError("a saved UpdateExchange must hold 'updates': this was saved by something else")
    with malformed():
        updates = saved["updates"]
        is_same = saved["weights"] == weights and not saved.get("lost")
        refuse_missing(saved, [rank] if is_same else kept_ranks(saved), rank, len(weights))
        if not is_same:
            saved = _at_a_rounds_end(saved, model, rounds)
        mine = saved["workers"][str(rank)]["updates"][0] if is_same else _mean_of_ranks(saved, rounds)
        new = LoadedModel(start=updates["start"], outer_state=updates["outer_state"][0], **mine)
        if len(saved["weights"]) != len(weights):  # on another number of ranks it may be any
            updates = {**updates, "every": rounds.told_every}
        _check(model, rounds, updates, new)
    return {key: part for key, part in saved.items() if key != "updates"}, new


def common(new: LoadedModel, rounds: Rounds) -> dict[str, Any]:
    """What is the same on all ranks of a saved run, theta_start and the outer optimizer as a checksum."""
    checksum, starts = 0, [start for _, start in sorted(new.start.items())]
    for leaf in tree_leaves([starts, new.outer_state]):
        is_tensor = isinstance(leaf, Tensor)
        part: Any = as_bytes(leaf.cpu().flatten()).numpy() if is_tensor else repr(leaf).encode()
        checksum = crc32(part, checksum)
    return {  # ranks may stand elsewhere in the same round
        "number of exchanges": rounds.num_sent(new.num_steps),
        "theta_start and outer state (a checksum)": checksum,
    }


def _at_a_rounds_end(saved: dict[str, Any], model: LocalModel, rounds: Rounds) -> dict[str, Any]:
    """A state from inside a round as of its end: e_n := e_n + theta_start - theta_n, so nothing is lost.

    What is added is scaled by tokens and clipped as when it is sent.
    """
    workers = saved["workers"]
    if not any(worker["updates"][0]["parameters"] for worker in workers.values()):
        return saved
    if model.is_sharded:
        raise StateError(
            "the saved state must be from a round's end to be loaded on other ranks or with other weights, "
            "as the model is sharded: call finish() before you save"
        )
    learned = {n: _learned(worker, saved["updates"]["start"]) for n, worker in workers.items()}
    tokens = {n: worker["updates"][0].get("tokens", ()) for n, worker in workers.items()}
    weights = torch.tensor([saved["weights"][int(n)] for n in workers])
    for part, names in enumerate(model.fragments):
        counted = torch.tensor([max(0.0, theirs[part]) for theirs in tokens.values() if theirs])
        scales = torch.ones(len(workers), dtype=torch.float64)
        if len(counted) == len(workers) and counted.any():
            scales *= len(workers) * counted / counted.sum()
        if rounds.clip_norm is not None:
            norms = [norm_of([own[n] for n in names if own] or [weights[:0]]) for own in learned.values()]
            scales *= clip_scales(torch.stack(norms), weights * scales, rounds.clip_norm)
        for own, scale in zip(learned.values(), scales.tolist(), strict=True):
            own |= {name: own[name] * scale for name in names if own}
    return {**saved, "workers": {n: _ended(worker, learned[n]) for n, worker in workers.items()}}


def _learned(worker: dict[str, Any], start: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a rank has learned since its round began, in float64; nothing if that is taken back."""
    (mine,) = worker["updates"]
    is_spoiled = not all(bool(torch.isfinite(own).all()) for own in mine["parameters"].values())
    if is_spoiled or any(mine["skipped"]):
        return {}
    return {
        name: mine["sent"].get(name, start[name]).to(own.dtype).double() - own.double()  # as it began
        for name, own in mine["parameters"].items()
    }


def _ended(worker: dict[str, Any], learned: dict[str, Tensor]) -> dict[str, Any]:
    if not learned:
        return worker
    entries = {}
    for name, parts in worker["entries"].items():
        if "residual" not in parts:
            raise StateError(
                f"the saved state must be from a round's end, or after finish(): {name!r} has no residual to "
                "take up what was learned since, and the ranks or their weights have changed"
            )
        residual = parts["residual"]
        entries[name] = {**parts, "residual": residual + learned[name].to(residual)}
    return {**worker, "entries": entries}


def _mean_of_ranks(saved: dict[str, Any], rounds: Rounds) -> dict[str, Any]:
    """What every rank goes on with at a round's end; the options of the optimizer are the first rank's."""
    kept, every = kept_ranks(saved), saved["updates"]["every"]
    workers = [saved["workers"][str(n)]["updates"][0] for n in kept]
    weights = [saved["weights"][n] for n in kept]
    states = [worker["optimizer"]["state"] for worker in workers]
    before = rounds._replace(every=every[kept[0]] if isinstance(every, list) else every)
    num_steps = workers[0]["num_steps"]
    if before != rounds:  # ranks must be as far in the order of fragments, not in steps
        num_steps = rounds.step_after(before.num_sent(num_steps))
    return {
        "num_steps": num_steps,
        "optimizer": {**workers[0]["optimizer"], "state": weighted_mean(states, weights)},
        "buffers": weighted_mean([worker["buffers"] for worker in workers], weights),
        **AT_A_ROUNDS_END,
    }


def load_into(model: LocalModel, new: LoadedModel) -> None:
    """Go on from what was loaded."""
    for name, start in new.start.items():
        model.start[name].copy_(start)
    model.write_back()
    for name, tensor in new.parameters.items():
        model.parameters.named[name].copy_(tensor)
    model.buffers.load(new.buffers)
    model.inner.load_state_dict(_completed(model.inner.param_groups, new.optimizer))
    for optimizer in model.inner.all if model.is_sharded else ():
        shard_state(optimizer)
    if model.outer is not None:
        model.outer.load_state_dict(_completed(model.outer.param_groups, new.outer_state))
    model.notices.taken()


def _completed(groups: list[dict[str, Any]], saved: dict[str, Any]) -> dict[str, Any]:
    """A copy, since optimizers go on in what they load; options that a group lacks are those of now."""
    told = [{**own, **group} for own, group in zip(groups, saved["param_groups"], strict=True)]
    return deepcopy({**saved, "param_groups": told})


def shard_state(optimizer: Optimizer) -> None:
    """Make DTensors of what was saved of them: this rank's parts, which have a part's shape."""
    for p, state in optimizer.state.items():
        for key, saved in state.items():
            if isinstance(saved, Tensor) and saved.shape == local(p).shape and not is_dtensor(saved):
                state[key] = like(saved, p)


def _check(model: LocalModel, rounds: Rounds, updates: dict[str, Any], new: LoadedModel) -> None:
    """Refuse a state of another optimizer, of other shapes, or with a NaN."""
    outer, buffers = describe_outer(model.outer), shapes_of(model.buffers.saved()["now"])
    begun, sent = shapes_of(new.buffers["start"]), shapes_of(new.sent)
    under_way = [name for names in model.fragments if not sent.keys().isdisjoint(names) for name in names]
    facts: list[tuple[str, Any, Any]] = [(time, getattr(rounds, time), updates[time]) for time in _TIMES]
    facts += [("every", rounds.told_every, updates["every"])]
    facts += [("optimizer", model.inner.kinds, updates["inner"])]
    if "held" in updates:
        facts += [("parameters of each optimizer", model.inner_names, updates["held"])]
    for option in outer.keys() & updates["outer"].keys():  # torch adds some from version to version
        facts += [(f"{option} of outer", outer[option], updates["outer"][option])]
    facts += [
        ("where the round began", model.parameters.shapes, shapes_of(new.start)),
        ("now", model.parameters.shapes, shapes_of({**new.parameters} or new.start)),
        ("a buffer", buffers, shapes_of(new.buffers["now"])),
        ("a buffer, where the round began", {name: buffers.get(name) for name in begun}, begun),
        ("what was sent", {name: model.parameters.shapes[name] for name in under_way}, sent),
        ("number of skipped fragments", rounds.fragments if sent else 0, len(new.skipped)),
    ]
    for what, own, found in facts:
        if isinstance(own, dict) and isinstance(found, dict):  # of each parameter: the first that differs
            name = next((n for n in {**found, **own} if own.get(n) != found.get(n)), "")
            what, own, found = f"shape of {name!r} ({what})", own.get(name), found.get(name)
        if own != found:
            raise StateError(f"{what} must be that of the saved state, {found!r}, got {own!r}")
    for name, tensor in new.start.items():
        if not bool(torch.isfinite(tensor).all()):
            raise StateError(f"start of {name!r} in the saved state must be finite, got a NaN or inf")
    check_integer("num_steps", new.num_steps, at_least=0, at_most=MOST_STEPS)
    for is_skipped in new.skipped:
        true_or_false("skipped", is_skipped)
    if len(new.tokens) not in (0, rounds.fragments):
        raise StateError(f"tokens must be counted of {rounds.fragments} fragments, got {len(new.tokens)}")
    for counted in new.tokens:
        check_number("tokens", counted, "finite and >= -1", lambda x: -1 <= x < math.inf)
    check_saved(model.inner.all, new.optimizer)
    if model.outer is not None:
        check_saved([model.outer], new.outer_state)
