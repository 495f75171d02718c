"""An exchange of updates among replicas that torchft's Manager brings together: they may come and go.

torchft has wheels for x86_64 Linux alone: ``pip install regtopk[torchft]``.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from regtopk.core.algorithm import Algorithm
from regtopk.core.options import check_positive
from regtopk.distributed.options import ExchangeOptions, Options, names_typos, refuse_k
from regtopk.distributed.state.buckets import Bucket
from regtopk.distributed.state.layout import into
from regtopk.distributed.state.parameters import NamedParameters
from regtopk.distributed.steps.handshake import compare
from regtopk.distributed.steps.step import Step, Steps, Take, Vectors
from regtopk.distributed.transport.collectives import Alone, BareCollectives
from regtopk.distributed.updates.buffers import How
from regtopk.distributed.updates.exchange import UpdatesBase, kind_of
from regtopk.distributed.updates.model import LocalModel
from regtopk.distributed.updates.optimizers import Outer
from regtopk.distributed.updates.rank_rounds import RankRounds
from regtopk.distributed.updates.saved import LoadedModel, copied, load_into
from regtopk.errors import ArgumentError, ClusterError, MissingExtraError, RegtopkError
from regtopk.rounds import Rounds

try:
    from torchft.manager import Manager
    from torchft.process_group import ManagedProcessGroup
except ImportError as error:
    raise MissingExtraError(
        "regtopk.integrations.torchft needs torchft: pip install 'regtopk[torchft]'"
    ) from error

_log = logging.getLogger("regtopk")


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
        self.turn_at = 0  # the clock of the last round that counts
        self.given: dict[str, Any] | None = None  # a peer's state, to go on from
        self.is_new = True  # whether this replica has made no round from the state that it has
        self._has_senders = False  # whether anybody has something to send in this round
        self.is_committed = False
        self.problem: Exception | None = None  # what went wrong in this round
        self._buffers: dict[str, Tensor] = {}  # as they were sent; then what all replicas made of them

    def gather(self, clock: int) -> int:
        """Begin a round: see who is there, and take a peer's place if that one is ahead."""
        self.problem, self._has_senders = None, False
        self._manager.start_quorum()
        with self._reporting():
            self._has_senders = self._manager.errored() is None and self._compare()
        self._buffers = {name: buffer.clone() for name, buffer in self._model.buffers.named.items()}
        return self._rounds.next_send(self.turn_at)

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
            self.is_committed = bool(self._manager.should_commit())  # which it is not

    @contextmanager
    def receive(self, fragment: int) -> Iterator[bool | None]:
        """Wait for the aggregate."""
        yield self._outcome(fragment, self.land(fragment))

    def begin_from(self, given: dict[str, Any]) -> None:
        """Take a peer's place: all is as there, but for the residual, which is zero."""
        for name, tensor in given["frozen"].items():
            self._model.frozen[name].copy_(tensor)
        same = {name: given[name] for name in ("num_steps", "start", "optimizer", "buffers")}
        load_into(self._model, LoadedModel(outer_state=given["outer"], **same))
        self._steps.buckets.begin_from(given["shared"])
        self._steps.num_steps = given["num_rounds"]
        self.turn_at = given["turn_at"]
        self.given = None

    def _compare(self) -> bool:
        """Compare settings, and share the weights. Whether anybody has something to send."""
        steps, manager = self._steps, self._manager
        rank, num_replicas = manager.participating_rank(), manager.num_participants()
        bare = ManagedProcessGroup(manager)
        if rank is None or num_replicas != bare.parent.size():
            raise ClusterError("manager must have world_size_mode=DYNAMIC: some replicas are spare")
        group = BareCollectives(bare, rank, num_replicas)  # as it is in this quorum
        stamp = crc32(repr(steps.settings).encode())
        mine = [0.0 if self.is_new else self._weight, float(stamp)]
        everyone = group.all_gather(torch.tensor(mine, dtype=torch.float64, device=steps.device)).cpu()
        if bool((everyone[:, 1] != stamp).any()):
            compare(group, steps.settings)
        if self.given is not None:
            self.begin_from(self.given)
        weights = everyone[:, 0]
        if not bool(weights.any()):
            return False
        steps.regroup(group, weights / weights.sum())
        return True

    def _meet(self, fragment: int, vectors: Vectors | Take, outer: Optimizer | None, num_steps: int) -> bool:
        """Exchange an update, and ask whether that counts: then the aggregate gets into theta_start."""
        model, steps = self._model, self._steps
        step: Step | None = None
        buckets, num_dense = self._buckets_of(fragment), self._rounds.every
        with ExitStack() as stack:
            with self._reporting():
                if self._has_senders:
                    counted = steps.step(vectors, buckets, num_dense=num_dense, can_be_taken_back=True)
                    step = stack.enter_context(counted)
                    if step.is_finite:
                        step.exchange(into(model.update))
                        if self._is_last(fragment):
                            self._buffers = model.buffers.joined(steps.rank, steps.device, self._buffers)
            self.is_committed = bool(self._manager.should_commit())
            if step is not None and not self.is_committed:
                step.take_back()
            elif step is not None:
                self.turn_at = self._rounds.next_send(self.turn_at)
                if step.is_finite:
                    model.apply(outer, model.fragments[fragment])
        return step is None or step.is_finite

    def _outcome(self, fragment: int, is_finite: bool) -> bool | None:
        """Whether all updates were finite; None: the round does not count, or nobody had anything to send."""
        if not self.is_committed:
            self.num_failed += 1
            why = self.problem or self._manager.errored()
            _log.warning("round %d was not committed: %s", self._steps.num_steps, why)
            return None
        self.is_new = False
        if self._has_senders and is_finite and self._is_last(fragment):
            self._model.buffers.put(self._buffers)
        return is_finite if self._has_senders else None

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Tell the Manager what goes wrong: the round then does not count."""
        try:
            yield
        except Exception as problem:
            self.problem = problem
            self._manager.report_error(problem)


class TorchftExchange(UpdatesBase):
    """`regtopk.UpdateExchange` among the replicas of a torchft Manager, after every `every`-th step.

    >>> manager = Manager(pg=ProcessGroupGloo(), load_state_dict=None, state_dict=None, min_replica_size=1,
    ...                   use_async_quorum=False)
    >>> exchange = TorchftExchange(manager, model, optimizer, TopK(density=0.01), every=20)
    >>> ...                                  # train as on one process

    A round begins with a quorum: the replicas that are there take part, and the weights are theirs. It counts
    only when `manager.should_commit()` says so. Otherwise the residual, theta_start and the outer optimizer
    are as before it, the replica trains on from where it is, and the next round sends what this one did not.
    With `delay`, the optimizer's step waits for the quorum, and the exchange goes on beside training.

    A replica that is new, or was left behind, gets theta_start, both optimizers' states and what the
    algorithm knows on all replicas from another one. It has no residual and weight zero in that round. It
    waits for that round when it makes this object, at most the Manager's `quorum_timeout`.

    What goes wrong in a round, settings that differ included, is told to `manager.report_error`. No error
    leaves `optimizer.step()` but the Manager's own: that there is no quorum within `quorum_timeout`, or that
    `max_retries` is exceeded. Nothing else may call `start_quorum` and `should_commit`.

    For checkpoints on disk save `state_dict()` with `manager.state_dict()` on one replica, and load both on
    every one before training.

    Args:
        manager: with use_async_quorum=False and world_size_mode=DYNAMIC.
        parameters: this, and all that is not named here, is as in `regtopk.UpdateExchange`.
        algorithm: not EF21: its sum of all replicas' estimates would be wrong once one leaves.
        delay: 0 to every // fragments - 1, as one round is under way at a time.
        options: see `regtopk.ExchangeOptions`. `weight` is more than 0, and w_n its share of the sum over the
            replicas that take part; None: 1. There is no `process_group`: the Manager has one.
    """

    _peer = "replica"
    _maker: QuorumRounds

    @names_typos
    def __init__(
        self,
        manager: Manager,
        parameters: nn.Module | NamedParameters,
        optimizer: Optimizer,
        algorithm: Algorithm[Any],
        *,
        every: int = 1,
        delay: int = 0,
        fragments: int = 1,
        mix: float = 1.0,
        outer: Outer | None = None,
        buffers: How = "mean",
        **options: Unpack[ExchangeOptions],
    ) -> None:
        rounds = Rounds("updates", every=every, delay=delay, fragments=fragments, mix=mix)
        rounds.check_times()
        if delay >= every // fragments:
            raise ArgumentError(
                f"delay must be less than every // fragments, {every // fragments}, as one round is under "
                f"way at a time, got {delay}"
            )
        checked = Options(**options)
        weight = 1.0 if checked.weight is None else checked.weight
        check_positive("weight", weight)
        if checked.process_group is not None:
            raise ArgumentError(
                f"process_group must be None, as the Manager has one, got {checked.process_group!r}"
            )
        if getattr(manager, "_use_async_quorum", False):
            raise ArgumentError("manager must have use_async_quorum=False, got True")
        checked = replace(checked, weight=None, dense_steps=-(-checked.dense_steps // every))  # as rounds
        model = LocalModel(parameters, optimizer, outer, buffers, fragments=fragments)
        if model.is_sharded:
            raise ArgumentError("parameters must be a plain model, got one that fully_shard has sharded")
        if fragments > 1:
            refuse_k(algorithm)
        kind = kind_of("regtopk.integrations.torchft.TorchftExchange", model, rounds, peer="replica")
        steps = Steps(model.parameters, algorithm, Alone(), checked, kind)
        _refuse_sums(algorithm, steps.buckets.all)
        model.make_room(steps.buckets.all)
        maker = QuorumRounds(manager, float(weight), steps, model, rounds)
        self._follow(steps, model, rounds, maker)
        manager.register_state_dict_fn("regtopk", self._take_from_peer, self.state_dict)
        self._join()

    @property
    def num_failed(self) -> int:
        """How many rounds of this replica were not committed."""
        return self._maker.num_failed

    def state_dict(self) -> dict[str, Any]:
        """What a new replica goes on from, on the CPU: all but this replica's residual and local steps."""
        maker, model, steps = self._maker, self._model, self._steps
        if maker.given is not None:  # the round that it came in failed, and this replica will begin from it
            return maker.given
        with steps.lock:  # a round that is under way ends before
            begun = model.buffers.saved()["start"]
            return {
                "num_rounds": steps.num_steps,
                "num_steps": self._num_steps,
                "turn_at": maker.turn_at,
                "start": copied(model.start),
                "frozen": copied(model.frozen),
                "buffers": {"now": copied(begun), "start": copied(begun)},
                "optimizer": copied(model.optimizer.state_dict()),
                "outer": {} if model.outer is None else copied(model.outer.state_dict()),
                "shared": copied(steps.buckets.shared()),
            }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, on every replica: parameters, buffers and both optimizers are set too."""
        self._maker.load([])
        self._maker.begin_from(state_dict)
        self._rounds.load(self._maker.turn_at, [[] for _ in self._model.fragments], is_start=True)
        self._num_steps = state_dict["num_steps"]

    @torch.no_grad()
    def _join(self) -> None:
        """Make rounds until one counts: with nothing to send, for the others' state."""
        maker = self._maker
        while not maker.is_committed:
            clock = maker.gather(0)
            self._rounds.exchange(self._rounds.rounds.due(clock)[0], clock)
            if isinstance(maker.problem, RegtopkError):  # the replicas differ; all else may pass
                raise maker.problem
        maker.num_failed = 0
        self._rounds.clock = maker.turn_at

    def _take_from_peer(self, state_dict: dict[str, Any]) -> None:
        """Called by the Manager in a quorum: go on from it when the settings have been compared."""
        self._maker.given, self._maker.is_new = state_dict, True
        self._num_steps = state_dict["num_steps"]


def _refuse_sums(algorithm: Algorithm[Any], buckets: list[Bucket]) -> None:
    for state in (bucket.state for bucket in buckets):
        for field in state.per_entry_fields():
            if state.rules()[field] == "shared":
                raise ArgumentError(
                    "algorithm must keep no sum over all replicas, in which one that leaves would still "
                    f"count, got {algorithm.name!r}, which keeps {field!r}"
                )


UpdateExchange = TorchftExchange  # its name before, for one release
