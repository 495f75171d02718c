"""What a step consists of: from every rank's gradients to the aggregate, and all that changes on the way."""

import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.algorithms.dense import Dense
from regtopk.core.algorithm import Algorithm, WithDensity
from regtopk.core.codes import check_index_code
from regtopk.core.traffic import all_reduce_bytes
from regtopk.core.worker import Report
from regtopk.distributed.options import Options
from regtopk.distributed.requests.rank import Rank
from regtopk.distributed.requests.record import Curves, Ledger, StepRecord
from regtopk.distributed.state import layout
from regtopk.distributed.state import saved as checkpoint
from regtopk.distributed.state.buckets import Bucket, Buckets
from regtopk.distributed.state.parameters import Parameters
from regtopk.distributed.state.shards import Shards
from regtopk.distributed.steps.agreement import Agreement, Asked, Question, ask, share_report
from regtopk.distributed.steps.driver import Driver, Turn
from regtopk.distributed.steps.handshake import agree, described, meet_shards, refuse_oracles, roll_call
from regtopk.distributed.steps.kind import Kind
from regtopk.distributed.transport.collectives import Collectives
from regtopk.errors import ClusterError, StateError

_log = logging.getLogger("regtopk")


class Steps:
    """The steps of one exchange on one rank: parameters, the algorithm's state, and the counts.

    `run` makes a whole step. `begin`, `run_bucket` and `end` make one bucket by bucket, as gradients arrive.
    `begin`, `prepare`, `agree` or `agree_later`, `exchange` and `end` leave room for what else belongs to a
    step.

    Args:
        parameters: what is exchanged, the same names and shapes on every rank.
        algorithm: what is run, the same on every rank.
        collectives: the process group.
        options: see `regtopk.attach`.
        kind: whose steps they are.
        shards: the ranks that hold the rest of the model, if it is sharded: they must step alike.
    """

    def __init__(
        self,
        parameters: Parameters,
        algorithm: Algorithm[Any],
        collectives: Collectives,
        options: Options,
        kind: Kind,
        shards: Shards | None = None,
    ) -> None:
        options.check_algorithm(algorithm)
        self._kind = kind
        self._shards = shards
        self.shard = None if shards is None else shards.place  # [which part of the model, of how many]
        self.parameters = parameters
        self.device = parameters.device
        self.algorithm = algorithm
        self.scope = options.scope
        self._options = options
        named, skip = parameters.named, options.skip
        skipped = frozenset(name for name, p in named.items() if skip is not None and skip(name, p))
        sparse = layout.layout_of(
            (name for name, p in named.items() if name not in skipped and p.numel() > 0), parameters
        )
        check_index_code(options.index_code, sparse.numel)
        refuse_oracles(algorithm, sparse if sparse.numel else None, self.device)
        settings = self._settings(skipped)
        if shards is not None:
            settings["shard"] = shards.place
            meet_shards(shards, collectives, algorithm, options, settings, kind.call)
        roll_call(collectives, kind.call, "handshake_timeout_s", options.handshake_timeout_s)
        weights = agree(collectives, algorithm, options.weight, settings)
        self.settings = described(algorithm, settings)
        self.rank = self._rank_in(collectives, weights)
        self._num_steps = 0
        self._agreement = Agreement(shards)
        self.buckets = Buckets(
            parameters, skipped, algorithm, self.rank, options.residual_dtype, kind.parts or None
        )
        self._driver = Driver()
        self._ledger = Ledger()
        self.pending_report: Report | None = None
        self.obstacle: str | None = None  # why no step can be made
        self.is_closed = False
        self.lock = (
            threading.RLock()
        )  # keeps savers, readers of counts and the thread of scope="bucket" apart
        self._shared_report: Report | None = None
        self._curves = Curves(options.writer)

    def _settings(self, skipped: frozenset[str]) -> dict[str, Any]:
        """What all ranks must have the same."""
        same = ("scope", "index_code", "collective", "deterministic", "dense_steps", "residual_dtype")
        return {
            **{name: getattr(self._options, name) for name in same},
            "skip": sorted(skipped),
            "grad_scaler": self._options.grad_scaler is not None,
            "parameters": self.parameters.describe(),
            **dict(self._kind.settings),
        }

    def _rank_in(self, collectives: Collectives, weights: Tensor) -> Rank:
        return Rank(
            collectives,
            weights,
            index_code=self._options.index_code,
            collective=self._options.collective,
            deterministic=self._options.deterministic,
        )

    def regroup(self, collectives: Collectives, weights: Tensor) -> None:
        """Go on among other ranks, or with other weights, between two steps."""
        self.settle()
        self.rank = self._rank_in(collectives, weights)
        self._agreement.forget()
        self.buckets.regroup(self.rank)
        self.forget_rows()

    def forget_rows(self) -> None:
        """Let go of the memory of buckets that were computed together, if they hold other tensors now."""
        self._driver = Driver()

    @property
    def num_steps(self) -> int:
        """How many steps were made, without those that were skipped."""
        self.settle()
        return self._num_steps

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        self.settle()
        self._num_steps = number

    @property
    def ledger(self) -> Ledger:
        """What the steps sent and how long they took."""
        self.settle()
        return self._ledger

    @property
    def is_finite(self) -> bool:
        """Whether no rank had a NaN or inf in this step, as far as the host knows."""
        return self._agreement.is_finite

    @property
    def is_bad(self) -> Tensor | None:
        """(), on the device: whether a rank had a NaN or inf, if the host does not know yet."""
        return self._agreement.is_bad

    @property
    def is_spoilt(self) -> Tensor | None:
        """The same, or whether a message was damaged."""
        return self._agreement.is_spoilt

    @property
    def num_turns(self) -> int:
        """How many steps were made of every part of the model: the algorithm's own count."""
        return self.num_steps // max(1, len(self._kind.parts))

    @property
    def _is_dense(self) -> bool:
        """Whether this is one of the first steps, which send everything."""
        return self.num_turns < self._options.dense_steps

    @property
    def is_sharded(self) -> bool:
        """Whether every rank holds a part of the model."""
        return self._shards is not None

    # A step.

    def run(self, grads: dict[str, Tensor]) -> None:
        """A whole step: the gradients, by name, become the aggregate in place."""
        self.begin()
        flats = self.prepare(self.buckets.all, grads)
        with self.half_way():
            self.exchange(self.buckets.all, flats, layout.into(grads))
        self.end()

    @contextmanager
    def half_way(self) -> Iterator[None]:
        """Where a failure leaves a state that is not whole: what left the residual has not arrived."""
        try:
            yield
        except BaseException as error:
            self.obstacle = (
                f"step {self.num_steps} failed half-way ({type(error).__name__}: {error}): restart all ranks "
                "from the last checkpoint"
            )
            raise

    def begin(self) -> None:
        """Start counting, and share rank 0's report with an algorithm that listens."""
        self.settle()
        self.check_usable()
        self.take_back()  # a step that was never finished
        self._agreement.begin()
        self.rank.begin(self.device)
        if self.algorithm.listens:
            self._shared_report = share_report(self.rank.collectives, self.pending_report, self.device)

    def run_bucket(self, grads: dict[str, Tensor]) -> None:
        """The part of a step that concerns some parameters; it can be taken back until the step ends."""
        buckets = self.buckets.covering(tuple(grads))
        flats = self.prepare(buckets, grads)
        with self.rank.timer.phase("select_s"):
            for bucket in buckets if self.is_finite else []:
                bucket.keep_state()
        self.exchange(buckets, flats, layout.into(grads))

    def end(self, buckets: list[Bucket] | None = None, num_dense: int = 1) -> None:
        """Count the step, or take it back if some rank's gradients were not finite.

        Args:
            buckets: what was exchanged; all if None.
            num_dense: how many all_reduces of a dense run the step stands for.
        """
        numel = sum(bucket.layout.numel for bucket in buckets or self.buckets.all)
        num_bytes = all_reduce_bytes(4 * numel, self.rank.num_workers)
        self.rank.record.dense_bytes = num_dense * num_bytes
        if self._agreement.end():
            self._count()

    def _count(self) -> None:
        if self.is_finite:
            for bucket in self.buckets.all:
                bucket.is_settled = True
            self._num_steps += 1
            self.pending_report = None
        else:
            self.take_back()
            self._warn_of_nan()
        self.rank.record.num_skipped = int(not self.is_finite)
        self._ledger.waits = self._agreement.waits
        self._ledger.add(self.rank.record, self.rank.timer)
        self._curves.draw(self._numbers, self._num_steps)

    def settle(self) -> None:
        """Find out whether the last step counts, if it ended before the host knew. The host waits here."""
        if self._agreement.is_settled:
            return  # without the lock, which a round under way may hold for long
        with self.lock:
            if not self._agreement.is_settled:
                with self.half_way():
                    self._agreement.settle()
                self._count()

    def _warn_of_nan(self) -> None:
        """Say it once: without a GradScaler the optimizer would make every parameter NaN."""
        if self._options.grad_scaler is None and self.ledger.total.num_skipped == 0:
            _log.warning(self._kind.warning, self.num_steps)

    def take_back(self) -> None:
        """Give the buckets of an unfinished step the state from before it."""
        for bucket in self.buckets.all:
            bucket.take_back()

    def prepare(self, buckets: list[Bucket], grads: dict[str, Tensor]) -> list[Tensor]:
        """The buckets' gradients as flat vectors, once all ranks agree on what is exchanged."""
        with self.rank.timer.phase("select_s"):
            joined = [bucket.join(grads) for bucket in buckets]
            are_finite = [self.unscale_(*each) for each in joined]
        try:
            asked = self._ask(buckets, torch.stack(are_finite).all())
            if self.device.type == "cuda":
                self._clear(buckets, grads)
            self._hear(asked)
        except BaseException:
            scaler = self._options.grad_scaler
            for bucket in buckets:
                bucket.put_back(grads, 1.0 if scaler is None else scaler.get_scale())
            raise
        return [flat for flat, _ in joined]

    def _clear(self, buckets: list[Bucket], grads: dict[str, Tensor]) -> None:
        """Clear the gradients that a sparse aggregate will be written to, while a GPU has nothing to do."""
        for bucket in buckets:
            if not self._is_dense and not isinstance(bucket.algorithm, Dense):
                bucket.clear(grads)

    def agree(self, buckets: list[Bucket], is_finite: Tensor) -> None:
        """Make sure that all ranks exchange the same, and find out whether all ranks' vectors are finite.

        Args:
            buckets: what is exchanged.
            is_finite: (), whether this rank's vectors are.
        """
        self._hear(self._ask(buckets, is_finite))

    def agree_with_shards(self) -> None:
        """Find out whether the other parts of the model are finite: no part may make a step alone."""
        with self.rank.timer.phase("collective_s"):
            self._agreement.hear_shards(self.num_steps, self.device)

    def agree_later(self, buckets: list[Bucket], is_finite: Tensor) -> None:
        """`agree`, also with the other parts of the model; but a host that may go on does not wait.

        Then `is_bad` keeps states as they are on the device, if the step does not count. The host hears of it
        before the next step, or when somebody looks at the counts.
        """
        asked = self._ask(buckets, is_finite)
        if self.algorithm.listens or not self._agreement.may_go_on(asked, self.rank):
            self._hear(asked)
            self.agree_with_shards()
            return
        with self.rank.timer.phase("collective_s"):
            self._agreement.go_on(asked)

    def _ask(self, buckets: list[Bucket], is_finite: Tensor) -> Asked:
        turn = self.num_turns
        num_selected = [self._num_selected(bucket, turn) for bucket in buckets]
        names = [name for bucket in buckets for name in bucket.names]
        with self.rank.timer.phase("collective_s"):
            question = Question(self.num_steps, names, num_selected)
            return ask(self.rank.collectives, question, is_finite, self._ledger.waited_s)

    def _hear(self, asked: Asked) -> None:
        with self.rank.timer.phase("collective_s"):
            self._agreement.hear(asked)

    def unscale_(self, flat: Tensor, is_finite: Tensor | None = None) -> Tensor:
        """Take the loss scale out of a gradient, which `exchange` puts back; is it finite?

        Args:
            flat: the gradient.
            is_finite: whether it is finite with the scale, if that is known.
        """
        scaler = self._options.grad_scaler
        if scaler is not None:
            flat.div_(scaler.get_scale())
            is_finite = None  # a scale below one may have made it overflow
        return kernels.is_finite(flat) if is_finite is None else is_finite

    def _num_selected(self, bucket: Bucket, turn: int) -> int:
        """How many entries this rank will send of a bucket; -1 if only the algorithm can tell."""
        algorithm = bucket.algorithm
        if turn < self._options.dense_steps or not isinstance(algorithm, WithDensity):
            return -1
        if algorithm.k is None and algorithm.density is None:  # a threshold decides
            return -1
        return algorithm.num_selected(bucket.worker.at(turn, self._shared_report))

    def exchange(self, buckets: list[Bucket], flats: list[Tensor], write: layout.Write) -> None:
        """Turn the buckets' gradients into the aggregate, or into NaN if some rank's are not finite.

        Args:
            buckets: what is exchanged.
            flats: their gradients, from `prepare`.
            write: what is done with the aggregate.
        """
        if self.is_finite:
            turn = Turn(self.num_turns, self._shared_report, self._is_dense, self.is_bad)
            aggregates = self._driver.run(self.rank, self.buckets.all, buckets, flats, turn)
            scaler = self._options.grad_scaler
            if scaler is not None:  # not in place: the algorithm may have kept it
                aggregates = [(total * scaler.get_scale(), None) for total, _ in aggregates]
        else:
            aggregates = [(flat.fill_(math.nan), None) for flat in flats]
        with self.rank.timer.phase("decode_s"):
            for bucket, aggregate in zip(buckets, aggregates, strict=True):
                write(bucket.names, *aggregate, bucket.is_cleared)
            self._agreement.check_messages(self.rank)  # last: the host may wait here, and all is launched

    def _numbers(self) -> dict[str, float]:
        return self.with_residual_norm(self.ledger.last_step).as_dict()

    # What was done so far.

    def with_residual_norm(self, record: StepRecord) -> StepRecord:
        """The record, with the norm of all that this rank has not sent yet."""
        with self.lock:
            return replace(record, residual_norm=self.buckets.residual_norm())

    def check_usable(self) -> None:
        """Refuse to go on from a state that a failure has left incomplete, or that is closed."""
        if self.obstacle is not None:
            raise ClusterError(self.obstacle)

    def close(self, call: str) -> None:
        """No step, saving or loading follows."""
        try:
            self.settle()
        finally:
            self.obstacle, self.is_closed = f"the exchange must not be used after {call}()", True

    def state_dict(self) -> dict[str, Any]:
        """This rank's state after the last finished step."""
        with self.lock:
            self.settle()
            self.check_usable()
            saved = checkpoint.state_dict(self.buckets, self.num_steps, self.ledger, self.pending_report)
            return saved if self.shard is None else {**saved, "shard": self.shard}

    def loaded(self, saved: dict[str, Any]) -> checkpoint.Progress:
        """What a saved state holds; nothing changes yet.

        DDP makes the same buckets again later, so scope="bucket" keeps them.
        """
        with self.lock:
            if self.is_closed:
                self.check_usable()
            if isinstance(saved, dict):
                saved = self._without_shard(saved)
            keeps_buckets = self.scope == "bucket" or bool(self._kind.parts)
            return checkpoint.loaded(self.buckets, saved, keeps_buckets=keeps_buckets)

    def _without_shard(self, saved: dict[str, Any]) -> dict[str, Any]:
        if saved.get("shard") != self.shard:
            raise StateError(f"shard of the saved state must be {self.shard}, got {saved.get('shard')}")
        return {key: part for key, part in saved.items() if key != "shard"}

    def go_on_from(self, progress: checkpoint.Progress) -> None:
        """Go on from what was loaded."""
        with self.lock:
            self.buckets.all, self._num_steps, self._ledger, self.pending_report = progress
            self.obstacle = None
            self._agreement.forget()
            self.forget_rows()
