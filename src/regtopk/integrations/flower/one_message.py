"""Which algorithms a client can run, and what they send: one message a round, before any answer."""

from typing import Any

import torch
from torch import Tensor

from regtopk.algorithms.posterior import ScoredState
from regtopk.core.algorithm import Algorithm, check_is_algorithm
from regtopk.core.requests import SparseSum
from regtopk.core.sparse import SparseGradient
from regtopk.core.worker import Layout, Worker
from regtopk.errors import ArgumentError


def first_request(algorithm: Algorithm[Any], update: Tensor, state: Any, worker: Worker) -> SparseGradient:
    """What an algorithm sends of an update; the state is then the one to keep.

    Raises:
        ArgumentError: it asks for anything but a sparse sum.
    """
    conversation = algorithm.exchange(update, state, worker)
    request = next(conversation)
    conversation.close()  # the answer is not there before the next round: `Client` brings it in then
    if type(request) is not SparseSum or request.sparse.numel != worker.numel:
        raise ArgumentError(
            "algorithm must send one sparse vector of the whole model a round and need no answer in it, got "
            f"{algorithm.name!r} with its {type(request).__name__}"
        )
    return request.sparse


def check_algorithm(algorithm: Algorithm[Any]) -> None:
    """Refuse an algorithm that a server with sampled clients cannot run.

    A client sends one message a round, and hears of the others at the earliest with the next model. So the
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
    first_request(algorithm, grad, kept, worker)
    for answer in (torch.zeros_like(grad), grad.flip(0)):
        state = algorithm.init(worker)
        if not _only_learns_from(algorithm, grad, state, worker, answer) or not _is_same(kept, state):
            raise ArgumentError(
                "algorithm must need one sparse sum a round and apply it as it is, got "
                f"{algorithm.name!r}, which needs what the others sent in the same round"
            )


def _only_learns_from(
    algorithm: Algorithm[Any], grad: Tensor, state: Any, worker: Worker, answer: Tensor
) -> bool:
    """Whether the conversation ends with the answer, unchanged."""
    conversation = algorithm.exchange(grad, state, worker)
    next(conversation)
    try:
        conversation.send(answer.clone())
    except StopIteration as done:
        return done.value.shape == answer.shape and torch.equal(done.value, answer)
    conversation.close()
    return False


def _is_same(kept: Any, state: Any) -> bool:
    """Whether two states differ at most in what a score learns from an answer."""
    learned = {"indices", "own", "aggregate"} if learns_from_aggregates(state) else set()
    return all(
        torch.equal(tensor, state.state_dict()[name])
        for name, tensor in kept.state_dict().items()
        if name not in learned
    )


def learns_from_aggregates(state: Any) -> bool:
    """Whether the algorithm that has this state scores entries by what became of them."""
    return isinstance(state, ScoredState) and state.indices.numel() > 0
