"""Replicas of torchft that come and go, with its own lighthouse, managers and process groups on loopback."""

import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar, NamedTuple
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from regtopk import EF21, RegTopK, TopK
from regtopk.core import Algorithm, Conversation, Worker
from regtopk.core.state import ResidualState
from regtopk.errors import ArgumentError, ClusterError, StateError
from tests.distributed.ranks import fork_process
from tests.distributed.test_guide import ROOT, blocks
from tests.distributed.test_updates import nesterov
from tests.distributed.training import listening

pytest.importorskip(
    "torchft",
    reason="torchft is not installed: pip install 'regtopk[torchft]', on x86_64 Linux",
    exc_type=ImportError,
)
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from regtopk.integrations.torchft import QuorumRounds, TorchftExchange

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torchft
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
EVERY = 2
REGTOPK = RegTopK(density=0.25)


@dataclass(frozen=True, kw_only=True)
class FailsOnce(TopK):
    """Top-k that fails in some rounds, when it has sent its entries and changed its state."""

    name: ClassVar[str] = "fails-once"
    failing: ClassVar[set[int]] = set()  # the rounds to fail in, of this process

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        aggregate = yield from super().exchange(grad, state, worker)
        if worker.step in self.failing:
            self.failing.remove(worker.step)
            raise RuntimeError("this round fails")
        return aggregate


class After(NamedTuple):
    """A replica when it has joined, and after every round of a fragment."""

    pid: int
    num_rounds: int
    num_failed: int
    num_steps: int
    num_seen: int  # the steps that theta_start has seen
    dense_bytes: int
    weights: list[float]
    residual_norm: float
    tensors: list[Tensor]  # theta_start, buffers, and the outer optimizer's state


class Replicas:
    """Replica processes of one lighthouse, each telling about every round."""

    def __init__(self, patience_ms: int) -> None:
        self._patience_ms = patience_ms
        self.start_lighthouse(0)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self.heard: list[list[After]] = []

    def start_lighthouse(self, port: int) -> None:
        self._lighthouse = LighthouseServer(
            bind=f"[::]:{port}", min_replicas=2, join_timeout_ms=self._patience_ms, heartbeat_timeout_ms=2_000
        )

    def lose_lighthouse(self) -> int:
        """The port that it had."""
        port = int(self._lighthouse.address().rpartition(":")[2])
        self._lighthouse.shutdown()
        del self._lighthouse  # with all of its connections
        return port

    def start(
        self,
        algorithm: Algorithm[Any] = REGTOPK,
        failing: tuple[int, ...] = (),
        *,
        fails_to_meet: bool = False,
        **options: Any,
    ) -> int:
        number = len(self._processes)
        told = (self._lighthouse.address(), number, algorithm, failing, fails_to_meet)
        process, pipe = fork_process(_train, *told, {"every": EVERY, **options})
        self._processes.append(process)
        self._pipes.append(pipe)
        self.heard.append([])
        return number

    def kill(self, number: int) -> None:
        self._processes[number].kill()  # SIGKILL
        self._processes[number].join()

    def listen(self, until: Callable[[list[list[After]]], bool], timeout_s: float = 240) -> None:
        """Hear what the replicas tell until they have told enough."""
        deadline = time.monotonic() + timeout_s
        while not until(self.heard):
            alive = [pipe for pipe, p in zip(self._pipes, self._processes, strict=True) if p.is_alive()]
            ready = wait(alive, timeout=1)
            for number in (n for n, pipe in enumerate(self._pipes) if pipe in ready):
                told = self._pipes[number].recv()
                assert isinstance(told, After), told
                self.heard[number].append(told)
            assert time.monotonic() < deadline, [[a[:8] for a in told[-3:]] for told in self.heard]

    def answer(self, number: int, timeout_s: float = 120) -> Any:
        """The next thing that a replica tells."""
        assert self._pipes[number].poll(timeout_s)
        return self._pipes[number].recv()

    def stop(self) -> None:
        for number in range(len(self._processes)):
            self.kill(number)
        self._lighthouse.shutdown()


@pytest.fixture
def replicas(request: pytest.FixtureRequest) -> Iterator[Replicas]:
    them = Replicas(getattr(request, "param", 20_000))
    yield them
    them.stop()


def _train(
    pipe: Connection,
    lighthouse: str,
    number: int,
    algorithm: Algorithm[Any],
    failing: tuple[int, ...],
    fails_to_meet: bool,
    options: dict[str, Any],
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(number)  # replicas begin from different weights
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = _manager(store, lighthouse, number, quorum_s=options.pop("quorum_s", 60))
    FailsOnce.failing.update(failing)
    if fails_to_meet:
        _fail_to_meet_once(pipe)
    norm = nn.BatchNorm1d(8) if isinstance(algorithm, RegTopK) else nn.Identity()
    model = nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), nn.Linear(8, 3))
    parameters = list(model.parameters())
    parts = [parameters[:2], parameters[2:]] if options.pop("has_two_optimizers", False) else [parameters]
    optimizers = [torch.optim.AdamW(part, lr=0.02) for part in parts]
    late_at = options.pop("late_at", None)
    try:
        exchange = TorchftExchange(manager, model, optimizers, algorithm, outer=nesterov, **options)
    except Exception as error:
        pipe.send(error)
        return
    pipe.send(_after(exchange, model))
    pause = options["every"] // options.get("fragments", 1)  # from one fragment's turn to the next one's
    for num_steps in count(1 - options.get("delay", 0)):
        time.sleep(6 * (num_steps == late_at))
        model.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(16, 6)), torch.randint(3, (16,))).backward()
        for optimizer in optimizers:
            optimizer.step()
        if num_steps > 0 and num_steps % pause == 0:  # the aggregate is applied
            pipe.send(_after(exchange, model))
            time.sleep(0.1)  # as long as a short round takes


def _fail_to_meet_once(pipe: Connection) -> None:
    """Let this process's first meeting fail, when the quorum has brought a peer's state."""

    def fail(_: QuorumRounds) -> bool:
        meeting.stop()
        pipe.send("has not met")
        raise TimeoutError("this meeting fails")  # as a collective may: there is a quorum

    meeting = patch.object(QuorumRounds, "_compare", fail)
    meeting.start()


def _manager(
    store: TCPStore, lighthouse: str, number: int, min_replicas: int = 2, quorum_s: float = 60
) -> Manager:
    return Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=min_replicas,
        use_async_quorum=False,
        timeout=timedelta(seconds=20),
        quorum_timeout=timedelta(seconds=quorum_s),
        connect_timeout=timedelta(seconds=5),
        quorum_retries=20,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{number}",
    )


def _after(exchange: TorchftExchange, model: nn.Module) -> After:
    state = exchange.state_dict()
    momenta = [each["momentum_buffer"] for each in state["outer"]["state"].values()]
    with exchange.agreed():
        own = dict(model.named_parameters())
        assert all(torch.equal(own[name], start) for name, start in state["start"].items())
    return After(
        os.getpid(),
        state["num_rounds"],
        exchange.num_failed,
        exchange.num_steps,
        state["num_steps"],
        exchange.total.dense_bytes,
        exchange.weights,
        exchange.total.residual_norm,
        [*state["start"].values(), *state["buffers"]["start"].values(), *momenta],
    )


def _check_alike(told: list[list[After]], from_round: int, first: int) -> None:
    """Replicas hold the same bits after every round that both `first` and another have committed."""
    mine = _committed(told[first])
    num_compared = 0
    for other in told:
        for number, after in _committed(other).items():
            if number >= from_round and number in mine and other is not told[first]:
                assert all(map(torch.equal, after.tensors, mine[number].tensors)), f"round {number}"
                assert after.num_seen == mine[number].num_seen, f"round {number}"
                num_compared += 1
    assert num_compared >= 2


def _committed(told: list[After]) -> dict[int, After]:
    """What a replica held when it had first committed so many rounds."""
    return {after.num_rounds: after for after in reversed(told)}


def _have_rounds(numbers: Iterable[int], num_rounds: int, weights: int | None = None) -> Callable[..., bool]:
    """Whether replicas have told of so many rounds, of so many replicas."""

    def until(told: list[list[After]]) -> bool:
        found = [[a for a in told[n] if weights in (None, len(a.weights))] for n in numbers]
        return all(len({a.num_rounds for a in each}) >= num_rounds for each in found)

    return until


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"every": 4, "fragments": 2, "has_two_optimizers": True},
        {"every": 4, "delay": 2},
        {"every": 6, "fragments": 2, "delay": 1},
        {"algorithm": TopK(density=0.25, returned=0.2)},
    ],
    ids=str,
)
def test_a_killed_replica_is_left_out_and_joins_again(replicas: Replicas, options: dict[str, Any]) -> None:
    for _ in range(3):
        replicas.start(**options)
    replicas.listen(_have_rounds(range(3), 3, weights=3))
    _check_alike(replicas.heard, 1, first=0)
    before = replicas.heard[0][-1].num_rounds
    num_failed = [told[-1].num_failed for told in replicas.heard]
    replicas.kill(2)

    # the round that it was killed in may count on one of them: the other begins from that one then
    replicas.listen(lambda told: all(t[-1].weights == [0.5, 0.5] for t in told[:2]))
    for told, failed_before in zip(replicas.heard[:2], num_failed, strict=False):
        assert len({a.pid for a in told}) == 1  # no process was restarted
        assert told[-1].num_failed <= failed_before + 1  # the round that it was killed in, at most
        assert told[-1].num_rounds > before
        assert told[-1].residual_norm > 0
    _check_alike(replicas.heard[:2], before, first=0)

    new = replicas.start(**options)
    replicas.listen(_have_rounds([new], 5, weights=3))
    joined = replicas.heard[new]
    assert joined[0].num_rounds > before + 1
    assert (joined[0].residual_norm, sorted(joined[0].weights)) == (0, [0, 0.5, 0.5])  # when it had joined
    assert joined[1].weights == [1 / 3] * 3
    assert joined[1].residual_norm > 0
    assert joined[1].num_steps in [a.num_steps for a in replicas.heard[0] if a[1] == joined[1].num_rounds]
    _check_alike([*replicas.heard[:2], joined], joined[0].num_rounds, first=2)
    assert all(len({a.pid for a in told}) == 1 for told in replicas.heard[:2])


def test_a_replica_with_other_settings_is_refused_and_the_others_go_on(replicas: Replicas) -> None:
    for _ in range(2):
        replicas.start()
    replicas.listen(_have_rounds(range(2), 2))
    refused = replicas.start(RegTopK(density=0.5))
    error = replicas.answer(refused)
    replicas.kill(refused)
    assert isinstance(error, ClusterError)
    assert "density, got 0.25 on rank 0, 0.25 on rank 1, 0.5 on rank 2" in str(error)
    num_rounds = replicas.heard[0][-1].num_rounds
    replicas.listen(lambda told: all(t[-1].num_rounds >= num_rounds + 3 for t in told[:2]))
    _check_alike(replicas.heard[:2], 1, first=0)


def test_a_replica_that_the_others_are_ahead_of_goes_on_from_them(replicas: Replicas) -> None:
    """It has sent its entries and fails then: the round counts on the other one."""
    replicas.start(FailsOnce(density=0.25))
    replicas.start(FailsOnce(density=0.25), failing=(2,))
    replicas.listen(_have_rounds(range(2), 6))
    assert [told[-1].num_failed for told in replicas.heard] == [0, 1]
    behind = next(a for a in replicas.heard[1] if a.num_failed == 1)
    ahead = next(a for a in replicas.heard[0] if a.num_rounds == 3)
    assert (behind.num_rounds, ahead.weights) == (2, [0.5, 0.5])
    healed = next(a for a in replicas.heard[1] if a.num_rounds > 2)
    assert (healed.num_rounds, healed.residual_norm, healed.weights) == (4, 0, [1, 0])
    for after in (a for told in replicas.heard for a in told):
        assert after.dense_bytes == after.num_seen * 4 * 83  # two replicas send all of it
    _check_alike(replicas.heard, 1, first=0)


@pytest.mark.parametrize("replicas", [2_000], indirect=True)
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_replica_that_is_late_is_left_out_and_sends_its_update_later(
    replicas: Replicas, fragments: int
) -> None:
    for late_at in (None, None, 20):
        replicas.start(TopK(density=0.25), every=2 * fragments, fragments=fragments, late_at=late_at)
    replicas.listen(_have_rounds((2,), 16))
    before, back = replicas.heard[2][9:11]  # after its steps 18 and 20
    meanwhile = [a for a in replicas.heard[0] if before.num_rounds < a.num_rounds < back.num_rounds]
    assert meanwhile and all(after.weights == [0.5, 0.5] for after in meanwhile)
    assert back.weights == [1 / 3] * 3  # it has something to send
    assert back.residual_norm > 0 and [told[-1].num_failed for told in replicas.heard] == [0, 0, 0]
    _check_alike(replicas.heard, 1, first=0)


@pytest.mark.parametrize("delay", [0, 1])
def test_replicas_train_on_without_a_lighthouse_and_meet_when_it_is_back(
    replicas: Replicas, delay: int
) -> None:
    for _ in range(3):
        replicas.start(delay=delay, quorum_s=2)
    replicas.listen(_have_rounds(range(3), 3, weights=3))
    port = replicas.lose_lighthouse()
    replicas.listen(lambda told: all(t[-1].num_failed >= 2 for t in told))
    gone = [told[-1] for told in replicas.heard]
    replicas.start_lighthouse(port)
    enough = [last.num_rounds + 3 for last in gone]
    replicas.listen(lambda told: all(t[-1].num_rounds >= n for t, n in zip(told, enough, strict=True)))
    # each has made as many steps as it could meanwhile
    _check_alike([[a._replace(num_seen=0) for a in told] for told in replicas.heard], 1, first=0)
    for told, last in zip(replicas.heard, gone, strict=True):
        back = next(a for a in told if a.num_rounds > last.num_rounds)
        assert back.residual_norm > 0  # none begins anew: nobody has heard what it learned meanwhile
        assert back.num_seen >= last.num_steps and len({a.pid for a in told}) == 1


def test_a_replica_hands_on_the_state_that_it_could_not_begin_from_yet(replicas: Replicas) -> None:
    """It was given the first one's, which is gone then: the third begins from the second."""
    replicas.start()
    replicas.start(fails_to_meet=True)
    assert replicas.answer(1) == "has not met"
    replicas.kill(0)
    replicas.start()
    replicas.listen(_have_rounds((1, 2), 3))
    _check_alike(replicas.heard[1:], 0, first=0)


def _run(function: Callable[..., None], *arguments: Any) -> None:
    """Run it in a process of its own: torchft leaves the socket of its HTTP server open."""
    process, pipe = fork_process(_tell_failure, function, arguments)
    assert pipe.poll(240)
    failure = pipe.recv()
    process.join()
    pipe.close()
    assert failure is None, failure


def _tell_failure(pipe: Connection, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        function(*arguments)
        pipe.send(None)
    except BaseException:
        pipe.send(traceback.format_exc())


def _is_bias(name: str, _: nn.Parameter) -> bool:
    return name == "bias"


@pytest.mark.parametrize(
    "options", [{"skip": _is_bias}, {"fragments": 2}, {"delay": 3}, {"fragments": 2, "delay": 1}]
)
def test_a_round_that_fails_changes_nothing_and_the_next_one_sends_it(options: dict[str, Any]) -> None:
    _run(_fail_in_a_round, options)


def _fail_in_a_round(options: dict[str, Any]) -> None:
    fragments, delay = options.get("fragments", 1), options.get("delay", 0)
    pause, num_before = 4 // fragments, 2 * fragments  # steps per turn, rounds before the one that fails
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = _manager(store, lighthouse.address(), 0, min_replicas=1)
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = TorchftExchange(manager, model, optimizer, FailsOnce(density=0.25), every=4, **options)
    first, learned = _flat(exchange.state_dict()["start"]), torch.zeros(24)
    FailsOnce.failing.add(2)

    def train(num_steps: int) -> None:
        """With gradients that do not depend on the parameters: what a step changes is known beforehand."""
        for slopes in torch.randn(num_steps, 24):
            model.weight.grad, model.bias.grad = slopes[:20].view(4, 5), slopes[20:]
            optimizer.step()
            learned.sub_(slopes, alpha=0.1)

    def check(num_rounds: int, num_failed: int) -> None:
        """theta_start, the residual and what was learned since are all that was learned: no more, no less."""
        state = exchange.state_dict()
        assert (state["num_rounds"], exchange.num_failed) == (num_rounds, num_failed)
        num_seen = pause * (num_rounds + min(num_failed, num_rounds - num_before))
        assert state["num_steps"] == num_seen  # a round that failed has the steps of the next one
        found = _flat(dict(model.named_parameters())) - first - _residual(exchange)
        torch.testing.assert_close(found, learned)

    try:
        train(pause * num_before + pause - 1)
        check(num_before, 0)
        before, residual = exchange.state_dict(), _residual(exchange)
        train(1 + delay)  # no error leaves optimizer.step()
        assert "this round fails" in str(manager.errored())
        assert torch.equal(_flat(exchange.state_dict()["start"]), _flat(before["start"]))
        assert torch.equal(_residual(exchange), residual)
        check(num_before, 1)
        train(pause)  # the same fragment has the next turn
        check(num_before + 1, 1)
        train(pause)
        check(num_before + 2, 1)
        ahead = exchange.state_dict()
        ahead["start"] = {name: start + 1 for name, start in ahead["start"].items()}
        with torch.no_grad():
            exchange._maker.begin_from(ahead, is_late=True)
        first += 1  # of a replica that was late all else is as it was: its residual, and what it has learned
        check(num_before + 2, 1)
        kept = exchange.state_dict()
        damages: list[dict[str, Any]] = [{"start": {"weight": torch.zeros(1)}}, {"shared": [{}] * 9}]
        for damage in (*damages, {"frozen": None}):
            with pytest.raises(StateError):
                exchange.load_state_dict({**before, **damage})
            assert torch.equal(_flat(exchange.state_dict()["start"]), _flat(kept["start"]))
        model.load_state_dict(before["start"])  # as users do, who load all
        exchange.load_state_dict(before)  # as from a disk: all but the residual and what was learned since
        with exchange.agreed():
            assert torch.equal(_flat(dict(model.named_parameters())), _flat(before["start"]))
        assert not _residual(exchange).any() and exchange.num_steps == num_before * pause
        with listening() as warnings:
            train(2 * pause + delay)
        assert warnings == []
        after = exchange.state_dict()
        assert after["num_rounds"] == after["num_steps"] // pause == num_before + 2
    finally:
        exchange.close()
        manager.shutdown()
        lighthouse.shutdown()


def _flat(tensors: dict[str, Any]) -> Tensor:
    return torch.cat([tensors[name].detach().flatten() for name in ("weight", "bias")])


def _residual(exchange: TorchftExchange) -> Tensor:
    states = [(bucket.state, bucket.layout.numel) for bucket in exchange._steps.buckets.all]
    parts = [s.residual if isinstance(s, ResidualState) else torch.zeros(numel) for s, numel in states]
    return torch.cat(parts)


NO_SUM = "algorithm must keep no sum over all replicas, in which one that leaves would still count, got"
SHORTER = "delay must be less than every // fragments, 2, as one round is under way at a time, got 2"
BAD_INPUT: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": EF21(density=0.5)}, f"{NO_SUM} 'ef21', which keeps 'aggregate'"),
    ({"every": 4, "fragments": 2, "delay": 2}, SHORTER),
    ({"clip_norm": 3.0}, "clip_norm must be None with torchft, got 3.0"),
    ({"weight": "tokens"}, "weight must be positive and finite, got 'tokens'"),
    ({"process_group": "all"}, "process_group must not be given, as the Manager has a group, got 'all'"),
    (
        {"handshake_timeout_s": 30},
        "handshake_timeout_s must not be given, as the Manager has quorum_timeout, got 30",
    ),
    ({"manager": Mock(_use_async_quorum=True)}, "manager must have use_async_quorum=False, got True"),
]


@pytest.mark.parametrize(("options", "text"), BAD_INPUT)
def test_bad_input(options: dict[str, Any], text: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"manager": None, "algorithm": REGTOPK, **options}
    with pytest.raises(ArgumentError) as refused:
        TorchftExchange(parameters=model, optimizer=optimizer, **options)
    assert str(refused.value) == text


def test_the_guides_code_runs() -> None:
    _run(_follow_the_guide)


def _follow_the_guide() -> None:
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    os.environ |= {**given, "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    model = nn.Linear(20, 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    names: dict[str, Any] = {"torch": torch, "model": model, "optimizer": optimizer}
    (source,) = blocks((ROOT / "docs" / "elastic.md").read_text(encoding="utf-8"), "python torchft")
    try:
        exec(compile(source, "guide", "exec"), names)
        for _ in range(40):
            optimizer.zero_grad()
            model(torch.randn(4, 20)).square().mean().backward()
            optimizer.step()
        assert (names["exchange"].num_rounds, names["exchange"].num_failed) == (2, 0)
    finally:
        names["manager"].shutdown()
        lighthouse.shutdown()
