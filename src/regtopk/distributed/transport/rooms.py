"""For how many bytes messages have room on their way, when only their senders know how long they are."""

from collections.abc import Sequence
from math import isqrt
from typing import Any, NamedTuple


class Room(NamedTuple):
    """Bytes from this rank to each rank, and from each rank to this one."""

    to_each: list[int]
    from_each: list[int]
    num_kept: int = 0  # how often it was kept so far


class Rooms:
    """What the last messages foretell of the next ones of their kind: those in the same place of a like step.

    Two ranks must foretell the same of what goes between them. A step that fails on some ranks alone may
    leave them with other numbers of `num_kept`; then all must forget (`regtopk.distributed.steps.agreement`).
    """

    def __init__(self) -> None:
        self._known: dict[Any, Room] = {}
        self.begin()

    def begin(self, step: Any = None) -> None:
        """A step begins. Steps are alike if this is equal; it is the same on all ranks."""
        self._step, self._place = step, 0

    def next_kind(self) -> tuple[Any, int]:
        """What tells the next messages from others."""
        self._place += 1
        return self._step, self._place

    def of(self, kind: Any, num_workers: int) -> Room:
        """Room for messages of a kind; none if it is new."""
        return self._known.get(kind, Room([0] * num_workers, [0] * num_workers))

    def keep(self, kind: Any, sent: Sequence[int], received: Sequence[int]) -> None:
        """Remember how many bytes went to each rank, and came from each."""
        room = self.of(kind, len(sent))
        pairs = zip((room.to_each, room.from_each), (sent, received), strict=True)
        to_each, from_each = ([_room(*each) for each in zip(*pair, strict=True)] for pair in pairs)
        self._known[kind] = Room(to_each, from_each, room.num_kept + 1)

    def drop(self, kind: Any) -> None:
        """Leave no room for the next ones, which go round a ring: all ranks pass them on whole."""
        if kind in self._known:
            nothing = [0] * len(self._known[kind].to_each)
            self._known[kind] = Room(nothing, nothing, self._known[kind].num_kept + 1)

    @property
    def num_kept(self) -> int:
        """How often any was kept."""
        return sum(room.num_kept for room in self._known.values())

    def forget(self) -> None:
        """There is no room for anything."""
        self._known = {}


def _room(last: int, length: int) -> int:
    """One message that has no room makes all ranks wait for a second trip, so there is some to spare.

    Lengths vary by a few times their square root, short ones by the scales of a block of values. Where they
    vary by more, room shrinks slowly after the longest.
    """
    return max(length + max(8 * isqrt(length), 256), last - last // 8)
