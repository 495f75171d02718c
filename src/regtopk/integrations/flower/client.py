"""A client: which algorithms it can run, and what it remembers from round to round, on its disk."""

import io
from collections.abc import Generator
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from regtopk.algorithms.posterior import ScoredState
from regtopk.core.algorithm import Algorithm, check_is_algorithm
from regtopk.core.requests import SparseSum
from regtopk.core.sparse import SparseGradient
from regtopk.core.state import State
from regtopk.core.worker import Layout, Worker
from regtopk.distributed.checkpoints.files import write_whole
from regtopk.distributed.state.saved import check_state
from regtopk.errors import ArgumentError, GradientError, StateError
from regtopk.integrations.flower import messages
from regtopk.integrations.flower.messages import Accepted, Instruction, Model, Reply
from regtopk.wire import encode

FORMAT = 1
HEAD = b"regtopk-memory:"  # what the file of a memory begins with


def check_algorithm(algorithm: Algorithm[Any]) -> None:
    """Refuse an algorithm that a server with sampled clients cannot run.

    A client sends one message per round, and hears of the others at the earliest with the next model. So the
    algorithm must ask for one sparse sum, use it as it is, and conserve: sent + residual = residual + update.
    """
    check_is_algorithm(algorithm)
    got = f"got {algorithm.name!r} with its options {algorithm.options()}"
    if "conserves" not in algorithm.promises:
        raise ArgumentError(
            f"algorithm must conserve each client's own update, because clients are sampled, {got}"
        )
    layout = Layout.anonymous(max(64, getattr(algorithm, "k", None) or 0))
    worker = Worker(torch.tensor(1.0), torch.tensor(0), 1, 0, layout)
    grad = torch.linspace(-1.0, 2.0, layout.numel)
    answer, result = grad.flip(0), torch.zeros(0)
    state = algorithm.init(worker)
    _, conversation = _first_request(algorithm, grad, state, worker)
    kept = state.clone().state_dict()  # a client keeps this: it closes the conversation before the answer
    learned = {"indices", "own", "aggregate"} if isinstance(state, ScoredState) else set()
    try:
        conversation.send(answer.clone())
    except StopIteration as done:
        result = done.value
    now = state.state_dict()
    is_kept = all(torch.equal(kept[name], now[name]) for name in kept.keys() - learned)
    if not torch.equal(result, answer) or not is_kept:
        raise ArgumentError(
            "algorithm must need one sparse sum per round and apply it as it is, because a client hears of "
            f"the others in the next round, {got}"
        )


def _first_request(
    algorithm: Algorithm[Any], update: Tensor, state: Any, worker: Worker
) -> tuple[SparseGradient, Generator[Any, Any, Tensor]]:
    """What an algorithm sends of an update, and the conversation, which waits for the answer."""
    conversation = algorithm.exchange(update, state, worker)
    request = next(conversation)
    if type(request) is not SparseSum or request.sparse.numel != worker.numel:
        raise ArgumentError(
            "algorithm must send one sparse vector of the whole model per round and need no answer in it, "
            f"got {algorithm.name!r} with its {type(request).__name__}"
        )
    return request.sparse, conversation


class Client:
    """One client's side of a round: an instruction and a trained model in, a reply out.

    a := e + (theta - theta_n)        what is left of earlier rounds, and what training changed in this one
    send x, chosen from a by the algorithm;  e := a - x

    docs/federated.md says what a client remembers, and what becomes of replies that are lost or sent twice.
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
        saved = self._load()
        return None if saved is None else saved["now"]["state"]["residual"]

    @torch.no_grad()
    def model_of(self, instruction: Instruction) -> Model:
        """The model that the round begins with.

        Raises:
            StateError: the rounds that were missed do not lead to it, from what this client has.
        """
        if instruction.missed is None:
            return instruction.arrays
        kept = self._before(instruction)
        if kept is None:
            raise StateError(f"client {self.name!r} must have an older model to add rounds to, got none")
        layout, flat = _layout_of(kept), kept["model"]
        for past in instruction.missed:
            flat = flat - past.aggregate(layout.numel)
        if messages.checksum(flat) != instruction.checksum:
            raise StateError(
                f"the older model of client {self.name!r} must lead to that of round {instruction.round}, "
                "got another checksum"
            )
        return messages.from_flat(flat, layout, instruction.arrays, kept["names"])

    @torch.no_grad()
    def reply(self, instruction: Instruction, model: Model, trained: Model) -> Reply:
        """What to send after training; it is on the disk when this returns.

        `model` is what `model_of` made of the instruction, and `trained` the same arrays after training.

        Raises:
            GradientError: the update is not finite; the memory has not changed.
            StateError: the arrays are not those of the model, or of the memory.
        """
        if set(trained) != set(model):
            raise StateError(f"trained arrays must be {sorted(model)}, got {sorted(trained)}")
        layout = messages.layout_of(model, instruction.whole)
        start = messages.to_flat(model, layout)
        update = start - messages.to_flat(trained, layout)
        whole = {name: trained[name] for name in instruction.whole}
        spoiled = messages.spoiled_names(model, whole)
        if spoiled or not bool(update.isfinite().all()):
            where = f"in {spoiled}" if spoiled else "in what it trained"
            raise GradientError(f"arrays of client {self.name!r} must be finite, got NaN or inf {where}")
        described = [(layer.name, list(layer.shape), layer.kind) for layer in layout.layers]
        before = self._before(instruction)
        if before is not None and before["layout"] != described:
            raise StateError(f"arrays must stay those in {self.path}, got other names or shapes")
        accepted = instruction.accepted.get(self.name, Accepted("", 1.0))
        # The share is that of the last round that counts: this round's is not known before it ends.
        worker = self._worker(layout, instruction.round, accepted.share)
        state = self.algorithm.init(worker)
        if before is not None:
            self._settle_(state, before, accepted, worker, start)
        sparse, conversation = _first_request(self.algorithm, update, state, worker)
        conversation.close()  # the answer comes with the next round: `_settle_` learns from it
        reply = Reply(self.name, instruction.round, encode(sparse), whole)
        indices, values = sparse.without_padding()
        saved = {
            "format": FORMAT,
            "server": instruction.server,
            "client": self.name,
            "algorithm": repr(self.algorithm.options()),
            "names": list(model),
            "layout": described,
            "now": {
                "state": state.state_dict(),
                "model": start,
                "sent": {"round": reply.round, "token": reply.token, "indices": indices, "values": values},
            },
            "before": before and {name: before[name] for name in ("state", "model", "sent")},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        packed = pack(saved)
        write_whole(self.path, lambda file: file.write(packed))  # or the old one stays
        return reply

    def _before(self, instruction: Instruction) -> dict[str, Any] | None:
        """What was kept when the round began; another attempt at it does not count."""
        saved = self._load(instruction.server)
        if saved is None:
            return None
        sent, accepted = saved["now"]["sent"], instruction.accepted.get(self.name)
        has_arrived = accepted is not None and accepted.token == sent["token"]
        kept = saved["now"] if has_arrived or sent["round"] != instruction.round else saved["before"]
        return kept and {**kept, "names": saved["names"], "layout": saved["layout"]}

    def _settle_(
        self, state: Any, kept: dict[str, Any], accepted: Accepted, worker: Worker, start: Tensor
    ) -> None:
        """Load what was kept, take back what did not arrive, and learn from what did."""
        state.load_state_dict(kept["state"])
        sent = kept["sent"]
        has_arrived = accepted.token == sent["token"]
        if not has_arrived:
            state.residual.scatter_add_(0, sent["indices"], sent["values"])
        if isinstance(state, ScoredState) and state.indices.numel() > 0:  # its score learns from aggregates
            if has_arrived and worker.step == sent["round"]:  # counted from 0, rounds from 1
                before = self._worker(worker.layout, sent["round"], accepted.share)
                state.remember(sent["indices"], sent["values"], kept["model"] - start, before)
            else:
                state.own.zero_()  # an entry sent as zero counts as not sent: plain Top-k

    def _worker(self, layout: Layout, round: int, share: float) -> Worker:
        return Worker(torch.tensor(share), self._index, 1, round - 1, layout=layout)

    def _load(self, server: str | None = None) -> dict[str, Any] | None:
        """The file: what was kept after the last round, and before it; None if it is not of this server."""
        if not self.path.is_file():
            return None
        mine = FORMAT, self.name, repr(self.algorithm.options())
        try:
            saved = unpack(self.path.read_bytes())
            theirs = saved["format"], saved["client"], saved["algorithm"]
            is_mine = server in (None, saved["server"])
            if is_mine and mine == theirs:
                layout = _layout_of(saved)
                _check(saved, self.algorithm.init(self._worker(layout, 1, 1.0)), layout.numel)
        except Exception as error:
            raise StateError(f"{self.path} must hold the memory of a client, got {error!r}") from error
        if is_mine and mine != theirs:
            raise StateError(f"{self.path} must be of format, client and algorithm {mine}, got {theirs}")
        return saved if is_mine else None


def pack(saved: dict[str, Any]) -> bytes:
    """A memory as the bytes of its file: a word, a checksum, and what torch.save writes."""
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    content = buffer.getvalue()
    return HEAD + crc32(content).to_bytes(4, "little") + content


def unpack(file: bytes) -> dict[str, Any]:
    """What `pack` was given."""
    content = file[len(HEAD) + 4 :]
    if file != HEAD + crc32(content).to_bytes(4, "little") + content:
        raise StateError("another checksum: the file is damaged")
    saved: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    return saved


def _layout_of(saved: dict[str, Any]) -> Layout:
    """Where the arrays lie in the flat vector."""
    return Layout.of_shapes((name, tuple(shape), kind) for name, shape, kind in saved["layout"])


def _check(saved: dict[str, Any], fresh: State, numel: int) -> None:
    """Refuse a memory that does not go together, or is not finite; `fresh` is that of a client that starts.

    It must not be used: a NaN in the residual would be left out of every update from then on.
    """
    if not {name for name, *_ in saved["layout"]} <= set(saved["names"]):
        raise StateError(f"names must be those of all arrays, got {saved['names']}")
    for when in ("now", "before"):
        kept = saved[when]
        if kept is None and when == "before":
            continue
        like, state, sent = fresh.state_dict(), kept["state"], kept["sent"]
        has_selection = check_state(state, like, f"the memory {when}")
        flat, values = like["residual"], sent["values"]
        check_state({"model": kept["model"]}, {"model": flat}, f"the memory {when}")
        check_state({"values": values}, {"values": flat[: len(values)]}, f"the message {when}")
        for indices in (sent["indices"], *([state["indices"]] if has_selection else [])):
            if indices.dtype != torch.int64 or not bool(((indices >= 0) & (indices < numel)).all()):
                raise StateError(
                    f"indices must be whole numbers in 0..{numel - 1}, got {indices.tolist()[:9]}"
                )
        if type(sent["round"]) is not int or not isinstance(sent["token"], str):
            raise StateError(f"round and token must be a number and a word, got {sent['round']!r}")
        if sent["indices"].shape != values.shape:
            raise StateError(f"indices must be as many as values, {len(values)}, got {len(sent['indices'])}")
