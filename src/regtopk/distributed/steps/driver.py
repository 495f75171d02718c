"""Runs an algorithm on one rank of a process group, and answers its requests.

All ranks receive the same bits: messages are coded without loss, and sums run from zero in rank order in at
least float32, as in the simulator. `deterministic=False` lets the backend add uncoded dense vectors instead.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.algorithms.dense import Dense
from regtopk.core.algorithm import Algorithm, Conversation
from regtopk.core.precision import exchange
from regtopk.core.requests import Broadcast, DenseSum, FromOwners, Gather, Request, SparseSum, ToOwners
from regtopk.core.state import State
from regtopk.core.worker import Report, Worker
from regtopk.distributed.requests.gather import broadcast, gather
from regtopk.distributed.requests.owner_sums import dense_sum, from_owners, to_owners
from regtopk.distributed.requests.rank import Rank, SumBuffer
from regtopk.distributed.requests.sparse_sum import sparse_sums
from regtopk.distributed.state.buckets import Bucket, as_flat
from regtopk.distributed.steps.alike import Alike, Rows
from regtopk.errors import OracleError
from regtopk.kernels import Support

_TOGETHER: dict[type, Callable[[Rank, list[tuple[Any, SumBuffer]]], Sequence[Any]]] = {
    SparseSum: sparse_sums,
    ToOwners: to_owners,
    FromOwners: from_owners,
}
_ONE_BY_ONE: dict[type, Callable[..., Any]] = {DenseSum: dense_sum, Gather: gather, Broadcast: broadcast}
# A vector, and where it is not zero if it is a sparse sum as it was received.
Aggregate = tuple[Tensor, Support | None]


class Turn(NamedTuple):
    """What a step exchanges, and what its buckets have in common."""

    buckets: list[Bucket]
    flats: list[Tensor]  # the buckets' vectors
    number: int  # how many steps were made before
    report: Report | None
    is_dense: bool  # whether everything is sent
    is_bad: Tensor | None = None  # (), on the device: whether the states must stay as they are


class Part(NamedTuple):
    """What one conversation is about: a bucket, or several that are alike."""

    places: list[int]  # which of the buckets of a step they are
    algorithm: Algorithm[Any]
    flat: Tensor  # their gradients, (J,) or (U, 1, J)
    state: State  # which the conversation changes
    worker: Worker
    sums: SumBuffer  # where their sums are made
    rows: Rows | None = None  # what makes several of them one


def run(alike: Alike, rank: Rank, everyone: list[Bucket], turn: Turn) -> list[Aggregate]:
    """Turn the gradients of a step's buckets, which are some of everyone, into the aggregates."""
    with rank.timer.phase("select_s"):
        are_even = not turn.is_dense and not rank.idle and rank.index_code != "rice"
        groups = [[place] for place in range(len(turn.buckets))]
        if are_even and len(groups) > 1:
            groups = alike.groups(everyone, turn.buckets)
        parts = [_part(alike, places, turn) for places in groups]
        kept = [_kept(part.state, rank, turn) for part in parts]
        if turn.is_bad is not None:  # what algorithms make of a NaN is not known
            kernels.overwrite_if_(turn.is_bad, [part.flat for part in parts], 0.0)
        conversations = [exchange(p.algorithm, p.flat, p.state, p.worker) for p in parts]
        totals = converse(rank, conversations, [part.sums for part in parts])
    supports = [part.sums.support_of(total) for part, total in zip(parts, totals, strict=True)]
    _give_back([part.state for part in parts], kept, turn.is_bad)
    aggregates: dict[int, Aggregate] = {}
    for part, support, total in zip(parts, supports, totals, strict=True):
        if part.rows is not None:
            part.rows.show(part.state)
        part.sums.recycle(total, part.flat, *part.state.state_dict().values())
        rows = [total] if part.rows is None else total.squeeze(1).unbind()
        aggregates |= {place: (row, support) for place, row in zip(part.places, rows, strict=True)}
    return [aggregates[place] for place in sorted(aggregates)]


def _part(alike: Alike, places: list[int], turn: Turn) -> Part:
    """What the conversation of some buckets, which are alike if there are several, is about."""
    bucket, flat, rows = turn.buckets[places[0]], turn.flats[places[0]], None
    algorithm, state, worker, sums = bucket.algorithm, bucket.state, bucket.worker, bucket.sums
    if len(places) > 1:
        rows = alike.rows_of([turn.buckets[place] for place in places])
        flats = [turn.flats[place] for place in places]
        whole = as_flat(flats, flats[0].dtype)  # without a copy if they lie one after another in memory
        flat = torch.stack(flats).unsqueeze(1) if whole is None else whole.view(len(flats), 1, -1)
        state, worker, sums = rows.state(), rows.worker, rows.sums
    elif turn.is_dense:
        algorithm = Dense()
        state = algorithm.init(worker)
    sums.total = None
    worker = worker.at(turn.number, turn.report)
    return Part(places, algorithm, flat, state, worker, sums, rows)


def converse(rank: Rank, conversations: Sequence[Conversation], sums: Sequence[SumBuffer]) -> list[Tensor]:
    """Run the conversations of several buckets to their ends, side by side, and return the aggregates.

    Sparse vectors that are sent at the same time travel together. What is wrong with a message is raised
    before anything else is sent, or by `rank.raise_refusals()` when the caller has nothing left to launch.
    """
    aggregates: dict[int, Tensor] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(conversations)))
    while True:
        requests: dict[int, Request] = {}
        for number, given in answers.items():
            try:
                requests[number] = conversations[number].send(given)
            except StopIteration as done:
                aggregates[number] = done.value
        if not requests:
            return [aggregates[number] for number in range(len(conversations))]
        found = answer(rank, list(requests.values()), [sums[number] for number in requests])
        answers = dict(zip(requests, found, strict=True))


def answer(rank: Rank, requests: Sequence[Request], sums: Sequence[SumBuffer]) -> list[Any]:
    """What the cluster makes of requests, at most one of each bucket: all ranks must make the same kinds."""
    rank.raise_refusals()
    found: dict[int, Any] = {}
    for kind, answers in _TOGETHER.items():
        places = [place for place, asked in enumerate(requests) if isinstance(asked, kind)]
        if places:
            totals = answers(rank, [(requests[place], sums[place]) for place in places])
            found |= zip(places, totals, strict=True)
    for place, asked in enumerate(requests):
        if place in found:
            continue
        one = next((one for kind, one in _ONE_BY_ONE.items() if isinstance(asked, kind)), None)
        if one is None:
            raise OracleError(
                "peeks at the sum of all workers' vectors before anything is sent: only a simulator can "
                "answer that (regtopk.simulate.Cluster), a real cluster cannot"
            )
        found[place] = one(rank, asked)
    return [found[place] for place in range(len(requests))]


def _kept(state: State, rank: Rank, turn: Turn) -> dict[str, Tensor]:
    """A copy of what a step may not change: of a rank of weight zero its own, all if the step may be bad."""
    fields, rules = state.state_dict(), state.rules()
    own = [name for name in fields if turn.is_bad is not None or (rank.is_idle and rules[name] != "shared")]
    return {name: fields[name].clone() for name in own}


def _give_back(states: list[State], kept: list[dict[str, Tensor]], is_bad: Tensor | None) -> None:
    """Give states what was kept, if the step is bad; in the place of the new: programs know its address."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for state, fields in zip(states, kept, strict=True):
        for name, old in fields.items():
            new = getattr(state, name)
            if is_bad is None or (old.shape != new.shape and bool(is_bad)):
                setattr(state, name, old)
            elif old.shape == new.shape:
                pairs.append((new, old))
    if is_bad is not None:
        kernels.overwrite_if_(is_bad, [new for new, _ in pairs], [old for _, old in pairs])
