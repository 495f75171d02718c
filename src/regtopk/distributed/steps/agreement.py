"""What all ranks must know of a step: do they exchange the same, and is all of it finite?

One small all_gather tells it. The host hears the answers before it exchanges anything. Or, where collectives
run on the device, it goes on without them, and hears them later.
"""

from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from regtopk.core.worker import Report
from regtopk.distributed.requests.rank import Rank
from regtopk.distributed.state.shards import Shards
from regtopk.distributed.transport.collectives import Collectives, by_rank
from regtopk.errors import ClusterError
from regtopk.wire import raise_for_status

AGREEMENT_BYTES = 7 * 8  # what `ask` sends to every other rank: seven int64
_MOST_KNOWN = 64


class Question(NamedTuple):
    """What a rank is about to exchange, which must be the same on all ranks.

    Attributes:
        num_steps: how many steps it has done.
        names: the parameters, in order.
        num_selected: how many entries of each bucket it is about to send; -1 where that is not known before.
    """

    num_steps: int
    names: list[str]
    num_selected: list[int]

    def numbers(self) -> list[int]:
        """All of it: the step, and what is exchanged, which has the same numbers only if it is the same."""
        sums = [crc32(repr(things).encode()) for things in (self.names, self.num_selected)]
        return [self.num_steps, len(self.names), sum(n for n in self.num_selected if n > 0), *sums]


class OnItsWay:
    """A copy of a tensor for the host, which does not wait for it before it reads."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)
        self._is_there = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def read(self) -> Tensor:
        """The copy. The host waits here."""
        if self._is_there is not None:
            self._is_there.synchronize()
        return self._copy


class Asked(NamedTuple):
    """What was asked of which ranks, and their answers, (N, 7), which may be on their way to the host."""

    ranks: list[int]
    question: Question
    answers: Tensor
    for_the_host: OnItsWay


class _Unheard(NamedTuple):
    """What the host does not know yet of a step that it has ended."""

    asked: Asked
    is_bad: OnItsWay
    refusals: OnItsWay | None


class Agreement:
    """Whether all ranks make the same step, and whether it counts: no rank may have a NaN or inf.

    Args:
        shards: the ranks that hold the rest of the model, if it is sharded: they must step alike.

    Attributes:
        is_finite: whether no rank had a NaN or inf in this step, as far as the host knows.
        is_bad: (), on the device: whether one had, if the host does not know yet.
        is_spoilt: the same, or whether a message was damaged.
        waits: how long every rank has been in collectives, as they told one another last.
    """

    def __init__(self, shards: Shards | None) -> None:
        self.is_finite = True
        self.is_bad: Tensor | None = None
        self.is_spoilt: Tensor | None = None
        self.waits: list[float] = []
        self._shards = None if shards is None else shards.collectives
        if self._shards is not None and self._shards.num_workers == 1:
            self._shards = None  # this rank holds the whole model
        self._asked: Asked | None = None  # what this step goes on without the answers to
        self._status: Tensor | None = None  # of its messages
        self._unheard: _Unheard | None = None  # the last step, if the host does not know whether it counts
        self._known: set[tuple[int, ...]] = set()  # what all ranks have agreed on

    def begin(self) -> None:
        """A new step."""
        self.is_finite, self.is_bad, self.is_spoilt = True, None, None
        self._asked = self._status = None

    def forget(self) -> None:
        """Ranks, or what they exchange, have changed."""
        self._asked = self._unheard = None
        self._known = set()

    def hear(self, asked: Asked) -> None:
        """Wait for the answers.

        Raises:
            ClusterError: the ranks are at different steps (resumed from different checkpoints, say), or about
                to send different numbers of entries (by a density of their own).
        """
        is_finite, self.waits = _heard(asked)
        self.is_finite &= is_finite
        if len(self._known) >= _MOST_KNOWN:  # a density that changes with every step
            self._known = set()
        self._known.add(tuple(asked.question.numbers()[1:]))

    def hear_shards(self, num_steps: int, device: torch.device) -> None:
        """Find out whether the other parts of the model are finite: no part may make a step alone."""
        if self._shards is None:
            return
        there = self._shards.device_for_flags(device)
        mine = torch.tensor([int(not self.is_finite), num_steps], device=there)
        are_bad, steps = self._shards.all_gather(mine).T.tolist()
        if len(set(steps)) > 1:
            raise ClusterError(
                "all parts of a model must be at the same step, got "
                f"{by_rank(map('step {}'.format, steps), self._shards.ranks)}"
            )
        self.is_finite = not any(are_bad)

    def may_go_on(self, asked: Asked, rank: Rank) -> bool:
        """Whether this step may go on without the answers.

        Collectives must run on the device. And this rank must ask what all ranks have agreed on before: so
        their messages have the lengths that others expect. If another rank asks something else, that rank
        hears of it and raises. This one finds nobody to exchange with, and hears of it later if at all.
        """
        is_known = tuple(asked.question.numbers()[1:]) in self._known
        return is_known and not rank.idle and rank.collectives.is_on_device(asked.answers.device)

    def go_on(self, asked: Asked) -> None:
        """Go on without the answers: whether the step counts is known on the device alone, by `is_bad`."""
        are_bad = asked.answers[:, 0]
        if self._shards is not None:
            mine = asked.answers[:, :3:2].amax(0)  # is one bad, and the step
            are_bad = self._shards.all_gather(mine)[:, 0]  # as ranks that wait do, in `hear_shards`
        self._asked, self.is_bad = asked, are_bad.any()
        self.is_spoilt = self.is_bad

    def check_messages(self, rank: Rank) -> None:
        """Raise what is wrong with the messages of a step; or spoil it, if the host goes on."""
        if self.is_bad is None:
            rank.raise_refusals()
            return
        self._status = rank.take_status()
        if self._status is not None:
            self.is_spoilt = self.is_bad | (self._status != 0).any()

    def end(self) -> bool:
        """Whether the host knows if the step counts; if not, `settle` says so later."""
        if self._asked is None or self.is_bad is None:
            return True
        refusals = None if self._status is None else OnItsWay(self._status)
        self._unheard = _Unheard(self._asked, OnItsWay(self.is_bad), refusals)
        return False

    @property
    def is_settled(self) -> bool:
        """Whether the host knows if the last step counts."""
        return self._unheard is None

    def settle(self) -> None:
        """Hear what the last step went on without.

        Raises:
            ClusterError, WireFormatError: it should not have: ranks differ, or a message is damaged.
        """
        assert self._unheard is not None
        asked, is_bad, refusals = self._unheard
        is_bad.read()  # it may be interrupted here
        self._unheard = None
        _, self.waits = _heard(asked)
        if refusals is not None:
            raise_for_status(refusals.read())
        self.is_finite = not bool(is_bad.read())


def ask(collectives: Collectives, question: Question, is_finite: Tensor, waited_s: float = 0.0) -> Asked:
    """Ask whether all ranks exchange the same, and tell what each must know: one small all_gather.

    What the caller launches until it hears the answers does not hold them up.

    Args:
        collectives: the process group.
        question: what this rank is about to exchange.
        is_finite: (), whether it holds no NaN or inf.
        waited_s: how long this rank has been in collectives so far.
    """
    told = [0, round(1e6 * waited_s), *question.numbers()]
    is_finite = is_finite.to(collectives.device_for_flags(is_finite.device))
    mine = torch.tensor(told, pin_memory=is_finite.is_cuda).to(is_finite.device, non_blocking=True)
    torch.logical_not(is_finite, out=mine[0])
    answers = collectives.all_gather(mine)
    return Asked(collectives.ranks, question, answers, OnItsWay(answers))


def _heard(asked: Asked) -> tuple[bool, list[float]]:
    """Whether all is finite, and how long every rank has waited. Ranks that differ are refused.

    They cannot be asked for more then: some may have gone on.
    """
    rows = asked.for_the_host.read().tolist()
    are_bad, waited_us, steps, num_names, num_entries, names, selected = zip(*rows, strict=True)
    rule, mine = "all ranks must exchange the same parameters at the same step", asked.question
    if len(set(steps)) > 1:
        raise ClusterError(f"{rule}, got {by_rank(map('step {}'.format, steps), asked.ranks)}")
    if len(set(names)) > 1:
        told = by_rank(map("{} parameters".format, num_names), asked.ranks)
        raise ClusterError(f"{rule}, got {told}, which differ; this rank's begin with {mine.names[:1]}")
    if len(set(selected)) > 1:
        told = by_rank(map(str, num_entries), asked.ranks)
        rule = "all ranks must select equally many entries of every bucket"
        raise ClusterError(f"{rule}, got {told} in all; this rank {mine.num_selected}")
    return not any(are_bad), [waited / 1e6 for waited in waited_us]


def share_report(collectives: Collectives, report: Report | None, device: torch.device) -> Report | None:
    """Rank 0's report, on every rank."""
    numbers = [1.0, report.loss, report.time_s] if report is not None else [0.0, 0.0, 0.0]
    there, loss, time_s = collectives.broadcast(
        torch.tensor(numbers, dtype=torch.float64, device=device), 0
    ).tolist()
    return Report(loss, time_s) if there else None
