"""A client: what it remembers from one of its rounds to the next, on its disk."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from regtopk.core.algorithm import Algorithm
from regtopk.core.worker import Layout, Worker
from regtopk.distributed.checkpoints.files import write_whole
from regtopk.errors import GradientError, StateError
from regtopk.integrations.flower.messages import (
    Accepted,
    Instruction,
    Model,
    Reply,
    checksum,
    from_flat,
    layout_of,
    spoiled_names,
    to_flat,
)
from regtopk.integrations.flower.one_message import first_request, learns_from_aggregates
from regtopk.wire import encode

FORMAT = 1


@dataclass
class _Sent:
    """What was sent last, until the server has said whether it arrived."""

    round: int
    token: str
    indices: Tensor
    values: Tensor


@dataclass
class _Memory:
    """What a client keeps of a round: the algorithm's state after it, and the model that it began with."""

    names: tuple[str, ...]
    layout: Layout
    state: Any
    model: Tensor
    sent: _Sent | None

    def packed(self) -> dict[str, Any]:
        """For the disk."""
        return {"state": self.state.state_dict(), "model": self.model, "sent": vars(self.sent)}


class Client:
    """One client's side of a round: an instruction and a trained model in, a reply out.

    a := e + (theta - theta_n)        what is left of earlier rounds, and what training changed in this one
    send x, chosen from a by the algorithm;  e := a - x

    What was sent stays known until the server's next instruction. If that says that the reply was accepted,
    it is forgotten. Otherwise it goes back into the residual, e := e + x: a lost reply is late, not lost.
    If the client is asked for the same round once more, it goes back to where it was before that round.
    A memory of another server is not used, and is replaced.

    RegTop-k learns from the aggregate of the round before, theta^{r-1} - theta^r. It has one if the client
    took part in that round and its reply was accepted. Otherwise it knows nothing and selects as Top-k does.

    Args:
        algorithm: what chooses the entries; see `check_algorithm`.
        path: the file that the memory is kept in; its folder is made.
        name: the client's name, the same whenever it is started, and no other client's.
    """

    def __init__(self, algorithm: Algorithm[Any], path: Path, *, name: str) -> None:
        self.algorithm, self.path, self.name = algorithm, path, name
        self._index = torch.tensor(crc32(name.encode()))

    @property
    def residual(self) -> Tensor | None:
        """What is kept of updates that were not sent, (J,); None before the first round."""
        memory, _ = self._load()
        return None if memory is None else memory.state.residual

    @torch.no_grad()
    def model_of(self, instruction: Instruction) -> Model:
        """The model that the round begins with.

        Raises:
            StateError: the rounds that were missed do not lead to it, from what this client has.
        """
        if instruction.model is not None:
            return instruction.model
        memory = self._before(instruction)
        if memory is None:
            raise StateError(f"client {self.name!r} must have an older model to add rounds to, got none")
        flat = memory.model
        for past in instruction.missed:
            flat = flat - past.aggregate(memory.layout.numel)
        if checksum(flat) != instruction.checksum:
            raise StateError(
                f"the older model of client {self.name!r} must lead to that of round {instruction.round}, "
                "got another checksum"
            )
        return from_flat(flat, memory.layout, instruction.whole, memory.names)

    @torch.no_grad()
    def reply(self, instruction: Instruction, model: Model, trained: Model) -> Reply:
        """What to send after training; it is on the disk when this returns.

        Args:
            instruction: the server's.
            model: what `model_of` made of it.
            trained: the same arrays after training.

        Raises:
            GradientError: the update is not finite; the memory has not changed.
            StateError: the arrays are not those of the model, or of the memory.
        """
        if set(trained) != set(model):
            raise StateError(f"trained arrays must be {sorted(model)}, got {sorted(trained)}")
        layout = layout_of(model, tuple(instruction.whole))
        start = to_flat(model, layout)
        update = start - to_flat(trained, layout)
        spoiled = spoiled_names(instruction.whole, trained)
        if spoiled or not bool(update.isfinite().all()):
            where = f"in {spoiled}" if spoiled else "in what it trained"
            raise GradientError(f"arrays of client {self.name!r} must be finite, got NaN or inf {where}")
        before = self._before(instruction)
        if before is not None and before.layout != layout:
            raise StateError(f"arrays must stay those in {self.path}, got other names or shapes")
        if before is None:
            state = self.algorithm.init(self._worker(layout, instruction.round, 1.0))
            now = _Memory(tuple(model), layout, state, start, None)
        else:
            now = replace(before, state=before.state.clone())
        share = self._settle(now, instruction, start)
        worker = self._worker(layout, instruction.round, share)
        sparse, conversation = first_request(self.algorithm, update, now.state, worker)
        conversation.close()  # the answer comes with the next round: `_settle` learns from it
        whole = {name: trained[name] for name in instruction.whole}
        reply = Reply(self.name, instruction.round, encode(sparse), whole)
        now.sent = _Sent(instruction.round, reply.token, *sparse.without_padding())
        now.model, now.names = start, tuple(model)
        self._save(now, before, instruction.server)
        return reply

    def _before(self, instruction: Instruction) -> _Memory | None:
        """The memory as it was when the round began; another attempt at it does not count."""
        now, before = self._load(instruction.server)
        accepted = instruction.accepted.get(self.name)
        if now is None or now.sent is None or now.sent.round != instruction.round:
            return now
        return now if accepted is not None and accepted.token == now.sent.token else before

    def _settle(self, memory: _Memory, instruction: Instruction, start: Tensor) -> float:
        """Take back what did not arrive, and learn from what did; the share w_n that the client had last."""
        sent, accepted = memory.sent, instruction.accepted.get(self.name, Accepted("", 1.0))
        state, memory.sent = memory.state, None
        if sent is None:
            return accepted.share
        has_arrived = accepted.token == sent.token
        if not has_arrived:
            state.residual.scatter_add_(0, sent.indices, sent.values)
        if learns_from_aggregates(state):
            if has_arrived and instruction.round == sent.round + 1:
                worker = self._worker(memory.layout, sent.round, accepted.share)
                state.remember(sent.indices, sent.values, memory.model - start, worker)
            else:
                state.own.zero_()  # an entry sent as zero counts as not sent: plain Top-k
        return accepted.share

    def _worker(self, layout: Layout, round: int, share: float) -> Worker:
        """The share is that of the last round that counts: this round's is not known before it ends."""
        return Worker(torch.tensor(share), self._index, 1, round - 1, layout=layout)

    def _load(self, server: str | None = None) -> tuple[_Memory | None, _Memory | None]:
        """The memory after the last round, and the one before it; None where there is none of this server."""
        if not self.path.is_file():
            return None, None
        try:
            saved = torch.load(self.path, weights_only=True)
            found = saved["format"]
        except Exception as error:
            raise StateError(f"{self.path} must hold the memory of a client, got {error}") from error
        if found != FORMAT:
            raise StateError(f"{self.path} must be of format {FORMAT}, got {found}")
        if server not in (None, saved["server"]):
            return None, None
        mine = (self.name, repr(self.algorithm.options()))
        theirs = (saved["client"], saved["algorithm"])
        if mine != theirs:
            raise StateError(f"{self.path} must be of client {mine}, got {theirs}")
        return self._unpacked(saved, "now"), self._unpacked(saved, "before")

    def _unpacked(self, saved: dict[str, Any], when: str) -> _Memory | None:
        part = saved[when]
        if part is None:
            return None
        layout = Layout.of_shapes((name, tuple(shape), kind) for name, shape, kind in saved["layout"])
        state = self.algorithm.init(self._worker(layout, 1, 1.0))
        state.load_state_dict(part["state"])
        return _Memory(tuple(saved["names"]), layout, state, part["model"], _Sent(**part["sent"]))

    def _save(self, now: _Memory, before: _Memory | None, server: str) -> None:
        """Write both memories: the new file is whole, or the old one stays."""
        saved = {
            "format": FORMAT,
            "server": server,
            "client": self.name,
            "algorithm": repr(self.algorithm.options()),
            "names": list(now.names),
            "layout": [(layer.name, list(layer.shape), layer.kind) for layer in now.layout.layers],
            "now": now.packed(),
            "before": None if before is None else before.packed(),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, lambda file: torch.save(saved, file))
