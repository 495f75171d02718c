"""What all ranks must agree on before a message, found out by asking every rank."""

import logging
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from regtopk._version import __version__
from regtopk.core.algorithm import Algorithm, Conversation
from regtopk.core.requests import Broadcast, DenseSum, Gather, Gathered, OfSenders, Peek, SenderSum, SparseSum
from regtopk.core.sparse import to_dense
from regtopk.core.worker import Layout, Worker, check_weights
from regtopk.distributed.options import Options
from regtopk.distributed.state.shards import Shards
from regtopk.distributed.steps.driver import PEEKS
from regtopk.distributed.transport.collectives import Collectives, by_rank, clear_errors, is_world
from regtopk.errors import ArgumentError, ClusterError, OracleError

LONGEST_CLOSE_S = 10.0  # that a rank waits for the others: one that has failed does not come
_log = logging.getLogger("regtopk")
_num_calls: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()  # roll calls of each group


def roll_call(collectives: Collectives, call: str, option: str, timeout_s: float) -> None:
    """See that every rank has made a call, before a collective that would wait for a missing one.

    Such a collective ends with the process group's timeout (half an hour unless it was set), and does not say
    who is missing. So every rank first leaves its name in the group's store.

    Raises:
        ClusterError: some ranks have not called after `timeout_s`; they are named.
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
            missing = [
                str(rank) for rank, key in zip(collectives.ranks, keys, strict=True) if not store.check([key])
            ]
            if missing:
                store.delete_key(keys[collectives.rank])  # all ranks may try again
    if missing:
        ranks = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(missing)} have"
        raise ClusterError(
            f"did every rank call {call}? {ranks} not after {timeout_s:g} s; if all do, and one is only "
            f"slow, give them a longer {option}"
        )
    _num_calls[collectives.group] = number + 1


def end_group(collectives: Collectives) -> None:
    """Destroy a group when all ranks are done with it. It must not hide what went wrong before."""
    # torch reuses the names of other groups, which then would not connect
    if not is_world(collectives.group):
        return
    try:
        roll_call(collectives, "close", "time", LONGEST_CLOSE_S)
    except ClusterError as error:
        _log.warning("close() did not find all ranks: %s", error)
    dist.destroy_process_group(collectives.group)


def agree(
    collectives: Collectives, algorithm: Algorithm[Any], weight: float | None, settings: dict[str, Any]
) -> Tensor:
    """Compare all ranks' settings, and return all their weights, (N,) float64.

    Raises:
        ClusterError: the ranks differ; every rank says in what and which.
        ArgumentError: the weights are not weights.
    """
    everyone = collectives.all_gather_objects((described(algorithm, settings), weight))
    _refuse_difference([theirs for theirs, _ in everyone], collectives.ranks)
    weights = [theirs for _, theirs in everyone]
    if all(theirs is None for theirs in weights):
        return check_weights(None, collectives.num_workers)
    if any(theirs is None for theirs in weights):
        raise ArgumentError(f"weight must be given on all ranks or on none, got {weights}")
    if any(type(theirs) not in (int, float) for theirs in weights):
        raise ArgumentError(f"weight must be a number on every rank, got {weights}")
    return check_weights(weights, collectives.num_workers)


def meet_shards(
    shards: Shards,
    replicas: Collectives,
    algorithm: Algorithm[Any],
    options: Options,
    settings: dict[str, Any],
    call: str,
) -> None:
    """Compare the settings of the ranks that share a model. Every rank of the mesh hears what any finds.

    Raises:
        ClusterError: they differ, or a rank is missing.
    """
    timeout_s = options.handshake_timeout_s
    roll_call(shards.collectives, f"{call} along the shard axis", "handshake_timeout_s", timeout_s)
    axis = "along the replicate axis (one may still wait for another shard)"
    roll_call(replicas, f"{call} {axis}", "handshake_timeout_s", timeout_s)
    mine = {**described(algorithm, settings), "weight": options.weight}
    mine |= {"parameters": shards.whole, "shard": None}  # their parts differ
    difference = _difference(shards.collectives.all_gather_objects(mine), shards.collectives.ranks)
    for replica, theirs in enumerate(replicas.all_gather_objects(difference)):
        if theirs is not None:
            raise ClusterError(
                f"all ranks that share a model must have the same {theirs}, which share replica {replica}"
            )


def compare(collectives: Collectives, mine: dict[str, Any]) -> None:
    """Compare what all ranks must have the same.

    Raises:
        ClusterError: the ranks differ; every rank says in what and which.
    """
    _refuse_difference(collectives.all_gather_objects(mine), collectives.ranks)


def _refuse_difference(everyone: list[dict[str, Any]], ranks: list[int]) -> None:
    difference = _difference(everyone, ranks)
    if difference is not None:
        raise ClusterError(f"all ranks must have the same {difference}")


def described(algorithm: Algorithm[Any], settings: dict[str, Any]) -> dict[str, Any]:
    """All that ranks must have the same, by name."""
    options = {f"{algorithm.name} {key}": value for key, value in algorithm.options().items()}
    return {"regtopk version": __version__, "algorithm": algorithm.name, **options, **settings}


def _difference(everyone: list[dict[str, Any]], ranks: list[int]) -> str | None:
    """The first setting that is not the same on all ranks, and what each has; None if there is none."""
    for key in {key: None for theirs in everyone for key in theirs}:  # in order
        values: list[Any] = [theirs.get(key) for theirs in everyone]
        if any(value != values[0] for value in values):
            is_long = key == "parameters"
            told = _first_difference(values, ranks) if is_long else by_rank(map(repr, values), ranks)
            return f"{key}, got {told}"
    return None


def _first_difference(values: list[list[Any]], ranks: list[int]) -> str:
    other = next(place for place, value in enumerate(values) if value != values[0])
    here, there = f"on rank {ranks[0]}", f"on rank {ranks[other]}"
    for mine, theirs in zip(values[0], values[other], strict=False):
        if mine != theirs:
            return f"{mine} {here}, {theirs} {there}"
    return f"{len(values[0])} parameters {here}, {len(values[other])} {there}"


def refuse_oracles(
    algorithm: Algorithm[Any], layout: Layout | None = None, device: torch.device | None = None
) -> None:
    """Talk to the algorithm as a cluster of one would, on zeros, and see whether it peeks.

    Raises:
        OracleError: it does.
        ArgumentError: its options do not fit the layout.
    """
    worker = Worker(
        weight=torch.tensor(1.0, device=device),
        index=torch.tensor(0, device=device),
        num_workers=1,
        step=0,
        layout=layout or Layout.anonymous(max(8, getattr(algorithm, "k", None) or 0)),
    )
    conversation: Conversation = algorithm.exchange(worker.zeros(), algorithm.init(worker), worker)
    try:
        request = next(conversation)
        while not isinstance(request, Peek):
            request = conversation.send(_echo(request))
    except StopIteration:
        return
    raise OracleError(f"algorithm {algorithm.name!r} {PEEKS}")


def _echo(request: SparseSum | DenseSum | Gather | Broadcast) -> Any:
    if isinstance(request, SparseSum):
        indices, values = request.sparse.without_padding()
        total = to_dense(indices, values, request.sparse.numel)
        if not isinstance(request, SenderSum):
            return total
        one = torch.ones(1, dtype=total.dtype, device=total.device)
        return OfSenders.of(total, torch.ones_like(total), indices, one)
    if isinstance(request, Gather):
        rows = request.tensor.unsqueeze(0)
        count = torch.tensor(rows.shape[-1]) if request.count is None else request.count
        return Gathered(rows, count.reshape(1))
    return request.tensor
