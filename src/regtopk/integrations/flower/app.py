"""Flower: updates travel as wire frames, and what was not sent stays on the client's disk.

A mod for the ClientApp and a strategy for the ServerApp; both are needed::

    app = ClientApp(mods=[SparseMod(TopK(density=0.01, value_code="4bit"))])
    strategy = SparseFedAvg(fraction_train=0.25, fraction_evaluate=0.0)

The rest of both apps is as with FedAvg: a client gets all arrays of the model, and returns all of them.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from logging import WARNING
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from regtopk.core.algorithm import Algorithm
from regtopk.errors import ClusterError, RegtopkError, StateError, importing
from regtopk.integrations.flower.client import Client, check_algorithm
from regtopk.integrations.flower.messages import Accepted, Instruction, Model, PastRound, Reply
from regtopk.integrations.flower.server import Server, Skip, is_statistic

with importing(
    "the Flower integration needs flwr 1.41 or later: pip install 'regtopk[flower]', "
    "with Python 3.11 or later"
):
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg
    from flwr.supercore import log

NOTE = "regtopk"  # the record beside the arrays
FRAMES = "regtopk.frames"  # the array that holds frames, one after another


class SparseMod:
    """A mod for a ClientApp: the reply to a train message holds a sparse frame instead of the model.

    Flower keeps `context.state` in memory. So what was not sent is kept in a file, under a name that stays.

    Args:
        algorithm: what chooses the entries of an update; see `client.check_algorithm`.
        folder: where this client's file is, in a subfolder for each run; the "state-folder" of its
            SuperNode's node-config if None. Clients may share a folder.
        name: a callable of the context: the client's name; the partition-id of its node-config if None.

    Raises:
        ArgumentError: a server with sampled clients cannot run the algorithm.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        folder: str | Path | None = None,
        *,
        name: Callable[[Context], str] | None = None,
    ) -> None:
        check_algorithm(algorithm)
        self.algorithm, self.folder, self.name = algorithm, folder, name

    def client(self, context: Context) -> Client:
        """This client, with what it has on its disk."""
        config = context.node_config
        folder = config.get("state-folder") if self.folder is None else self.folder
        name = config.get("partition-id") if self.name is None else self.name(context)
        if folder is None or name is None:
            raise ClusterError(
                "node-config must have a partition-id and a state-folder, or SparseMod a name and a folder: "
                f"a SuperNode that is started anew has another id and an empty memory; got {dict(config)}"
            )
        path = Path(str(folder)) / f"run-{context.run_id}" / f"client-{quote(str(name), safe='')}.pt"
        return Client(self.algorithm, path, name=str(name))

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
        (key,) = answer.content.array_records
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
        fedavg: FedAvg's own arguments, for sampling, weights and metrics.

    Attributes:
        sent_bytes: what train messages to clients held so far, all their records.
        received_bytes: what their replies held.
        num_refused: how many replies were refused.
    """

    def __init__(self, *, skip: Skip = is_statistic, sparse_down: bool = True, **fedavg: Any) -> None:
        super().__init__(**fedavg)
        self._server = Server(skip=skip, sparse_down=sparse_down)
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
        content_of = {answer.metadata.src_node_id: answer.content for answer in answers}
        reply_of: dict[int, tuple[Reply, float]] = {}
        refused: dict[int, RegtopkError] = {}
        for node, content in content_of.items():
            self.received_bytes += _num_bytes(content)
            try:
                reply_of[node] = _to_reply(content, self.weighted_by_key)
            except StateError as error:
                refused[node] = error
        refused |= self._server.finish(reply_of)
        self.num_refused += len(refused)
        for node, reason in refused.items():
            log(WARNING, "reply of node %d is refused: %s", node, reason)
        accepted = [node for node in reply_of if node not in refused]
        if not accepted:
            return None, None
        metrics = None
        try:
            contents = [content_of[node] for node in sorted(accepted, key=lambda n: reply_of[n][0].client)]
            metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        except Exception as error:  # the model has moved, whatever these are
            log(WARNING, "clients' metrics do not go together, and are left out: %r", error)
        return _record(self._server.model), metrics


def _of_instruction(told: Instruction, key: str) -> RecordDict:
    """A message: arrays, all frames as one more of them, and the rest as JSON."""
    note, arrays = {**vars(told), "arrays": None}, dict(told.arrays)
    if told.missed is not None:
        arrays[FRAMES] = torch.cat([frame for past in told.missed for frame in past.frames])
        note["missed"] = [[[len(frame) for frame in past.frames], past.shares] for past in told.missed]
    return RecordDict({key: _record(arrays), NOTE: ConfigRecord({"instruction": json.dumps(note)})})


def _to_instruction(content: RecordDict) -> tuple[str, Instruction]:
    if NOTE not in content:
        raise ClusterError("the ServerApp must run a SparseFedAvg with SparseMod, got a message of another")
    (key,) = content.array_records
    note, arrays = json.loads(content[NOTE]["instruction"]), dict(content[key].to_torch_state_dict())
    if note["missed"] is not None:
        lengths = [length for lengths, _ in note["missed"] for length in lengths]
        frames = iter(arrays.pop(FRAMES).split(lengths))
        note["missed"] = [
            PastRound(tuple(islice(frames, len(shares))), tuple(shares)) for _, shares in note["missed"]
        ]
    note["accepted"] = {client: Accepted(*reply) for client, reply in note["accepted"].items()}
    return key, Instruction(**{**note, "arrays": arrays})


def _to_reply(content: RecordDict, weighted_by: str) -> tuple[Reply, float]:
    """The reply in a message, and its weight; refuses what a client with a `SparseMod` does not send."""
    try:
        note = content[NOTE]
        (record,) = content.array_records.values()
        (metrics,) = content.metric_records.values()
        arrays = record.to_torch_state_dict()
        reply = Reply(str(note["client"]), note["round"], arrays.pop(FRAMES), dict(arrays))
        return reply, float(metrics[weighted_by])
    except Exception as error:  # whatever numpy, torch or the memory says of bytes from elsewhere
        raise StateError(
            f"a reply must have the record {NOTE!r} of a SparseMod, one of arrays with {FRAMES!r} and one of "
            f"metrics with the number {weighted_by!r}, got {type(error).__name__}: {error}"
        ) from error


def _record(model: Model) -> ArrayRecord:
    return ArrayRecord(OrderedDict(model))


def _num_bytes(content: RecordDict) -> int:
    return sum(record.count_bytes() for record in content.values())
