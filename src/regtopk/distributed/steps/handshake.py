"""What all ranks must agree on before a message, found out by asking every rank."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from regtopk.core.algorithm import Algorithm
from regtopk.core.worker import Layout, Worker, check_weights
from regtopk.distributed.options import Options
from regtopk.distributed.requests.rank import Rank, SumBuffer
from regtopk.distributed.state.shards import Shards
from regtopk.distributed.steps.driver import converse
from regtopk.distributed.transport.collectives import Alone, Collectives, by_rank, clear_errors, is_world
from regtopk.errors import ArgumentError, ClusterError, OracleError, RegtopkError, log

LONGEST_CLOSE_S = 10.0  # that a rank waits for the others: one that has failed does not come
_num_calls: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()  # roll calls of each group


def roll_call(collectives: Collectives, call: str, option: str, timeout_s: float) -> None:
    """See that every rank has made a call: each leaves its name in the group's store.

    A collective would wait for a missing rank until the process group's timeout, and not say who is missing.
    """
    store = collectives.store
    if store is None:
        return
    number = _num_calls.get(collectives.group, 0)
    keys = [f"regtopk/{number}/{call}/{rank}" for rank in range(collectives.num_workers)]
    missing: list[str] = []
    with clear_errors(call):
        store.set(keys[collectives.rank], "here")
        try:
            store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError:  # a timeout; if the store itself is gone, so is its answer to this
            ranks = zip(collectives.ranks, keys, strict=True)
            missing = [str(rank) for rank, key in ranks if not store.check([key])]
            if missing:
                store.delete_key(keys[collectives.rank])  # all ranks may try again
    if missing:
        who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(missing)} have"
        raise ClusterError(
            f"did every rank call {call}? {who} not after {timeout_s:g} s; if all do, and one is only "
            f"slow, give them a longer {option}"
        )
    _num_calls[collectives.group] = number + 1


@contextmanager
def together(collectives: Collectives, act: str, kind: type[RegtopkError]) -> Iterator[None]:
    """Let what is raised on one rank be raised on all: none may go on alone. Enter it on every rank."""
    error: Exception | None = None
    try:
        yield
    except Exception as problem:
        error = problem
    errors = collectives.all_gather_objects(error and f"{type(error).__name__}: {error}")
    if isinstance(error, RegtopkError):
        raise error
    for rank, theirs in zip(collectives.ranks, errors, strict=True):
        if theirs is not None:
            raise kind(f"rank {rank} cannot {act}: {theirs}") from error


def end_group(collectives: Collectives) -> None:
    """Destroy a group when all ranks are done with it. It must not hide what went wrong before."""
    # torch reuses the names of other groups, which then would not connect
    if not is_world(collectives.group):
        return
    try:
        roll_call(collectives, "close", "time", LONGEST_CLOSE_S)
    except ClusterError as error:
        log.warning("close() did not find all ranks: %s", error)
    dist.destroy_process_group(collectives.group)


def meet(
    ranks: Collectives, shards: Shards | None, mine: dict[str, Any], options: Options, call: str, every: int
) -> tuple[Tensor, list[int]]:
    """Compare the settings of all ranks; all their weights, (N,) float64, and their steps per round."""
    if shards is not None:
        _meet_shards(shards, ranks, {**mine, "every": every}, options, call)
    roll_call(ranks, call, "handshake_timeout_s", options.handshake_timeout_s)
    compare(ranks, mine)
    weights, everys = zip(*ranks.all_gather_objects((options.weight, every)), strict=True)
    return _shares(list(weights), ranks.ranks), list(everys)


def _shares(weights: list[Any], ranks: list[int]) -> Tensor:
    if all(weight is None for weight in weights):
        return check_weights(None, len(weights))
    are_numbers = all(type(weight) in (int, float) and 0 <= weight < math.inf for weight in weights)
    if not are_numbers or sum(weights) == 0:
        raise ArgumentError(
            "weight must be a number >= 0 on every rank and positive on one, or None on all, got "
            f"{by_rank(map(repr, weights), ranks)}"
        )
    total = sum(weights)
    is_share = abs(total - 1) <= 1e-6  # to the bit what was given
    return check_weights(weights if is_share else [weight / total for weight in weights], len(weights))


def _meet_shards(
    shards: Shards, replicas: Collectives, mine: dict[str, Any], options: Options, call: str
) -> None:
    """Compare the settings of the ranks that share a model. Every rank of the mesh hears what any finds."""
    timeout_s = options.handshake_timeout_s
    roll_call(shards.collectives, f"{call} along the shard axis", "handshake_timeout_s", timeout_s)
    axis = "along the replicate axis (one may still wait for another shard)"
    roll_call(replicas, f"{call} {axis}", "handshake_timeout_s", timeout_s)
    mine = {**mine, "weight": options.weight, "parameters": shards.whole, "shard": None}  # their parts differ
    found = difference(shards.collectives, mine)
    for replica, theirs in enumerate(replicas.all_gather_objects(found)):
        if theirs is not None:
            raise ClusterError(f"ranks that share a model must have the same {theirs} (replica {replica})")


def compare(collectives: Collectives, mine: dict[str, Any]) -> None:
    """Refuse ranks that differ in what all must have the same: every rank says in what and which."""
    found = difference(collectives, mine)
    if found is not None:
        raise ClusterError(f"all ranks must have the same {found}")


def difference(collectives: Collectives, mine: dict[str, Any]) -> str | None:
    """The first setting that is not the same on all ranks, and what each has; None if there is none."""
    everyone, ranks = collectives.all_gather_objects(mine), collectives.ranks
    for key in {key: None for theirs in everyone for key in theirs}:  # in order
        values: list[Any] = [theirs.get(key) for theirs in everyone]
        other = next((place for place, value in enumerate(values) if value != values[0]), None)
        if other is not None and key == "parameters":  # long: the first that differs is enough
            pairs = zip_longest(values[0], values[other])
            first, theirs = next(pair for pair in pairs if pair[0] != pair[1])
            return f"{key}, got {first} on rank {ranks[0]}, {theirs} on rank {ranks[other]}"
        if other is not None:
            return f"{key}, got {by_rank(map(repr, values), ranks)}"
    return None


def refuse_oracles(
    algorithm: Algorithm[Any], layout: Layout | None = None, device: torch.device | None = None
) -> None:
    """Run the algorithm as a cluster of one would, on zeros: it must not peek, and its options must fit."""
    worker = Worker(
        weight=torch.tensor(1.0, device=device),
        index=torch.tensor(0, device=device),
        num_workers=1,
        step=0,
        layout=layout or Layout.anonymous(max(8, getattr(algorithm, "k", None) or 0)),
    )
    conversation = algorithm.exchange(worker.zeros(), algorithm.init(worker), worker)
    try:
        converse(Rank(Alone(), check_weights(None, 1)), [conversation], [SumBuffer()])
    except OracleError as error:
        raise OracleError(f"algorithm {algorithm.name!r} {error}") from None
