"""An exchange of updates among replicas that torchft's Manager brings together: they may come and go.

torchft has wheels for x86_64 Linux alone: ``pip install regtopk[torchft]``.
"""

import logging
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.optim import Optimizer

from regtopk.core.algorithm import Algorithm
from regtopk.core.options import check_integer, check_positive
from regtopk.distributed.options import Collective, Options, ResidualDtype, Skip, Writer, names_typos
from regtopk.distributed.requests.record import summarise
from regtopk.distributed.state.buckets import Bucket
from regtopk.distributed.state.layout import into
from regtopk.distributed.state.parameters import NamedParameters
from regtopk.distributed.steps.base import Counted
from regtopk.distributed.steps.handshake import compare
from regtopk.distributed.steps.step import Kind, Step, Steps
from regtopk.distributed.transport.bare_group import BareCollectives
from regtopk.distributed.transport.collectives import Alone
from regtopk.distributed.updates.buffers import How
from regtopk.distributed.updates.model import LocalModel
from regtopk.distributed.updates.optimizers import Outer
from regtopk.distributed.updates.saved import copied
from regtopk.errors import ArgumentError, ClusterError, MissingExtraError, RegtopkError

try:
    from torchft.manager import Manager
    from torchft.process_group import ManagedProcessGroup
except ImportError as error:
    raise MissingExtraError(
        "regtopk.integrations.torchft needs torchft: pip install 'regtopk[torchft]'"
    ) from error

_WARNING = (
    "after round %d a replica's update was not finite: all replicas went back to where the round began; "
    "total.num_skipped counts such rounds"
)
_log = logging.getLogger("regtopk")


class UpdateExchange(Counted):
    """`regtopk.UpdateExchange` among the replicas of a torchft Manager, after every `every`-th step.

    >>> manager = Manager(pg=ProcessGroupGloo(), load_state_dict=None, state_dict=None, min_replica_size=1,
    ...                   use_async_quorum=False)
    >>> exchange = UpdateExchange(manager, model, optimizer, TopK(density=0.01), every=20)
    >>> ...                                  # train as on one process

    A round begins with a quorum: the replicas that are there take part, and the weights are theirs. It counts
    only when `manager.should_commit()` says so. Otherwise the residual, theta_start and the outer optimizer
    are as before it, the replica trains on from where it is, and the next round sends what this one did not.

    A replica that is new, or was left behind, gets theta_start, both optimizers' states and what the
    algorithm knows on all replicas from another one. It has no residual and weight zero in that round. It
    waits for that round when it makes this object, at most the Manager's `quorum_timeout`.

    The settings of all replicas are compared in every round. What goes wrong in a round is told to
    `manager.report_error`, and no error leaves `optimizer.step()` but the Manager's own: that there is no
    quorum within `quorum_timeout`, or that `max_retries` is exceeded.

    The exchange calls `start_quorum` and `should_commit`: nothing else may. For checkpoints on disk save
    `state_dict()` with `manager.state_dict()` on one replica, and load both on every one before training.

    Args:
        manager: with use_async_quorum=False and world_size_mode=DYNAMIC.
        parameters: this, and all that is not named here, is as in `regtopk.UpdateExchange`.
        algorithm: not EF21: its sum of all replicas' estimates would be wrong once one leaves.
        weight: how much this replica counts, against the others that take part: w_n = weight / their sum.

    Raises:
        ArgumentError: an option breaks its rule, or the optimizer trains other parameters.
        ClusterError: the replicas differ.
    """

    @names_typos
    def __init__(
        self,
        manager: Manager,
        parameters: nn.Module | NamedParameters,
        optimizer: Optimizer,
        algorithm: Algorithm[Any],
        *,
        every: int = 1,
        outer: Outer | None = None,
        weight: float = 1.0,
        index_code: str = "elias-fano",
        skip: Skip | None = None,
        dense_steps: int = 0,
        buffers: How = "mean",
        writer: Writer | None = None,
        collective: Collective = "auto",
        residual_dtype: ResidualDtype = "float32",
    ) -> None:
        check_integer("every", every, at_least=1)
        check_integer("dense_steps", dense_steps, at_least=0)
        check_positive("weight", weight)
        if getattr(manager, "_use_async_quorum", False):
            raise ArgumentError("manager must have use_async_quorum=False, got True")
        options = Options(
            index_code=index_code,
            dense_steps=-(-dense_steps // every),
            skip=skip,
            collective=collective,
            writer=writer,
            residual_dtype=residual_dtype,
        )
        model = LocalModel(parameters, optimizer, outer, buffers)
        if model.is_sharded:
            raise ArgumentError("parameters must be a plain model, got one that fully_shard has sharded")
        settings = tuple({"every": every, **model.describe()}.items())
        kind = Kind("regtopk.integrations.torchft.UpdateExchange", _WARNING, settings)
        self._steps = Steps(model.parameters, algorithm, Alone(), options, kind)
        _refuse_sums(algorithm, self._steps.buckets.all)
        model.make_room(self._steps.buckets.all)
        self.every = every
        self._manager, self._model, self._weight = manager, model, float(weight)
        self._num_steps = self._num_steps_in_round = self._num_failed = 0
        self._is_new = True  # whether this replica has made no round from the state that it has
        self._given: dict[str, Any] | None = None  # a peer's state, to go on from
        self._problem: Exception | None = None  # what went wrong in the last round
        self._buffers_before: Any = None  # the buffers before they were joined in this round
        manager.register_state_dict_fn("regtopk", self._take_from_peer, self.state_dict)
        self._join()
        self._hook = optimizer.register_step_post_hook(self._after_step)

    @property
    def num_steps(self) -> int:
        """How many optimizer steps led here: those of the peer that this replica began from included."""
        return self._num_steps

    @property
    def num_rounds(self) -> int:
        """How many rounds were committed, without those with an update that was not finite."""
        return self._steps.num_steps

    @property
    def num_failed(self) -> int:
        """How many rounds of this replica were not committed."""
        return self._num_failed

    @property
    def outer(self) -> Optimizer | None:
        """The outer optimizer, for a learning rate that changes."""
        return self._model.outer

    def summary(self) -> str:
        """What this replica sent, against dense gradients in every step, and where the time went."""
        steps = self._steps
        norm = self.total.residual_norm
        return summarise(steps.ledger, steps.rank.num_workers, steps.algorithm.name, norm, self.every)

    def close(self) -> None:
        """End the exchange: the optimizer's steps stay on this replica from now on."""
        self._hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """What a new replica goes on from, on the CPU: all but this replica's residual and local steps."""
        if self._given is not None:  # the round that it came in failed, and this replica will begin from it
            return self._given
        model, start = self._model, self._model.buffers.saved()["start"]
        return {
            "num_rounds": self._steps.num_steps,
            "num_steps": self._num_steps - self._num_steps_in_round,
            "start": copied(model.start),
            "frozen": copied(model.frozen),
            "buffers": {"now": copied(start), "start": copied(start)},
            "optimizer": copied(model.optimizer.state_dict()),
            "outer": {} if model.outer is None else copied(model.outer.state_dict()),
            "shared": copied(self._steps.buckets.shared()),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, on every replica: parameters, buffers and both optimizers are set too."""
        self._begin_from(state_dict)

    def _take_from_peer(self, state_dict: dict[str, Any]) -> None:
        """Called by the Manager in a quorum: go on from it when the settings have been compared."""
        self._given, self._is_new = state_dict, True

    def _join(self) -> None:
        """Make rounds until one counts: with nothing to send, for the others' state."""
        while not self._make_round():
            if isinstance(self._problem, RegtopkError):  # the replicas differ; all else may pass
                raise self._problem
        self._num_failed = 0

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # GradScaler calls fused optimizers to skip, too
        if found_inf is not None and bool(found_inf):
            return
        self._num_steps += 1
        self._num_steps_in_round += 1
        if self._num_steps_in_round >= self.every:
            self._make_round()
            self._num_steps_in_round = 0

    @torch.no_grad()
    def _make_round(self) -> bool:
        """Exchange an update with the replicas that are there. Whether it counts."""
        manager, model, steps = self._manager, self._model, self._steps
        step, self._problem, self._buffers_before = None, None, None
        manager.start_quorum()
        with ExitStack() as stack:
            try:
                if manager.errored() is None and self._meet():
                    model.parameters.check()
                    model.parameters.check_trainable()
                    buckets = steps.buckets.all
                    step = stack.enter_context(
                        steps.step(
                            partial(model.take_update, buckets), num_dense=self.every, can_be_taken_back=True
                        )
                    )
                    self._send(step)
            except Exception as problem:
                self._problem = problem
                manager.report_error(problem)
            is_committed = bool(manager.should_commit())
            if step is not None and is_committed:
                self._go_on(step)
            elif step is not None:
                step.take_back()
        if is_committed:
            self._is_new = False
        else:
            if self._buffers_before is not None:
                model.buffers.put_back(self._buffers_before)
            self._num_failed += 1
            why = self._problem or manager.errored()
            _log.warning("round %d was not committed: %s", self.num_rounds, why)
        return is_committed

    def _meet(self) -> bool:
        """See who is there. Whether anybody has something to send."""
        steps = self._steps
        group = _group_of(self._manager)
        stamp = crc32(repr(steps.settings).encode())
        mine = [0.0 if self._is_new else self._weight, float(stamp)]
        everyone = group.all_gather(torch.tensor(mine, dtype=torch.float64, device=steps.device)).cpu()
        if bool((everyone[:, 1] != stamp).any()):
            compare(group, steps.settings)
        if self._given is not None:
            self._begin_from(self._given)
        weights = everyone[:, 0] / everyone[:, 0].sum().clamp(min=torch.finfo(torch.float64).tiny)
        if not bool(weights.any()):
            return False
        steps.regroup(group, weights)
        return True

    def _send(self, step: Step) -> None:
        """Get the aggregate, and leave theta_start as it is."""
        model, steps = self._model, self._steps
        if step.is_finite:
            step.exchange(into(model.update))
            self._buffers_before = model.buffers.copies()
            model.buffers.join(steps.rank, steps.device)

    def _go_on(self, step: Step) -> None:
        """Begin the next round from the aggregate, now that it counts."""
        model = self._model
        names = [name for bucket in step.buckets for name in bucket.names]
        if not step.is_finite:
            model.take_back()
        elif model.outer is None:
            torch._foreach_sub_([model.start[name] for name in names], [model.update[name] for name in names])
        else:
            model.apply_outer(model.outer, names)
        model.write_back()

    def _begin_from(self, given: dict[str, Any]) -> None:
        """Take a peer's place: all is as there, but for the residual, which is zero."""
        model, steps = self._model, self._steps
        for own, theirs in ((model.start, given["start"]), (model.frozen, given["frozen"])):
            for name, tensor in theirs.items():
                own[name].copy_(tensor)
        model.write_back()
        model.buffers.load(given["buffers"])
        model.optimizer.load_state_dict(deepcopy(given["optimizer"]))
        if model.outer is not None:
            model.outer.load_state_dict(deepcopy(given["outer"]))
        steps.buckets.begin_from(given["shared"])
        steps.num_steps = given["num_rounds"]
        self._num_steps, self._num_steps_in_round = given["num_steps"], 0
        self._given = None


def _group_of(manager: Manager) -> BareCollectives:
    """Collectives over the Manager's process group, as it is in this quorum."""
    rank, num_replicas = manager.participating_rank(), manager.num_participants()
    group = ManagedProcessGroup(manager)
    if rank is None or num_replicas != group.parent.size():
        raise ClusterError("manager must have world_size_mode=DYNAMIC: some replicas are spare")
    return BareCollectives(group, rank, num_replicas)


def _refuse_sums(algorithm: Algorithm[Any], buckets: list[Bucket]) -> None:
    for state in (bucket.state for bucket in buckets):
        for field in state.per_entry_fields():
            if state.rules()[field] == "shared":
                raise ArgumentError(
                    f"algorithm must keep no sum over all replicas, which one that leaves would stay in; got "
                    f"{algorithm.name!r}, which keeps {field!r}"
                )
