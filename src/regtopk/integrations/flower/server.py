"""The server: it sums what sampled clients sent, and knows what each of them has."""

import secrets
from collections.abc import Callable, Mapping

import torch

from regtopk.errors import RegtopkError, StateError
from regtopk.integrations.flower import messages
from regtopk.integrations.flower.messages import Accepted, Instruction, Model, PastRound, Reply
from regtopk.wire import decode

MAX_WEIGHT = 2.0**53  # whole numbers up to it are exact, and sums of them do not overflow
Skip = Callable[[str], bool]


def is_statistic(name: str) -> bool:
    """Whether an array is a running statistic of a batch norm, going by its name."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")


class Server:
    """Holds the model, and applies one round of replies after another.

    theta := theta - sum_n w_n x_n        over the clients whose replies were accepted, in order of names

    x_n is what client n sent of theta - theta_n and its residual, w_n its part of their weights.

    A node is an address that clients are asked at, and may change. One that replied has that round's model.

    Args:
        skip: a callable of an array's name: True sends it whole, and averages it as FedAvg does. Arrays that
            are not float32 always travel whole.
        sparse_down: whether a node that has an older model is sent the frames of the rounds since then, if
            they are fewer bytes than the model.
    """

    def __init__(self, *, skip: Skip = is_statistic, sparse_down: bool = True) -> None:
        self._name = secrets.token_hex(8)  # another server's rounds have the same numbers
        self._skip = skip
        self._sparse_down = sparse_down
        self._names: tuple[str, ...] = ()
        self._whole: Model = {}
        self._flat = torch.zeros(0)
        self._round = 0
        self._past: dict[int, PastRound] = {}
        self._accepted: dict[str, Accepted] = {}
        self._client_at: dict[int, str] = {}
        self._round_of_model_at: dict[int, int] = {}
        self._asked: set[int] = set()

    @property
    def model(self) -> Model:
        """All arrays, in their order."""
        return messages.from_flat(self._flat.clone(), self._layout, self._whole, self._names)

    def begin(self, round: int, model: Model) -> None:
        """Start a round with a model. If the last round ended with another, it is sent whole to all."""
        whole = [name for name, x in model.items() if x.dtype != torch.float32 or self._skip(name)]
        layout = messages.layout_of(model, whole)
        if layout.numel == 0:
            raise StateError("model must have an array of float32 that is not skipped, got none")
        flat = messages.to_flat(model, layout)
        is_same = self._names == tuple(model) and round == self._round + 1 and torch.equal(flat, self._flat)
        if not is_same:
            self._past.clear()
            self._round_of_model_at.clear()
        self._layout, self._names, self._flat, self._round = layout, tuple(model), flat, round
        self._whole = {name: model[name] for name in whole}

    def instruction(self, node: int) -> Instruction:
        """What to tell a node in this round."""
        client = self._client_at.get(node)
        # A node that has not replied yet may be a client that was started anew: it finds itself among all.
        known = self._accepted if client is None else {client: self._accepted[client]}
        rounds = range(self._round_of_model_at.get(node, 0), self._round)  # there is no round 0
        is_shorter = self._sparse_down and all(number in self._past for number in rounds)
        missed = [self._past[number] for number in rounds] if is_shorter else None  # since the model it has
        self._asked.add(node)
        return Instruction(
            server=self._name,
            round=self._round,
            checksum=messages.checksum(self._flat),
            accepted=dict(known),
            whole=list(self._whole),
            arrays=self.model if missed is None else self._whole,
            missed=missed,
        )

    def check(self, reply: Reply, weight: float) -> None:
        """Refuse a reply of another round, or whose arrays, weight or frame do not fit."""
        if reply.round != self._round:
            raise StateError(f"round of a reply must be {self._round}, got {reply.round}")
        if not 0 < weight <= MAX_WEIGHT:
            raise StateError(f"weight of a reply must be above 0 and at most {MAX_WEIGHT:g}, got {weight}")
        found, wanted = (
            {name: (tuple(array.shape), array.dtype) for name, array in model.items()}
            for model in (reply.whole, self._whole)
        )
        if found != wanted:
            raise StateError(f"arrays that travel whole must be {wanted}, got {found}")
        if spoiled := messages.spoiled_names(self._whole, reply.whole):
            raise StateError(f"arrays that travel whole must be finite, got NaN or inf in {spoiled}")
        values = decode(reply.frame, self._layout.numel).values
        if values.dtype != torch.float32:
            raise StateError(f"values of a frame must be float32, as the model is, got {values.dtype}")

    def finish(self, replies: Mapping[int, tuple[Reply, float]]) -> dict[int, RegtopkError]:
        """End the round with the replies that came, by node, and their weights, which need no fixed sum.

        Returns:
            The nodes whose replies were refused, and why. The others' are in the model.
        """
        taken: dict[str, tuple[int, Reply, float]] = {}
        refused: dict[int, RegtopkError] = {}
        for node, (reply, weight) in replies.items():
            try:
                self.check(reply, weight)
                if reply.client in taken:
                    raise StateError(f"clients must have names of their own, got {reply.client!r} twice")
                taken[reply.client] = node, reply, weight
            except RegtopkError as error:
                refused[node] = error
        in_order = [taken[client] for client in sorted(taken)]
        total = sum(weight for _, _, weight in in_order)
        shares = [weight / total for _, _, weight in in_order]
        past = PastRound(tuple(reply.frame for _, reply, _ in in_order), tuple(shares))
        flat = self._flat - past.aggregate(self._layout.numel)
        whole = _mean_of([reply.whole for _, reply, _ in in_order], shares) or self._whole
        before, after = self.model, messages.from_flat(flat, self._layout, whole, self._names)
        if spoiled := messages.spoiled_names(before, after):
            reason = f"model must stay finite, got NaN or inf in {spoiled} of round {self._round}'s replies"
            self.finish({})
            return {**refused, **{node: StateError(reason) for node, _, _ in in_order}}
        self._flat, self._whole = flat, whole
        for node in self._asked:  # one whose reply did not come may have either model: it gets the next whole
            self._round_of_model_at.pop(node, None)
        self._asked.clear()
        for (node, reply, _), share in zip(in_order, shares, strict=True):
            self._accepted[reply.client] = Accepted(reply.token, share)
            self._client_at[node] = reply.client
            self._round_of_model_at[node] = self._round
        self._keep(past)
        return refused

    def _keep(self, past: PastRound) -> None:
        """Keep a round as long as all since then are fewer bytes than the model."""
        self._past[self._round] = past
        num_bytes = 0
        for kept in sorted(self._past, reverse=True):
            num_bytes += self._past[kept].num_bytes
            if num_bytes >= 4 * self._layout.numel:
                del self._past[kept]


def _mean_of(models: list[Model], shares: list[float]) -> Model:
    """The weighted mean of arrays of numbers with a fraction; of others the first client's."""
    means = dict(models[0]) if models else {}
    for name, first in means.items():
        if first.is_floating_point():
            parts = (share * model[name] for model, share in zip(models, shares, strict=True))
            means[name] = sum(parts, torch.zeros_like(first))
    return means
