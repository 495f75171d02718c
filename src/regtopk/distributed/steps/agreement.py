"""What all ranks must know of a step: do they exchange the same, and is all of it finite?

One small all_gather tells it. Mostly the host waits for the answers before anything is exchanged (`hear`):
gloo aborts a rank that gets a longer message than it expects, so ranks that differ must hear of it before.
Where collectives run on the device, it may go on without them (`go_on`): the device then knows whether the
step counts, and undoes what it must, and the host reads the answers after the step (`hear_late`).
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from regtopk.core.clipping import clip_scales, norm_of
from regtopk.core.worker import Report
from regtopk.distributed.requests.rank import Rank
from regtopk.distributed.transport.collectives import Collectives, by_rank
from regtopk.errors import ClusterError
from regtopk.wire import raise_for_status

_NUM_ASKED = 8
AGREEMENT_BYTES = _NUM_ASKED * 8  # what a rank tells every other one: int64; numbers come on top


class Question(NamedTuple):
    """What a rank is about to exchange, which must be the same on all ranks."""

    num_steps: int  # done so far
    names: tuple[str, ...]  # the parameters, in order
    num_selected: tuple[int, ...]  # entries to send of each bucket; -1 where that is not known before

    @property
    def what(self) -> tuple[int, ...]:
        """What is exchanged, as numbers: they are the same only if it is the same."""
        num_entries = sum(n for n in self.num_selected if n > 0)
        return len(self.names), num_entries, _crc32(self.names), _crc32(self.num_selected)


@lru_cache(maxsize=256)  # names are many, and the same in every step
def _crc32(things: tuple[Any, ...]) -> int:
    return crc32(repr(things).encode())


class Scaling(NamedTuple):
    """Whether updates are clipped (`clip_scales`), and whether tokens weigh them.

    Tokens t_n scale an update by N t_n / T, and weights stay 1/N. With weights t_n / T that change from round
    to round, a residual would be sent by another weight than it was kept with, and sums not be conserved.
    Weights by steps do not change: those are plain weights.
    """

    clip_norm: float | None = None
    by_tokens: bool = False

    def numbers(self, flats: Sequence[Tensor], tokens: float, shards: Collectives | None) -> Tensor:
        """(2,) float64: the norm, if it is needed, and the tokens of a rank, or of all that share a model."""
        norm = norm_of(flats if self.clip_norm else [flats[0][:0]])
        squares = torch.stack([norm.square(), norm.new_tensor(tokens)])
        if shards is not None:
            squares = shards.all_gather(squares.to(shards.device_for_flags(norm.device))).sum(0)
        return torch.stack([squares[0].sqrt(), squares[1]])

    def clipped(self, numbers: Tensor, weights: Tensor) -> Tensor:
        """What clipping multiplies each rank's update by, (N,), from all ranks' numbers, (N, 2)."""
        if self.by_tokens:  # who has learned from none has no weight
            weights = weights * (numbers[:, 1] > 0)
        return clip_scales(numbers[:, 0], weights, self.clip_norm or math.inf)

    def weighed(self, numbers: Tensor, ranks: list[int]) -> Tensor:
        """What tokens multiply each rank's update by, (N,); they are NaN of ranks that have not counted."""
        tokens = numbers[:, 1] if self.by_tokens else numbers.new_zeros(len(ranks))
        if silent := [rank for rank, own in zip(ranks, tokens.tolist(), strict=True) if math.isnan(own)]:
            raise ClusterError(
                "every rank must call count(tokens) before optimizer.step() where weight is 'tokens', got no "
                f"call on rank(s) {silent} since the last exchange"
            )
        return len(ranks) * tokens / tokens.sum() if tokens.any() else torch.ones_like(tokens)


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


class Agreement:
    """What all ranks say of one step. To make it is to ask them.

    `shards` hold the rest of the model, if it is sharded: no part may make a step alone. `is_finite` is a
    tensor, (); `waited_s` is how long this rank has been in collectives so far. `numbers`, float64, are told
    to all ranks as well.
    """

    def __init__(
        self,
        collectives: Collectives,
        shards: Collectives | None,
        question: Question,
        is_finite: Tensor,
        waited_s: float = 0.0,
        numbers: Tensor | None = None,
    ) -> None:
        self.question = question
        self.is_finite = True  # whether no rank had a NaN or inf, as far as the host knows
        self.is_bad: Tensor | None = None  # (), on the device: whether one had, if the host goes on
        self.is_spoilt: Tensor | None = None  # the same, or whether a message was damaged
        self.waits: dict[int, float] = {}  # how long every rank has been in collectives, in seconds
        self._ranks, self._shards, self._rooms = collectives.ranks, shards, collectives.rooms
        self._device = is_finite.device
        self._late: list[OnItsWay] = []  # is_bad, and the status of messages if there were any
        told = [0, round(1e6 * waited_s), question.num_steps, *question.what, self._rooms.num_kept]
        is_finite = is_finite.to(collectives.device_for_flags(is_finite.device))
        mine = torch.tensor(told, pin_memory=is_finite.is_cuda).to(is_finite.device, non_blocking=True)
        torch.logical_not(is_finite, out=mine[0])
        if numbers is not None:
            mine = torch.cat([mine, numbers.to(mine.device).view(torch.int64)])
        self._answers = collectives.all_gather(mine)  # (N, 8 and as many as there are numbers)
        self._for_the_host = OnItsWay(self._answers)
        self.is_on_device = collectives.is_on_device(self._answers.device)

    @property
    def numbers(self) -> Tensor:
        """Every rank's numbers, (N, ...) float64, on the host, which waits for them."""
        return self._for_the_host.read()[:, _NUM_ASKED:].view(torch.float64)

    def hear(self) -> None:
        """Wait for the answers. Ranks at different steps, or about to send other numbers, are refused."""
        self.is_finite = not any(self._read())
        if self._shards is not None:
            there = self._shards.device_for_flags(self._device)
            mine = torch.tensor([int(not self.is_finite), self.question.num_steps], device=there)
            are_bad, steps = self._shards.all_gather(mine).T.tolist()
            rule = "all parts of a model must be at the same step"
            _check_same(rule, steps, map("step {}".format, steps), self._shards.ranks)
            self.is_finite = not any(are_bad)

    def go_on(self) -> None:
        """Go on without the answers: the device alone knows whether the step counts."""
        are_bad = self._answers[:, 0]
        if self._shards is not None:
            mine = self._answers[:, :3:2].amax(0)  # is one bad, and the step: as ranks that wait tell it
            are_bad = self._shards.all_gather(mine)[:, 0]
        self.is_bad = self.is_spoilt = are_bad.any()
        self._late = [OnItsWay(self.is_bad)]

    def check_messages(self, rank: Rank) -> None:
        """Raise what is wrong with the messages of the step; or spoil it, if the host has gone on."""
        if self.is_bad is None:
            rank.raise_refusals()
            return
        status = rank.take_status()
        if status is not None:
            self.is_spoilt = self.is_bad | (status != 0).any()
            self._late.append(OnItsWay(status))

    def hear_late(self) -> None:
        """Hear what the step went on without, and should not have if ranks differ or a message is damaged."""
        self._read()
        is_bad, *statuses = self._late
        for status in statuses:
            raise_for_status(status.read(), self._ranks)
        self.is_finite = not bool(is_bad.read())

    def _read(self) -> tuple[int, ...]:
        """Which ranks have a NaN or inf. Ranks that differ are refused by what is known: some may be gone."""
        rows, ranks = self._for_the_host.read()[:, :_NUM_ASKED].tolist(), self._ranks
        are_bad, waited_us, steps, num_names, num_entries, names, selected, kept = zip(*rows, strict=True)
        if len(set(kept)) > 1:  # a step failed on some ranks alone, and they go on from a saved state
            self._rooms.forget()
        rule = "all ranks must exchange the same parameters at the same step"
        _check_same(rule, steps, map("step {}".format, steps), ranks)
        first = f", which differ; this rank's begin with {[*self.question.names[:1]]}"
        _check_same(rule, names, map("{} parameters".format, num_names), ranks, first)
        rule = "all ranks must select equally many entries of every bucket"
        own = f" in all; this rank {[*self.question.num_selected]}"
        _check_same(rule, selected, map(str, num_entries), ranks, own)
        self.waits = {n: waited / 1e6 for n, waited in zip(ranks, waited_us, strict=True)}
        return are_bad


def _check_same(
    rule: str, values: Iterable[int], told: Iterable[str], ranks: list[int], more: str = ""
) -> None:
    if len(set(values)) > 1:
        raise ClusterError(f"{rule}, got {by_rank(told, ranks)}{more}")


def share_report(collectives: Collectives, report: Report | None, device: torch.device) -> Report | None:
    """Rank 0's report, on every rank."""
    numbers = [0.0, 0.0, 0.0] if report is None else [1.0, report.loss, report.time_s]
    shared = collectives.broadcast(torch.tensor(numbers, dtype=torch.float64, device=device), 0)
    is_there, loss, time_s = shared.tolist()
    return Report(loss, time_s) if is_there else None
