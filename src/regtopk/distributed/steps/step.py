"""The steps of an exchange: from every rank's gradients to the aggregate, and all that changes on the way.

A step with a NaN is skipped: `agreement` finds it on all ranks, `Step.exchange` (or `gradients.fsdp`) writes
NaN, `driver` gives states back where the host went on, and `Steps` counts it. Rounds: `LocalRounds._skip`.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regtopk import kernels
from regtopk._version import __version__
from regtopk.core.algorithm import Algorithm, WithDensity, check_is_algorithm
from regtopk.core.codes import check_index_code
from regtopk.core.traffic import all_reduce_bytes
from regtopk.core.worker import Report
from regtopk.distributed.options import Options
from regtopk.distributed.requests.rank import Rank
from regtopk.distributed.requests.record import Ledger, StepRecord, draw
from regtopk.distributed.state import saved
from regtopk.distributed.state.buckets import Bucket, Buckets, ByName, Write, into
from regtopk.distributed.state.parameters import Parameters, facts, refuse_meta
from regtopk.distributed.state.shards import Shards
from regtopk.distributed.steps.agreement import Agreement, Question, Scaling, share_report
from regtopk.distributed.steps.alike import Alike
from regtopk.distributed.steps.driver import Turn, run
from regtopk.distributed.steps.handshake import end_group, meet, refuse_oracles
from regtopk.distributed.transport.collectives import Collectives, new_group_like
from regtopk.errors import ClusterError, log

_MOST_KNOWN = 64  # of what all ranks have agreed on: a density may change with every step
Vectors = tuple[list[Tensor], Tensor]  # of the buckets of a step; and (), whether all of them are finite
Take = Callable[[], Vectors]


@dataclass(frozen=True)
class Kind:
    """What tells one kind of exchange from another."""

    call: str  # what users called to get here, for the error when some rank did not
    warning: str = (  # logged when a step is skipped for the first time
        "after step %d a rank's gradients were not finite, so all ranks get NaN: look at "
        "last_step.num_skipped before optimizer.step()"
    )
    settings: Mapping[str, Any] = field(default_factory=dict)  # what ranks compare, beside the options
    parts: tuple[tuple[str, ...], ...] = ()  # the names of parameters that are exchanged together; none: all
    takes_turns: bool = False  # whether a step exchanges one part, not all of them
    has_thread: bool = False  # whether steps are made beside training: they need a process group of their own
    scaling: Scaling = field(default_factory=Scaling)  # what vectors are multiplied by
    every: int = 1  # how many of the optimizer's steps this rank makes for one of these


@dataclass(eq=False)
class Step:
    """A step that has begun: all ranks are here, and exchange the same. See `Steps.step`."""

    steps: "Steps"
    turn: Turn
    agreement: Agreement
    is_taken_back: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether no rank had a NaN or inf, as far as the host knows."""
        return self.agreement.is_finite

    def exchange(self, write: Write) -> None:
        """Turn the vectors into the aggregate, or into NaN if some rank's are not finite, and write it."""
        rank, scaler = self.steps.rank, self.steps._options.grad_scaler
        if self.is_finite:
            turn = self.turn._replace(is_bad=self.agreement.is_bad)
            aggregates = run(self.steps._alike, rank, self.steps.buckets.all, turn)
            if scaler is not None:  # not in place: the algorithm may have kept it
                aggregates = [(total * scaler.get_scale(), None) for total, _ in aggregates]
        else:
            aggregates = [(flat.fill_(math.nan), None) for flat in self.turn.flats]
        with rank.timer.phase("decode_s"):
            for bucket, aggregate in zip(self.turn.buckets, aggregates, strict=True):
                write(bucket.names, *aggregate)
            self.agreement.check_messages(rank)  # last: the host may wait here, and all is launched

    def take_back(self) -> None:
        """Give the buckets their state from before the step, which then does not count."""
        self.is_taken_back = True
        for bucket in self.turn.buckets:
            bucket.state, bucket.state_before = bucket.settled_state, None


class Steps:
    """The steps of one exchange on one rank: parameters, the algorithm's state, and the counts.

    `shards` are the ranks that hold the rest of the model, if it is sharded: they must step alike.
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
        check_is_algorithm(algorithm)
        self.parameters = parameters
        self.device = parameters.device
        self.algorithm = algorithm
        self.collectives = collectives  # for what users call
        self.shard = None if shards is None else shards.place  # [which part of the model, of how many]
        self.kind, self._options = kind, options
        # a rank that holds the whole model has no other to agree with
        self.others = None if shards is None or shards.place[1] == 1 else shards.collectives
        named, skip = parameters.named, options.skip
        skipped = frozenset(name for name, p in named.items() if skip is not None and skip(name, p))
        sparse = parameters.layout_of(n for n, p in named.items() if n not in skipped and p.numel() > 0)
        check_index_code(options.index_code, sparse.numel)
        refuse_meta(named.items())
        refuse_oracles(algorithm, sparse if sparse.numel else None, self.device)
        self.settings = self._compared(skipped)
        weights, self.everys = meet(collectives, shards, self.settings, options, kind.call, kind.every)
        self._num_dense = -(-options.dense_steps // max(self.everys))  # steps that send everything
        if kind.has_thread:
            collectives = Collectives(new_group_like(collectives.group, self.device), options.link)
        self.rank = Rank(collectives, weights, options)
        self.buckets = Buckets(parameters, skipped, algorithm, self.rank, kind.parts)
        self.pending_report: Report | None = None
        self.is_closed = False
        self.lock = threading.RLock()  # keeps savers, readers of counts and a thread's steps apart
        self._num_steps = 0
        self._ledger = Ledger()
        self._forget()
        self._obstacle: str | None = None  # why no step can be made
        self._writer = options.writer

    def _compared(self, skipped: frozenset[str]) -> dict[str, Any]:
        """What all ranks must have the same."""
        same = ("index_code", "collective", "link", "deterministic", "dense_steps", "residual_dtype")
        name = self.algorithm.name
        return {
            "regtopk version": __version__,
            "algorithm": name,
            **{f"{name} {option}": value for option, value in self.algorithm.options().items()},
            **{option: getattr(self._options, option) for option in same},
            "skip": sorted(skipped),
            "grad_scaler": self._options.grad_scaler is not None,
            "parameters": facts(self.parameters.named),
            **self.kind.settings,
            **({} if self.shard is None else {"shard": self.shard}),
        }

    def regroup(self, collectives: Collectives, weights: Tensor) -> None:
        """Go on over another process group, among other ranks or with other weights, between two steps."""
        self.settle()
        if collectives.rank == self.rank.index and torch.equal(weights, self.rank.weights):
            self.rank.collectives = collectives
            return
        self.rank = Rank(collectives, weights, self._options)
        self.buckets.regroup(self.rank)
        self._forget()

    def begin_from(self, shared: list[dict[str, Tensor]], num_steps: int, *, is_late: bool = False) -> None:
        """Take a peer's place, with what all ranks know by then; who is only late keeps its residual."""
        self.settle()
        self.buckets.begin_from(shared, is_late=is_late)
        self._num_steps = num_steps
        self._forget()

    def _forget(self) -> None:
        """Ranks, or what they exchange, have changed."""
        self._unheard: Agreement | None = None  # of a step of which the host does not know if it counts
        self._known: set[tuple[int, ...]] = set()  # what all ranks have agreed on
        self._alike = Alike()  # lets go of the memory of buckets that were computed together

    # A step.

    @contextmanager
    def step(
        self,
        vectors: Vectors | Take,
        buckets: list[Bucket] | None = None,
        *,
        num_dense: int = 1,
        tokens: float = 0.0,
        may_go_on: bool = False,
        can_be_taken_back: bool = False,
    ) -> Iterator[Step]:
        """Make one step: inside the block all ranks are here and agree, and at its end the step is counted.

        A failure inside the block leaves a state that is not whole: what left the residual has not arrived.
        No other step can be made then, until a checkpoint is loaded.

        Args:
            vectors: of the buckets, which the algorithm may change; or what makes them, in the step's time.
            buckets: what is exchanged; all if None.
            num_dense: how many all_reduces of a dense run the step stands for.
            tokens: how many this rank's vectors were learned from, where they are weighed by that.
            may_go_on: whether the host may go on without the answers, where collectives run on the device.
                Then `agreement.is_spoilt` tells there whether the step counts; `settle` tells the host.
            can_be_taken_back: keep a copy of the state, for `step.take_back()` and for failures.
        """
        buckets = self.buckets.all if buckets is None else buckets
        with self.lock:
            step = self._begin(vectors, buckets, tokens, may_go_on)
            for bucket in buckets if can_be_taken_back and step.is_finite else ():  # else none changes
                bucket.keep_state()
            with self.half_way(step if can_be_taken_back else None):
                yield step
            if step.is_taken_back:
                return
            exchanged = buckets if self.kind.takes_turns else self.buckets.all
            self.rank.record.dense_bytes = num_dense * self.dense_bytes(exchanged)
            for bucket in buckets:
                bucket.state_before = None
            if step.agreement.is_bad is None:
                self._count(step.agreement)
            else:
                self._unheard = step.agreement

    def run(self, grads: dict[str, Tensor]) -> None:
        """A whole step: the gradients, by name, become the aggregate in place, or NaN."""
        by_name = ByName(grads)

        def take() -> Vectors:
            joined = [bucket.join(by_name) for bucket in self.buckets.all]
            are_finite = [self.unscale_(*each) for each in joined]
            return [flat for flat, _ in joined], torch.stack(are_finite).all()

        with self.step(take) as step:
            step.exchange(into(by_name))

    def _begin(self, vectors: Vectors | Take, buckets: list[Bucket], tokens: float, may_go_on: bool) -> Step:
        """See that all ranks are here, exchange the same, and have finite vectors."""
        self.settle()
        self.check_usable()
        self.rank.begin(self.device, names := sum((bucket.names for bucket in buckets), ()))
        timer, ranks = self.rank.timer, self.rank.collectives
        report = share_report(ranks, self.pending_report, self.device) if self.algorithm.listens else None
        with timer.phase("select_s"):
            flats, is_finite = vectors() if callable(vectors) else vectors
        turn = Turn(buckets, flats, self.num_turns, report, self.num_turns < self._num_dense)
        selected = tuple(_num_selected(bucket, turn) for bucket in buckets)
        question = Question(self._num_steps, names, selected)
        # Others must expect messages of these lengths, so this rank asks what all have agreed on before.
        # A rank that now asks for something else hears of it, and raises.
        is_safe = question.what in self._known and not self.rank.idle and not self.algorithm.listens
        scaling = self.kind.scaling
        numbers = scaling.numbers(flats, tokens, self.others) if any(scaling) else None
        with timer.phase("collective_s"):
            agreement = Agreement(ranks, self.others, question, is_finite, self._ledger.waited_s, numbers)
            if may_go_on and is_safe and agreement.is_on_device:
                agreement.go_on()
            else:
                for bucket in buckets:
                    bucket.sums.clear_spare()
                agreement.hear()
                self._known = {*self._known, question.what} if len(self._known) < _MOST_KNOWN else set()
        if numbers is not None and agreement.is_finite:
            self._scale_(flats, agreement.numbers)
        return Step(self, turn, agreement)

    def _scale_(self, flats: list[Tensor], numbers: Tensor) -> None:
        scaling, ranks = self.kind.scaling, self.rank.collectives.ranks
        clipped = scaling.clipped(numbers, self.rank.weights)
        scale = (clipped * scaling.weighed(numbers, ranks))[self.rank.index]
        self._ledger.num_clipped.update(ranks[n] for n in (clipped < 1).nonzero())
        for flat in flats if scale != 1 else ():
            flat.mul_(scale.to(flat.dtype))

    def unscale_(self, flat: Tensor, is_finite: Tensor | None = None) -> Tensor:
        """Take the loss scale out of a gradient; is it finite? `is_finite`: with the scale, if known."""
        if self._options.grad_scaler is not None:
            flat.div_(self._options.grad_scaler.get_scale())
            is_finite = None  # a scale below one may have made it overflow
        return kernels.is_finite(flat) if is_finite is None else is_finite

    @contextmanager
    def half_way(self, step: Step | None = None) -> Iterator[None]:
        """Where a failure leaves a state that is not whole, unless there is a step to take back."""
        try:
            yield
        except BaseException as error:
            if step is not None:
                step.take_back()
            else:
                told = f"step {self._num_steps} failed half-way ({type(error).__name__}: {error})"
                self._obstacle = f"{told}: restart all ranks from the last checkpoint"
            raise

    def dense_bytes(self, buckets: list[Bucket]) -> int:
        """What a ring all_reduce of float32 would move of them."""
        numel = sum(bucket.layout.numel for bucket in buckets)
        return all_reduce_bytes(4 * numel, self.rank.num_workers)

    def settle(self) -> None:
        """Find out whether the last step counts, if it ended before the host knew. The host waits here."""
        if self._unheard is None:
            return  # without the lock, which a round under way may hold for long
        with self.lock:
            agreement, self._unheard = self._unheard, None
            if agreement is not None:
                with self.half_way():
                    agreement.hear_late()
                self._count(agreement)

    def _count(self, agreement: Agreement) -> None:
        if agreement.is_finite:
            self._num_steps += 1
            self.pending_report = None
        elif self._options.grad_scaler is None and self._ledger.total.num_skipped == 0:
            # once: without a GradScaler the optimizer would make every parameter NaN
            log.warning(self.kind.warning, self._num_steps)
        self.rank.record.num_skipped = int(not agreement.is_finite)
        self._ledger.waits = agreement.waits
        self._ledger.add(self.rank.record, self.rank.timer)
        if self._writer is not None:
            record = self.with_residual_norm(self._ledger.last_step)
            self._writer = draw(self._writer, record, self._num_steps)

    # What was done so far.

    @property
    def num_steps(self) -> int:
        """How many steps were made, without those that were skipped."""
        self.settle()
        return self._num_steps

    @property
    def num_turns(self) -> int:
        """How many steps were made of every part of the model: the algorithm's own count."""
        return self.num_steps // (len(self.kind.parts) if self.kind.takes_turns else 1)

    @property
    def ledger(self) -> Ledger:
        """What the steps sent and how long they took."""
        self.settle()
        return self._ledger

    def with_residual_norm(self, record: StepRecord) -> StepRecord:
        """The record, with the norm of all that this rank has not sent yet."""
        with self.lock:
            return replace(record, residual_norm=self.buckets.residual_norm())

    def check_usable(self) -> None:
        """Refuse to go on from a state that a failure has left incomplete, or that is closed."""
        if self._obstacle is not None:
            raise ClusterError(self._obstacle)

    def close(self, call: str = "close") -> None:
        """No step, saving or loading follows."""
        try:
            self.settle()
        finally:
            if self.kind.has_thread and not self.is_closed:
                end_group(self.rank.collectives)
            self._obstacle, self.is_closed = f"the exchange must not be used after {call}()", True

    def drop(self) -> None:
        """`close`, and set the memory of residuals free."""
        self.close("detach")
        self.buckets.all = []
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state after the last finished step."""
        with self.lock:
            self.settle()
            self.check_usable()
            state = saved.state_dict(self.buckets, self.num_steps, self.ledger, self.pending_report)
            return state if self.shard is None else {**state, "shard": self.shard}

    def loaded(self, state: dict[str, Any]) -> saved.Progress:
        """What a saved state holds; nothing changes yet."""
        with self.lock:
            if self.is_closed:
                self.check_usable()
            return saved.loaded(self.buckets, state, keeps_buckets=bool(self.kind.parts))

    def go_on_from(self, progress: saved.Progress) -> None:
        """Go on from what was loaded."""
        with self.lock:
            self.buckets.all, self._num_steps, self._ledger, self.pending_report = progress
            self._obstacle = None
            self._forget()


def _num_selected(bucket: Bucket, turn: Turn) -> int:
    """How many entries this rank will send of a bucket; -1 if only the algorithm can tell."""
    algorithm = bucket.algorithm
    if turn.is_dense or not isinstance(algorithm, WithDensity):
        return -1
    if algorithm.k is None and algorithm.density is None:  # a threshold decides
        return -1
    return algorithm.num_selected(bucket.worker.at(turn.number, turn.report))
