"""Flower: updates travel as wire frames, and what was not sent stays on the client's disk.

A mod for the ClientApp and a strategy for the ServerApp; both are needed::

    app = ClientApp(mods=[SparseMod(TopK(density=0.01, value_code="4bit"))])
    strategy = SparseFedAvg(fraction_train=0.25, fraction_evaluate=0.0)

The rest of both apps is as with FedAvg: a client gets all arrays of the model, and returns all of them.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from logging import WARNING
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from regtopk.core.algorithm import Algorithm
from regtopk.errors import ClusterError, MissingExtraError, RegtopkError, StateError
from regtopk.integrations.flower.client import Client
from regtopk.integrations.flower.messages import (
    Accepted,
    Instruction,
    Model,
    PastRound,
    Reply,
    Skip,
    is_statistic,
)
from regtopk.integrations.flower.one_message import check_algorithm
from regtopk.integrations.flower.server import Server

try:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg
    from flwr.supercore import log
except ImportError as error:
    raise MissingExtraError(
        "the Flower integration needs flwr 1.41 or later: pip install 'regtopk[flower]'"
    ) from error

NOTE = "regtopk"  # the record beside the arrays
FRAMES = "regtopk.frames"  # the array that holds frames, one after another


def partition_of(context: Context) -> str:
    """A client's name: the partition-id that its SuperNode was started with.

    Raises:
        ClusterError: it has none.
    """
    if "partition-id" not in context.node_config:
        raise ClusterError(
            "node-config must have a partition-id, or SparseMod a name: a SuperNode's own id changes when it "
            f"is started anew; got {dict(context.node_config)}"
        )
    return str(context.node_config["partition-id"])


class SparseMod:
    """A mod for a ClientApp: the reply to a train message holds a sparse frame instead of the model.

    Flower keeps `context.state` in the memory of a SuperNode, and gives a SuperNode that is started anew
    another id. So what was not sent is kept in a file, under a name that stays.

    Args:
        algorithm: what chooses the entries of an update; see `regtopk.integrations.flower.check_algorithm`.
        folder: where this client's file is, in a subfolder for each run; the "state-folder" of its
            SuperNode's node-config if None. Clients may share a folder.
        name: a callable of the context: the client's name; its partition-id if not given.

    Raises:
        ArgumentError: a server with sampled clients cannot run the algorithm.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        folder: str | Path | None = None,
        *,
        name: Callable[[Context], str] = partition_of,
    ) -> None:
        check_algorithm(algorithm)
        self.algorithm, self.folder, self.name = algorithm, folder, name

    def client(self, context: Context) -> Client:
        """This client, with what it has on its disk."""
        name = self.name(context)
        folder = context.node_config.get("state-folder") if self.folder is None else self.folder
        if folder is None:
            raise ClusterError(
                "SparseMod must have a folder, or node-config a state-folder, for what was not sent; got none"
            )
        path = Path(str(folder)) / f"run-{context.run_id}" / f"client-{quote(name, safe='')}.pt"
        return Client(self.algorithm, path, name=name)

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Let the app train on the model as it expects it, and send a frame of what it changed."""
        if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        key, instruction = _to_instruction(message.content)
        client = self.client(context)
        model = client.model_of(instruction)
        message.content[key] = _record(model)
        del message.content[NOTE]
        answer = call_next(message, context)
        if answer.has_error():
            return answer
        (key,) = _only(answer.content.array_records)
        reply = client.reply(instruction, model, answer.content[key].to_torch_state_dict())
        answer.content[key] = _record({FRAMES: reply.frame, **reply.whole})
        answer.content[NOTE] = ConfigRecord({"client": reply.client, "round": reply.round})
        return answer


class SparseFedAvg(FedAvg):
    """FedAvg of what clients with a `SparseMod` send.

    theta := theta - sum_n w_n x_n,        w_n = num-examples of n / those of all whose replies were accepted

    Sums run in the order of the clients' names, so a run does not depend on who was first. A client that
    fails, or whose frame is damaged, is left out of its round: what it sent goes back into its residual.

    Args:
        skip: as `Server` takes it; running statistics of batch norms are skipped if it is not given.
        sparse_down: as `Server` takes it.
        raise_on_refused: whether a reply that is refused ends the run. Otherwise it is logged and counted.
        fedavg: FedAvg's own arguments, for sampling, weights and metrics.

    Attributes:
        sent_bytes: what train messages to clients held so far, all their records.
        received_bytes: what their replies held.
        num_refused: how many replies were refused.
    """

    def __init__(
        self,
        *,
        skip: Skip = is_statistic,
        sparse_down: bool = True,
        raise_on_refused: bool = False,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        self._server = Server(skip=skip, sparse_down=sparse_down)
        self._raise_on_refused = raise_on_refused
        self.sent_bytes, self.received_bytes, self.num_refused = 0, 0, 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the sampled nodes, each with what it needs to have this round's model."""
        self._server.begin(server_round, arrays.to_torch_state_dict())
        messages = []
        for sampled in super().configure_train(server_round, arrays, config, grid):
            node = sampled.metadata.dst_node_id
            told = _of_instruction(self._server.instruction(node), self.arrayrecord_key)
            told[self.configrecord_key] = sampled.content[self.configrecord_key]
            self.sent_bytes += _num_bytes(told)
            messages.append(Message(told, message_type=sampled.metadata.message_type, dst_node_id=node))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> "tuple[ArrayRecord | None, MetricRecord | None]":
        """The model after this round, and the clients' metrics."""
        answers, _ = self._check_and_log_replies(list(replies), is_train=True, validate=False)
        replies_at: dict[int, tuple[Reply, float]] = {}
        refused: dict[int, RegtopkError] = {}
        for answer in answers:
            node = answer.metadata.src_node_id
            self.received_bytes += _num_bytes(answer.content)
            try:
                replies_at[node] = _to_reply(answer.content, self.weighted_by_key)
            except StateError as error:
                refused[node] = error
        refused |= self._server.finish([(node, *reply) for node, reply in replies_at.items()])
        for node, reason in refused.items():
            self.num_refused += 1
            if self._raise_on_refused:
                raise reason
            log(WARNING, "reply of node %d is refused: %s", node, reason)
        accepted = {
            replies_at[node][0].client: answer.content
            for answer in answers
            if (node := answer.metadata.src_node_id) not in refused
        }
        if not accepted:
            return None, None
        metrics = None
        try:
            contents = [accepted[client] for client in sorted(accepted)]
            metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        except Exception as error:  # the model has moved, whatever these are
            log(WARNING, "clients' metrics do not go together, and are left out: %r", error)
        return _record(self._server.model), metrics


def _of_instruction(instruction: Instruction, key: str) -> RecordDict:
    clients = list(instruction.accepted)
    note: dict[str, Any] = {
        "server": instruction.server,
        "round": instruction.round,
        "has-model": instruction.model is not None,
        "checksum": instruction.checksum,
        "clients": clients,
        "tokens": [instruction.accepted[name].token for name in clients],
        "shares": [instruction.accepted[name].share for name in clients],
    }
    if instruction.model is not None:
        note["whole"] = list(instruction.whole)
        arrays = _record(instruction.model)
    else:
        frames = [frame for past in instruction.missed for frame in past.frames]
        note["frame-counts"] = [len(past.frames) for past in instruction.missed]
        note["frame-lengths"] = [len(frame) for frame in frames]
        note["frame-shares"] = [share for past in instruction.missed for share in past.shares]
        together = torch.cat([torch.zeros(0, dtype=torch.uint8), *frames])
        arrays = _record({FRAMES: together, **instruction.whole})
    note = {name: value for name, value in note.items() if value != []}  # Flower cannot count empty lists
    return RecordDict({key: arrays, NOTE: ConfigRecord(note)})


def _to_instruction(content: RecordDict) -> tuple[str, Instruction]:
    if NOTE not in content:
        raise ClusterError("the ServerApp must run a SparseFedAvg with SparseMod, got a message of another")
    (key,) = _only(content.array_records)
    note, arrays = content[NOTE], content[key].to_torch_state_dict()
    lists = "clients", "tokens", "shares", "whole", "frame-counts", "frame-lengths", "frame-shares"
    clients, tokens, shares, names, counts, lengths, frame_shares = (note.get(name, []) for name in lists)
    accepted = {
        client: Accepted(token, share) for client, token, share in zip(clients, tokens, shares, strict=True)
    }
    head = note["server"], note["round"], accepted
    if note["has-model"]:
        whole = {name: arrays[name] for name in names}
        return key, Instruction(*head, whole, dict(arrays), (), note["checksum"])
    sent = iter(zip(arrays.pop(FRAMES).split(list(lengths)), frame_shares, strict=True))
    missed = []
    for count in counts:
        each = list(islice(sent, count))
        missed.append(PastRound(tuple(frame for frame, _ in each), tuple(share for _, share in each)))
    return key, Instruction(*head, dict(arrays), None, tuple(missed), note["checksum"])


def _to_reply(content: RecordDict, weighted_by: str) -> tuple[Reply, float]:
    """The reply in a message, and its weight.

    Raises:
        StateError: it is not one of a client with a `SparseMod`, cannot be read, or has no weight.
    """
    if NOTE not in content:
        raise StateError("replies must come from a ClientApp with a SparseMod, got one without its record")
    (key,) = _only(content.array_records)
    (metrics,) = _only(content.metric_records)
    try:
        arrays = content[key].to_torch_state_dict()
    except Exception as error:  # whatever numpy, torch or the memory says of bytes from elsewhere
        raise StateError(f"arrays of a reply must be numpy's, got {type(error).__name__}: {error}") from error
    frame, weight = arrays.pop(FRAMES, None), content[metrics].get(weighted_by)
    client, round = content[NOTE].get("client"), content[NOTE].get("round")
    if frame is None or not isinstance(weight, (int, float)):
        raise StateError(
            f"a reply must have the array {FRAMES!r} and the metric {weighted_by!r}, a number, got "
            f"{'one' if frame is not None else 'none'} and {weight!r}"
        )
    if not isinstance(client, str) or not isinstance(round, int):
        raise StateError(f"a reply must say its client and its round, got {client!r} and {round!r}")
    return Reply(client, round, frame, dict(arrays)), float(weight)


def _record(model: Model) -> ArrayRecord:
    return ArrayRecord(OrderedDict(model))


def _only(records: Any) -> list[str]:
    """The key of the one record of its kind."""
    keys = list(records)
    if len(keys) != 1:
        raise StateError(f"a message must have one record of each kind, got {keys}")
    return keys


def _num_bytes(content: RecordDict) -> int:
    return sum(record.count_bytes() for record in content.values())
