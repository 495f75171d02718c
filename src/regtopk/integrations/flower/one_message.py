"""Which algorithms a client can run, and what they send: one message per round, before any answer."""

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from regtopk.algorithms.posterior import ScoredState
from regtopk.core.algorithm import Algorithm, check_is_algorithm
from regtopk.core.requests import SparseSum
from regtopk.core.sparse import SparseGradient
from regtopk.core.worker import Layout, Worker
from regtopk.errors import ArgumentError


def first_request(
    algorithm: Algorithm[Any], update: Tensor, state: Any, worker: Worker
) -> tuple[SparseGradient, Generator[Any, Any, Tensor]]:
    """What an algorithm sends of an update, and the conversation, which waits for the answer.

    Raises:
        ArgumentError: it asks for anything but a sparse sum.
    """
    conversation = algorithm.exchange(update, state, worker)
    request = next(conversation)
    if type(request) is not SparseSum or request.sparse.numel != worker.numel:
        raise ArgumentError(
            "algorithm must send one sparse vector of the whole model per round and need no answer in it, "
            f"got {algorithm.name!r} with its {type(request).__name__}"
        )
    return request.sparse, conversation


def check_algorithm(algorithm: Algorithm[Any]) -> None:
    """Refuse an algorithm that a server with sampled clients cannot run.

    A client sends one message per round, and hears of the others at the earliest with the next model. So the
    algorithm must ask for one sparse sum, use it as it is, and conserve: sent + residual = residual + update.

    Raises:
        ArgumentError: it does not, with these options.
    """
    check_is_algorithm(algorithm)
    impute = getattr(algorithm, "impute", 0.0)
    if impute != 0.0:
        raise ArgumentError(
            "impute must be 0 with sampled clients, because it pays for what others sent in the same round, "
            f"got {impute!r}"
        )
    if "conserves" not in algorithm.promises:
        raise ArgumentError(
            "algorithm must conserve each client's own update, because clients are sampled, got "
            f"{algorithm.name!r}, which does not with its options {algorithm.options()}"
        )
    layout = Layout.anonymous(max(64, getattr(algorithm, "k", None) or 0))
    worker = Worker(torch.tensor(1.0), torch.tensor(0), 1, 0, layout)
    grad = torch.linspace(-1.0, 2.0, layout.numel)
    kept = algorithm.init(worker)
    first_request(algorithm, grad, kept, worker)[1].close()
    for answer in (torch.zeros_like(grad), grad.flip(0)):
        state = algorithm.init(worker)
        _, conversation = first_request(algorithm, grad, state, worker)
        if not _ends_with(conversation, answer) or not _is_same(kept, state):
            raise ArgumentError(
                "algorithm must need one sparse sum per round and apply it as it is, got "
                f"{algorithm.name!r}, which needs what the others sent in the same round"
            )


def _ends_with(conversation: Generator[Any, Any, Tensor], answer: Tensor) -> bool:
    """Whether a conversation ends with the answer, unchanged."""
    try:
        conversation.send(answer.clone())
    except StopIteration as done:
        return done.value.shape == answer.shape and torch.equal(done.value, answer)
    conversation.close()
    return False


def _is_same(kept: Any, state: Any) -> bool:
    """Whether two states differ at most in what a score learns from an answer."""
    learned = {"indices", "own", "aggregate"} if learns_from_aggregates(state) else set()
    now = state.state_dict()
    return all(name in learned or torch.equal(old, now[name]) for name, old in kept.state_dict().items())


def learns_from_aggregates(state: Any) -> bool:
    """Whether the algorithm that has this state scores entries by what became of them."""
    return isinstance(state, ScoredState) and state.indices.numel() > 0
