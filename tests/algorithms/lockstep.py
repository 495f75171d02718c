"""N ranks in one process, each with a conversation of its own on vectors of shape (J,).

The other way to run an algorithm, as a cluster does: no batch dimension anywhere, and every answer is made
in a plain loop over the ranks that shares no code with the simulator's driver.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from regtopk.core.algorithm import Algorithm
from regtopk.core.codes import quantise
from regtopk.core.regions import dense_regions
from regtopk.core.requests import (
    Broadcast,
    DenseSum,
    FromOwners,
    Gather,
    Gathered,
    OfSenders,
    Peek,
    SenderSum,
    SparseSum,
    ToOwners,
)
from regtopk.core.state import State, accumulation_dtype
from regtopk.core.worker import Layout, Worker

Round = list[Any]  # the requests that the ranks made together, in rank order


class LockStep:
    """Runs a step's conversations together and remembers what was asked."""

    def __init__(
        self, algorithm: Algorithm[Any], weights: list[float], layout: Layout, dtype: torch.dtype
    ) -> None:
        self.algorithm = algorithm
        self.dtype = accumulation_dtype(dtype)
        self.num_steps = 0
        self.workers = [
            Worker(torch.tensor(weight, dtype=self.dtype), torch.tensor(rank), len(weights), 0, layout)
            for rank, weight in enumerate(weights)
        ]
        self.states: list[State] = [algorithm.init(worker) for worker in self.workers]

    def step(self, grads: Tensor) -> tuple[list[Tensor], list[Round]]:
        """One step: every rank's aggregate, and the rounds of requests it took."""
        aggregates, rounds = self._converse(grads, self.states)
        self.num_steps += 1
        return aggregates, rounds

    def step_alone_and_together(self, grads: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """One step: what each rank's message alone would add to the model, (J,) each; and the aggregates.

        For the former the step is run on copies, with the last sum answered to every rank by its own message
        at weight one: the aggregate it then returns is what it sent, whatever the message looked like.
        """
        before = deepcopy(self.states)
        aggregates, rounds = self._converse(grads, self.states)
        last_sum = max(i for i, asked in enumerate(rounds) if isinstance(asked[0], (SparseSum, DenseSum)))
        alone, _ = self._converse(grads, before, echo_round=last_sum)
        self.num_steps += 1
        return alone, aggregates

    def _converse(
        self, grads: Tensor, states: list[State], echo_round: int | None = None
    ) -> tuple[list[Tensor], list[Round]]:
        conversations = [
            self.algorithm.exchange(grad, state, worker.at(self.num_steps, None))
            for grad, state, worker in zip(grads, states, self.workers, strict=True)
        ]
        rounds = [[next(conversation) for conversation in conversations]]
        while True:
            asked = rounds[-1]
            if echo_round == len(rounds) - 1:
                answers = [self._answer([request], is_echo=True) for request in asked]
            elif isinstance(asked[0], ToOwners):
                answers = _owned(asked)
            else:
                answers = [self._answer(asked, is_echo=False)] * len(asked)
            requests, aggregates = [], []
            for conversation, answer in zip(conversations, answers, strict=True):
                try:
                    requests.append(conversation.send(deepcopy(answer)))
                except StopIteration as done:
                    aggregates.append(done.value)
            if aggregates:
                assert not requests, "some ranks ended before others"
                return aggregates, rounds
            rounds.append(requests)

    def _answer(self, asked: Round, *, is_echo: bool) -> Any:
        kinds = {type(request) for request in asked}
        assert len(kinds) == 1, f"ranks asked different things: {kinds}"
        first = asked[0]
        if isinstance(first, Gather):
            return _gathered(asked)
        if isinstance(first, FromOwners):
            return _from_owners(asked)
        if isinstance(first, Broadcast):
            return asked[first.source].tensor
        weights = [torch.ones((), dtype=self.dtype) if is_echo else request.weight for request in asked]
        rows = [_weighted(request, weight) for request, weight in zip(asked, weights, strict=True)]
        total = torch.zeros_like(rows[0])
        for row in rows:
            total = total + row
        if isinstance(first, DenseSum) and first.loss is not None:
            return self._coded(total, asked)
        return _of_senders(asked, total, weights) if isinstance(first, SenderSum) else total

    def _coded(self, total: Tensor, asked: Round) -> Tensor:
        """Each owner codes the sums of its region, and finds what that lost, over its weight."""
        bounds = dense_regions(total.numel(), [float(worker.weight) for worker in self.workers])
        coded = torch.zeros_like(total)
        for request, (start, end) in zip(asked, bounds, strict=True):
            request.loss.zero_()
            if start < end:
                coded[start:end] = quantise(total[start:end], request.sum_code)
                request.loss[start:end] = (total[start:end] - coded[start:end]) / request.weight
        return coded


def _weighted(request: SparseSum | DenseSum | Peek, weight: Tensor) -> Tensor:
    if not isinstance(request, SparseSum):
        return request.tensor.to(weight.dtype) * weight
    sparse = request.sparse
    count = int(sparse.counts)
    indices, values = sparse.indices[:count], sparse.values[:count]
    assert bool((indices.diff() > 0).all()), "indices must ascend and be distinct"
    row = torch.zeros(sparse.numel, dtype=weight.dtype)
    row[indices] = weight * values
    return row


def _of_senders(asked: Round, total: Tensor, weights: list[Tensor]) -> OfSenders:
    """Sums of weights run in rank order from zero."""
    sent, named = torch.zeros_like(total), torch.zeros_like(total, dtype=torch.bool)
    everyone = torch.zeros_like(weights[0])
    for request, weight in zip(asked, weights, strict=True):
        support = request.sparse.indices[: int(request.sparse.counts)]
        sent[support] += weight
        named[support] = True
        everyone = everyone + weight
    entries = named.nonzero().flatten()
    return OfSenders(total, entries, total[entries] / sent[entries], everyone - sent[entries])


def _owned(asked: Round) -> list[Tensor]:
    """What each owner is sent, added in rank order from zero; every rank here is an owner."""
    sums = []
    for owner, mine in enumerate(asked):
        total = torch.zeros(mine.sparse.numel, dtype=mine.weight.dtype)
        for request in asked:
            count = int(request.sparse.count[owner])
            places, values = (t[owner][:count] for t in (request.sparse.indices, request.sparse.values))
            assert bool((places.diff() > 0).all()), "places must ascend and be distinct"
            total[places] += request.weight * values
        sums.append(total)
    return sums


def _from_owners(asked: Round) -> Tensor:
    """Entry j is number j // N of owner j mod N."""
    total = torch.zeros(asked[0].numel, dtype=asked[0].sparse.values.dtype)
    for owner, request in enumerate(asked):
        entries, values = request.sparse.indices * len(asked) + owner, request.sparse.values
        is_there = entries < len(total)
        total[entries[is_there]] = values[is_there]
        assert not values[~is_there].any(), "an owner has sent an entry that is not there"
    return total


def _gathered(asked: Round) -> Gathered:
    counts = [torch.tensor(len(x.tensor)) if x.count is None else x.count for x in asked]
    rows = torch.nn.utils.rnn.pad_sequence([request.tensor for request in asked], batch_first=True)
    return Gathered(rows, torch.stack(counts))
