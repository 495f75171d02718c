"""An exchange of updates among replicas that torchft's Manager brings together: they may come and go.

torchft has wheels for x86_64 Linux alone: ``pip install 'regtopk[torchft]'``.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from regtopk.core.algorithm import Algorithm
from regtopk.core.options import check_positive
from regtopk.distributed.options import names_typos
from regtopk.distributed.state.buckets import Bucket, into
from regtopk.distributed.state.parameters import NamedParameters
from regtopk.distributed.state.saved import malformed
from regtopk.distributed.state.shards import copied, shapes_of
from regtopk.distributed.steps.handshake import compare
from regtopk.distributed.steps.step import Step, Steps, Take, Vectors
from regtopk.distributed.transport.collectives import Alone, BareCollectives
from regtopk.distributed.updates.exchange import UpdateOptions, UpdatesBase
from regtopk.distributed.updates.inner import Inner
from regtopk.distributed.updates.model import LocalModel
from regtopk.distributed.updates.rank_rounds import RankRounds
from regtopk.distributed.updates.saved import AT_A_ROUNDS_END, LoadedModel, load_into
from regtopk.errors import ArgumentError, ClusterError, RegtopkError, StateError, importing, log
from regtopk.rounds import LocalRounds, Rounds

with importing(
    "regtopk.integrations.torchft needs torchft: pip install 'regtopk[torchft]', "
    "on x86_64 Linux with Python 3.10 to 3.13; torchft has no wheels for others"
):
    from torchft.manager import Manager
    from torchft.process_group import ManagedProcessGroup

_MANAGED = {"process_group": "a group", "handshake_timeout_s": "quorum_timeout"}  # what the Manager has


class QuorumRounds(RankRounds):
    """The local rounds of replicas that a torchft Manager brings together.

    A round begins with a quorum, and counts only if the Manager says so. If not, all is as before it, and the
    same fragment has the next turn. So the number of rounds that count tells whose turn it is.
    """

    def __init__(
        self, manager: Manager, weight: float, steps: Steps, model: LocalModel, rounds: Rounds
    ) -> None:
        super().__init__(steps, model, rounds)
        self._manager, self._weight = manager, weight
        self.num_failed = 0
        self._turn_at = 0  # the clock of the last round that counts
        self._num_seen = 0  # how many steps the replica had made then: those that theta_start has seen
        self._given: dict[str, Any] | None = None  # a peer's state, to go on from
        self._is_new = True  # whether this replica has made no round from the state that it has
        self._is_committed = False  # whether the last round counts
        self._is_heard = False  # whether others may have heard an update of it that does not count here

    def join(self, rounds: LocalRounds) -> None:
        """Make rounds until one counts: with nothing to send, for the others' state."""
        while not self._is_committed:
            clock, _ = self.gather(0, self._num_seen)
            rounds.exchange(self._rounds.due(clock)[0])
            if self._problem and (isinstance(self._problem, RegtopkError) or not self._has_quorum):
                raise self._problem  # replicas differ, or there is no quorum; all else may pass
        self.num_failed = 0
        rounds.begin(self._num_steps, self._turn_at)

    def gather(self, clock: int, num_steps: int) -> tuple[int, int]:
        """Begin a round: see who is there, and take a peer's place if that one is ahead."""
        self._num_steps = num_steps
        self._problem: Exception | None = None
        self._has_senders = False  # whether anybody has something to send
        self._manager._quorum_future = None  # the Manager raises one that failed again
        try:
            self._manager.start_quorum()
        except TimeoutError as problem:  # the lighthouse is gone, or too few replicas are there
            self._problem = problem
        self._has_quorum = self._problem is None
        if self._has_quorum:
            with self._reporting():
                self._has_senders = self._manager.errored() is None and self._compare()
        # as they are sent: kept as long as a round beside training may read them
        self._buffers = {name: buffer.clone() for name, buffer in self._model.buffers.named.items()}
        return self._rounds.next_send(self._turn_at), self._num_steps

    @contextmanager
    def exchange(self, fragment: int, num_steps: int) -> Iterator[bool | None]:
        """A whole round at once."""
        take = partial(self._model.take_update, self._buckets_of(fragment))
        yield self._outcome(fragment, self._meet(fragment, take, self._model.outer, num_steps))

    def send(self, fragment: int, num_steps: int) -> None:
        """Start a round, which goes on beside training."""
        self._flights.pop(fragment, None)
        with self._reporting():
            super().send(fragment, num_steps)
        if fragment not in self._flights:
            self._is_committed = self._commits()  # which it is not

    @contextmanager
    def receive(self, fragment: int) -> Iterator[bool | None]:
        """Wait for the aggregate."""
        yield self._outcome(fragment, self.land(fragment))

    def take(self, given: dict[str, Any]) -> None:
        """Called by the Manager in a quorum: go on from a peer's state when settings have been compared.

        A replica that was late, or had no quorum, keeps what it has not sent. One whose own round failed may
        have been heard by others, and begins anew.
        """
        self._given, self._is_new = given, self._is_new or self._is_heard

    def state_dict(self) -> dict[str, Any]:
        """What a new replica goes on from: all but this replica's residual and local steps."""
        if self._given is not None:  # the round that it came in failed, and this replica will begin from it
            return self._given
        self.land_all()
        model, steps = self._model, self._steps
        begun = model.buffers.saved()["start"]
        state: dict[str, Any] = {
            "num_rounds": steps.num_steps,
            "num_steps": self._num_seen,
            "turn_at": self._turn_at,
            "start": model.start,
            "frozen": model.frozen,
            "buffers": {"now": begun, "start": begun},
            "optimizer": model.inner.state_dict(),
            "outer": {} if model.outer is None else model.outer.state_dict(),
            "shared": steps.buckets.shared(),
        }
        return {name: copied(part) for name, part in state.items()}

    def begin_from(self, given: dict[str, Any], *, is_late: bool = False) -> None:
        """Take a peer's place: all is as there, but for the residual, which is zero.

        A late replica keeps its residual, its own optimizer's state, and its update: theta_n - theta_start.
        """
        self.load([])
        model, own = self._model, AT_A_ROUNDS_END
        if is_late:
            moves = {name: given["start"][name].to(old.device) - old for name, old in model.start.items()}
            moved = {name: model.parameters.named[name] + move for name, move in moves.items()}
            own = own | {"optimizer": model.inner.state_dict(), "parameters": moved}
        for name, tensor in given["frozen"].items():
            model.frozen[name].copy_(tensor)
        same = {name: given[name] for name in ("num_steps", "start", "optimizer", "buffers")}
        load_into(model, LoadedModel(outer_state=given["outer"], **(same | own)))
        self._steps.begin_from(given["shared"], given["num_rounds"], is_late=is_late)
        self._turn_at, self._num_seen = given["turn_at"], given["num_steps"]
        self._num_steps, self._given = self._num_seen, None

    def _compare(self) -> bool:
        """Compare settings, and share the weights. Whether anybody has something to send."""
        steps, manager = self._steps, self._manager
        rank, num_replicas = manager.participating_rank(), manager.num_participants()
        bare = ManagedProcessGroup(manager)
        if rank is None or num_replicas != bare.parent.size():
            raise ClusterError("manager must have world_size_mode=DYNAMIC: some replicas are spare")
        group = BareCollectives(bare, rank, num_replicas)  # as it is in this quorum
        stamp = crc32(repr(steps.settings).encode())
        mine = [0 if self._is_new else self._weight, stamp, self._num_steps]
        everyone = group.all_gather(torch.tensor(mine, dtype=torch.float64, device=steps.device)).cpu()
        self._forget_addresses()
        weights, stamps, num_steps = everyone.unbind(1)
        if bool((stamps != stamp).any()):
            compare(group, steps.settings)
        if is_behind := self._given is not None:
            self.begin_from(self._given, is_late=not self._is_new)
        if not bool(weights.any()):
            return False
        if self._is_new or is_behind:  # it takes what the senders have learned
            self._num_steps = int(num_steps[weights > 0].max())
        steps.regroup(group, weights / weights.sum())
        return True

    def _forget_addresses(self) -> None:
        """All have met: where is told no more, as a new lighthouse numbers its quorums from 1 again."""
        store, group_rank = self._manager._store, str(self._manager._group_rank)
        for key in store.list_keys():
            if key.startswith("torchft/") and key.split("/")[2] == group_rank:
                store.delete_key(key)

    def _meet(self, fragment: int, vectors: Vectors | Take, outer: Optimizer | None, num_steps: int) -> bool:
        """Exchange an update, and ask whether that counts: then the aggregate gets into theta_start."""
        model, steps, buckets = self._model, self._steps, self._buckets_of(fragment)
        step: Step | None = None
        with ExitStack() as stack:
            with self._reporting():
                if self._has_senders:
                    counted = steps.step(vectors, buckets, num_dense=num_steps, can_be_taken_back=True)
                    step = stack.enter_context(counted)
                    if step.is_finite:
                        step.exchange(into(model.update))
                        if self._is_last(fragment):
                            self._joined = model.buffers.joined(steps.rank, steps.device, self._buffers)
            self._is_committed = self._commits()
            if step is not None and not self._is_committed:
                step.take_back()
            elif step is not None:
                self._turn_at, self._num_seen = self._rounds.next_send(self._turn_at), self._num_steps
                if step.is_finite:
                    model.apply(outer, model.fragments[fragment])
        return step is None or step.is_finite

    def _outcome(self, fragment: int, is_finite: bool) -> bool | None:
        """Whether all updates were finite; None: the round does not count, or nobody had anything to send."""
        if not self._is_committed:
            self.num_failed += 1
            why = self._problem or self._manager.errored()
            log.warning("round %d was not committed: %s", self._steps.num_steps, why)
            return None
        self._is_new = False
        if self._has_senders and is_finite and self._is_last(fragment):
            self._model.buffers.put(self._joined)
        return is_finite if self._has_senders else None

    def _commits(self) -> bool:
        """Whether the round counts. The Manager knows only of rounds that have a quorum."""
        is_committed = self._has_quorum and bool(self._manager.should_commit())
        self._is_heard = not is_committed and (self._is_heard or self._has_senders)
        return is_committed

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Tell the Manager what goes wrong: the round then does not count."""
        try:
            yield
        except Exception as problem:
            self._problem = problem
            self._manager.report_error(problem)


class TorchftExchange(UpdatesBase):
    """`regtopk.UpdateExchange` among the replicas of a torchft Manager, after every `every`-th step.

    >>> manager = Manager(pg=ProcessGroupGloo(), load_state_dict=None, state_dict=None, min_replica_size=1,
    ...                   use_async_quorum=False)
    >>> exchange = TorchftExchange(manager, model, optimizer, TopK(density=0.01), every=20)
    >>> ...                                  # train as on one process

    A round begins with a quorum: the replicas that are there take part, and the weights are theirs. It counts
    only when `manager.should_commit()` says so; otherwise the next round sends what this one did not. Nothing
    else may call `start_quorum` and `should_commit`. With `delay`, a step waits for the quorum alone.

    A replica that is new waits for a round, and goes on from another one's state. One that was late does so
    too, and keeps what it has not sent. What goes wrong in a round is told to `manager.report_error`.
    docs/elastic.md has more on this and on saving.

    Args:
        manager: with use_async_quorum=False and world_size_mode=DYNAMIC.
        parameters: this, and all that is not named here, is as in `regtopk.UpdateExchange`.
        algorithm: not EF21: its sum of all replicas' estimates would be wrong once one leaves.
        delay: 0 to every // fragments - 1, as one round is under way at a time.
        options: see `regtopk.ExchangeOptions`. `every` is the same on all replicas, and `clip_norm` None.
            `weight` is more than 0, and w_n its share of the sum over the replicas that take part; None: 1.
            `process_group` and `handshake_timeout_s` are the Manager's.
    """

    _call, _peer = "regtopk.integrations.torchft.TorchftExchange", "replica"
    _maker: QuorumRounds

    @names_typos
    def __init__(
        self,
        manager: Manager,
        parameters: nn.Module | NamedParameters,
        optimizer: Inner,
        algorithm: Algorithm[Any],
        **options: Unpack[UpdateOptions],
    ) -> None:
        for name, value in options.items():
            if name in _MANAGED and value is not None:
                raise ArgumentError(
                    f"{name} must not be given, as the Manager has {_MANAGED[name]}, got {value!r}"
                )
        if options.get("clip_norm") is not None:
            raise ArgumentError(f"clip_norm must be None with torchft, got {options['clip_norm']}")
        if getattr(manager, "_use_async_quorum", False):
            raise ArgumentError("manager must have use_async_quorum=False, got True")
        weight = options.get("weight")
        check_positive("weight", weight := 1.0 if weight is None else weight)
        rounds, model, checked, kind = self._prepared(parameters, optimizer, algorithm, options)
        kind = replace(kind, settings={"every": rounds.every, **kind.settings})  # which is the same on all
        pause = rounds.every // rounds.fragments
        if rounds.delay >= pause:
            raise ArgumentError(
                f"delay must be less than every // fragments, {pause}, as one round is under way at a time, "
                f"got {rounds.delay}"
            )
        if model.is_sharded:
            raise ArgumentError("model must be plain, got one that fully_shard has sharded")
        steps = Steps(model.parameters, algorithm, Alone(), replace(checked, weight=None), kind)
        _refuse_sums(algorithm, steps.buckets.all)
        maker = QuorumRounds(manager, float(weight), steps, model, rounds)
        self._follow(steps, model, rounds, maker)
        manager.register_state_dict_fn("regtopk", maker.take, maker.state_dict)
        with torch.no_grad():
            maker.join(self._rounds)

    @property
    def num_failed(self) -> int:
        """How many rounds of this replica were not committed."""
        return self._maker.num_failed

    def state_dict(self) -> dict[str, Any]:
        """What a new replica goes on from, on the CPU: all but this replica's residual and local steps."""
        return self._maker.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, on every replica: parameters, buffers and both optimizers are set too."""
        with malformed():
            _check_shapes(self._maker.state_dict(), state_dict)
        self._maker.begin_from(state_dict)
        self._rounds.begin(state_dict["num_steps"], state_dict["turn_at"])


def _check_shapes(own: dict[str, Any], saved: dict[str, Any]) -> None:
    for name in ("start", "frozen"):
        if shapes_of(saved[name]) != shapes_of(own[name]):
            raise StateError(
                f"{name} of the saved state must have the shapes {shapes_of(own[name])}, got "
                f"{shapes_of(saved[name])}"
            )
    if list(map(shapes_of, saved["shared"])) != list(map(shapes_of, own["shared"])):
        raise StateError(f"shared of the saved state must have {len(own['shared'])} buckets of this model's")


def _refuse_sums(algorithm: Algorithm[Any], buckets: list[Bucket]) -> None:
    for state in (bucket.state for bucket in buckets):
        for field in state.per_entry_fields():
            if state.rules()[field] == "shared":
                raise ArgumentError(
                    "algorithm must keep no sum over all replicas, in which one that leaves would still "
                    f"count, got {algorithm.name!r}, which keeps {field!r}"
                )
