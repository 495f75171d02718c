"""Flower's own SuperLink and SuperNodes on loopback, a client that is killed, and the example of the docs."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'regtopk[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from regtopk import DGC, RegTopK, TopK
from regtopk.errors import ArgumentError, ClusterError
from regtopk.integrations.flower.app import SparseFedAvg, SparseMod
from regtopk.integrations.flower.client import unpack
from tests.processes import free_port

APP = Path(__file__).parents[2] / "examples/flower"
COMMANDS = Path(sys.executable).parent
NUM_ROUNDS = 5
PATIENCE_S = 900.0  # a safeguard: Flower starts processes for every message, which a loaded machine delays


class OneProcess(Grid):  # what Flower sends, handed over by a call
    def __init__(
        self, apps: dict[int, ClientApp], folder: Path, damage: Any = lambda node, reply: None
    ) -> None:
        self.apps, self.folder, self.damage = apps, folder, damage
        self.told: list[Message] = []

    run: Any = None  # nothing else of a Grid is used
    set_run = create_message = push_messages = pull_messages = run

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def send_and_receive(self, messages: Iterable[Message], **options: Any) -> Iterable[Message]:
        replies = []
        for message in messages:
            self.told.append(message)
            node = message.metadata.dst_node_id
            content = RecordDict(dict(message.content))
            copy = Message(content, message_type=message.metadata.message_type, dst_node_id=node)
            config = {"partition-id": node, "state-folder": str(self.folder)}
            context = Context(1, node, config, RecordDict(), {})
            reply = self.apps[node](copy, context)
            self.damage(node, reply)
            replies.append(reply)
        return replies


@pytest.fixture
def in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's processes say here for whom they make messages."""
    identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(identity, name, 1)


def app_that_adds(step: float, num_examples: int, mods: list[Any]) -> ClientApp:
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = {name: Array(array.numpy() + step) for name, array in message.content["arrays"].items()}
        metrics = MetricRecord({"num-examples": num_examples, "step": step})
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)

    return app


def initial() -> ArrayRecord:
    return ArrayRecord(OrderedDict(w=torch.zeros(300, 4), b=torch.ones(2)))


def run(strategy: FedAvg, grid: Grid, num_rounds: int) -> Tensor:
    arrays = strategy.start(grid, initial(), num_rounds=num_rounds, evaluate_fn=None).arrays
    return torch.cat([array.flatten() for array in arrays.to_torch_state_dict().values()])


@pytest.mark.usefixtures("in_one_process")
def test_with_all_entries_it_is_fedavg(tmp_path: Path) -> None:
    """Of what is sent whole nothing is kept, and the result is Flower's own, unequal weights included."""
    found = []
    for strategy, mods in (
        (FedAvg(fraction_evaluate=0.0), []),
        (SparseFedAvg(fraction_evaluate=0.0), [SparseMod(TopK(density=1.0))]),
    ):
        apps = {node: app_that_adds(step, size, mods) for node, step, size in ((7, 1.0, 3), (4, -2.0, 1))}
        found.append(run(strategy, OneProcess(apps, tmp_path), 2))
    assert torch.equal(found[0], found[1])
    assert found[1][0] == 2 * (0.75 * 1.0 - 0.25 * 2.0)


@pytest.mark.usefixtures("in_one_process")
def test_bytes_of_both_directions_are_counted(tmp_path: Path) -> None:
    mods = [SparseMod(RegTopK(density=0.01))]
    grid = OneProcess({node: app_that_adds(1.0, 1, mods) for node in (1, 2)}, tmp_path)
    strategy = SparseFedAvg(fraction_evaluate=0.0)
    run(strategy, grid, 3)
    sizes = [sum(record.count_bytes() for record in told.content.values()) for told in grid.told]
    assert strategy.sent_bytes == sum(sizes)
    assert min(sizes[:2]) > 4 * 1202  # the model
    assert max(sizes[2:]) < 4 * 1202 / 3  # what changed
    assert 0 < strategy.received_bytes < 6 * 4 * 1202 / 5


ODD = (
    "a reply must have the record 'regtopk' of a SparseMod, one of arrays with 'regtopk.frames' and one of "
    "metrics with the number 'num-examples', got "
)


def flip(reply: Message) -> None:
    frame = reply.content["arrays"]["regtopk.frames"].numpy()
    frame[-1] ^= 1
    reply.content["arrays"]["regtopk.frames"] = Array(frame)


def put(record: str, name: str, value: Any) -> Callable[[Message], None]:
    return lambda reply: reply.content[record].update({name: value})


@pytest.mark.usefixtures("in_one_process")
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip, "message is refused: checksum must be that of the words"),
        (put("arrays", "regtopk.frames", Array("uint8", (9,), "numpy.ndarray", b"no header")), ODD),
        (put("arrays", "regtopk.frames", Array("uint8", (9,), "other", b"")), ODD),
        (put("arrays", "regtopk.frames", Array(np.array(["words"]))), ODD),
        (put("metrics", "num-examples", [1, 2]), ODD),
        (put("regtopk", "round", "one"), "round of a reply must be 1, got one"),
        (lambda reply: reply.content.pop("regtopk"), ODD),  # as of an app without the mod
        (put("metrics", "step", [1.0, 2.0]), None),  # which are left out
    ],
)
def test_a_bad_reply_is_refused_and_counted(
    tmp_path: Path, damage: Callable[[Message], None], reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    mods = [SparseMod(TopK(density=1.0))]
    apps = {1: app_that_adds(1.0, 1, mods), 2: app_that_adds(5.0, 1, mods)}
    strategy = SparseFedAvg(fraction_evaluate=0.0)
    grid = OneProcess(apps, tmp_path, lambda node, reply: damage(reply) if node == 2 else None)
    assert run(strategy, grid, 3)[0] == (3.0 if reason else 9.0)
    assert strategy.num_refused == (3 if reason else 0)
    assert reason is None or f"reply of node 2 is refused: {reason}" in caplog.text


@pytest.mark.usefixtures("in_one_process")
def test_what_cannot_work_is_said(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="'dgc'"):
        SparseMod(DGC(density=0.01))
    app = app_that_adds(1.0, 1, [SparseMod(TopK(density=1.0))])
    other = "the ServerApp must run a SparseFedAvg with SparseMod, got a message of another"
    with pytest.raises(ClusterError, match=other):
        run(FedAvg(fraction_evaluate=0.0), OneProcess({1: app, 2: app}, tmp_path), 1)
    note = {"server": "", "round": 1, "checksum": 0, "accepted": {}, "whole": [], "missed": None}
    told = RecordDict({"arrays": initial(), "regtopk": ConfigRecord({"instruction": json.dumps(note)})})
    message = Message(told, message_type="train", dst_node_id=1)
    for config in ({}, {"partition-id": 0}, {"state-folder": str(tmp_path)}):
        with pytest.raises(ClusterError) as refused:
            app(message, Context(1, 1, config, RecordDict(), {}))
        assert str(refused.value) == (
            "node-config must have a partition-id and a state-folder, or SparseMod a name and a folder: a "
            f"SuperNode that is started anew has another id and an empty memory; got {config}"
        )


class Federation:
    """A SuperLink and the SuperNodes of two clients, which end with the block."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, str(free_port())
        self.address = f"127.0.0.1:{self.port}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.seen: dict[int, list[dict[str, Any]]] = {0: [], 1: []}  # every memory that a client wrote
        (folder / "home").mkdir()
        (folder / "home/config.toml").write_text(
            f'[superlink.loopback]\naddress = "{self.address}"\ninsecure = true\n'
        )
        where = "--insecure", "--host", "127.0.0.1", "--port", self.port
        self.start("flower-superlink", *where, "--disable-runtime-dependency-installation")

    def __enter__(self) -> "Federation":
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self.processes:
            if process.returncode is None:
                kill(process)

    def start(self, command: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command in a session of its own, so that it can be killed with all that it starts."""
        settings = {"FLWR_HOME": str(self.folder / "home"), "FLWR_TELEMETRY_ENABLED": "0"}
        settings["PATH"] = (
            f"{COMMANDS}{os.pathsep}{os.environ['PATH']}"  # Flower's commands start one another
        )
        with (self.folder / f"{command}-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [COMMANDS / command, *arguments],
                env={**os.environ, **settings, "OMP_NUM_THREADS": "1"},
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def start_client(self, client: int) -> subprocess.Popen[bytes]:
        config = f'partition-id={client} num-partitions=2 state-folder="{self.folder}"'
        where = "--insecure", "--superlink", self.address, "--port", str(free_port())
        return self.start("flower-supernode", *where, "--node-config", config)

    def submit(self) -> None:
        config = f'num-rounds={NUM_ROUNDS} log="{self.folder / "log.jsonl"}"'
        with socket.socket() as knock:
            self.wait_for(lambda: knock.connect_ex(("127.0.0.1", int(self.port))) == 0)
        self.start("flwr", "run", str(APP), "loopback", "--stream", "--run-config", config)

    def wait_for(self, has_happened: Callable[[], bool]) -> None:
        """Wait, and keep every memory that the clients write meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            # asked first: `flwr run` ends when the ServerApp has ended or failed
            is_running = all(process.poll() in (None, -signal.SIGKILL) for process in self.processes)
            if has_happened():
                return
            logs = (f"{path}\n{path.read_text()[-4000:]}" for path in self.folder.glob("*.log"))
            assert is_running and time.monotonic() < deadline, "\n".join(logs)
            for client, memories in self.seen.items():
                memory = self.memory(client)
                if memory is not None and (not memories or memories[-1]["written"] != memory["written"]):
                    memories.append(memory)
            time.sleep(0.1)

    def rounds(self) -> list[dict[str, Any]]:
        log = self.folder / "log.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def wait_for_round(self, number: int) -> None:
        self.wait_for(lambda: any(line["round"] == number for line in self.rounds()))

    def memory(self, client: int) -> dict[str, Any] | None:
        path = next(self.folder.glob(f"run-*/client-{client}.pt"), None)
        if path is None:
            return None
        with path.open("rb") as file:  # which another file may take the place of meanwhile
            return {**unpack(file.read())["now"], "written": os.fstat(file.fileno()).st_mtime_ns}


def kill(process: subprocess.Popen[bytes]) -> None:
    """kill -9, of the process and of all that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def sent_in(memory: dict[str, Any]) -> Tensor:
    sent = memory["sent"]
    return torch.zeros_like(memory["model"]).scatter_(0, sent["indices"], sent["values"])


def update_of(memory: dict[str, Any], client: int) -> Tensor:
    """What training changed in the round of a memory: the client's app, made once more."""
    from digits_app.task import digits_of, make_model, train

    model = make_model()
    torch.nn.utils.vector_to_parameters(memory["model"].clone(), model.parameters())
    train(model, *digits_of(client, 2), seed=memory["sent"]["round"])
    start: Tensor = memory["model"]
    return start - torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.slow
def test_a_killed_client_comes_back_with_its_residual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(APP))
    with Federation(tmp_path) as federation:
        federation.start_client(0)
        doomed = federation.start_client(1)
        federation.submit()
        federation.wait_for_round(2)
        kill(doomed)
        before = federation.memory(1)
        federation.start_client(1)
        federation.wait_for_round(NUM_ROUNDS)
        rounds, after = federation.rounds(), federation.memory(1)
    assert before is not None and before["sent"]["round"] == 2 and before["state"]["residual"].norm() > 0
    assert after is not None and after["sent"]["round"] > 2, "the killed client must have come back"
    for client, memories in federation.seen.items():
        assert len(memories) >= 3
        before_round, residual, last_round = torch.zeros(()), torch.zeros(()), 0
        for memory in memories:
            if memory["sent"]["round"] != last_round:  # otherwise Flower ran it again, and the first is void
                before_round, last_round = residual, memory["sent"]["round"]
            residual = before_round + update_of(memory, client) - sent_in(memory)
            assert torch.equal(memory["state"]["residual"], residual)
    assert [line["round"] for line in rounds] == list(range(NUM_ROUNDS + 1))
    assert rounds[-1]["accuracy"] > rounds[0]["accuracy"] + 0.2
    dense = 4 * len(before["model"])
    assert rounds[-1]["received-bytes"] < dense / 10  # of all rounds and clients together
    assert rounds[-1]["sent-bytes"] < (3 + 0.5) * dense  # the model once for each process of a client
    assert rounds[-1]["refused"] == 0
