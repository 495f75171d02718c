"""What a selection on CUDA plans: which key of a sample is the guess, and how many candidates are kept."""

import math
from functools import lru_cache
from typing import NamedTuple

_MAX_SAMPLES = 1 << 15
_PER_KEY, _PER_KEY_WIDE = 8, 4  # samples per key: the largest of them is the key
_LEAST_CAPACITY = 1 << 12
_ENTRIES_PER_BYTE = 16  # memory for candidates takes J / 16 bytes at most


class SelectionPlan(NamedTuple):
    """Which key of a sample is the guess, and how many candidates to keep; all zero: keep none."""

    num_keys: int = 0  # to look at
    per_key: int = 0  # samples, the largest of which is a key
    rank: int = 0  # which of the keys is the guess, from 1 for the largest
    capacity: int = 0  # how many candidates of a row are kept
    room: int = 0  # how many of a tile are kept at first; a power of two
    rank_of_limit: int = 0  # which is the limit, from 1; 0: there is none. A plan with a limit is wide

    @property
    def is_wide(self) -> bool:
        """Whether more entries are taken than there is room for candidates."""
        return self.rank_of_limit > 0


@lru_cache(maxsize=1024)
def plan_for(numel: int, k: int, tile: int, item_bytes: int) -> SelectionPlan:
    """A guess that at least k entries reach (within 4 sigma), but not more than there is room for.

    If k are too many for that, the guess has a limit, and k entries are between those that reach the one and
    those that reach the other (within 3.5 sigma).
    A program accumulates a tile of entries. An item is a candidate's key or its offset, whichever is larger.
    """
    num_samples = min(_MAX_SAMPLES, 1 << (numel // 16).bit_length() >> 1)
    if num_samples < _PER_KEY:
        return SelectionPlan()
    largest = numel // (_ENTRIES_PER_BYTE * item_bytes)
    given = numel, k, tile, num_samples, largest
    return _narrow_plan(*given) or _wide_plan(*given) or SelectionPlan()


def _narrow_plan(numel: int, k: int, tile: int, num_samples: int, largest: int) -> SelectionPlan | None:
    """All that is taken is among the candidates."""
    expected = k * num_samples / numel
    wanted = expected + 4 * math.sqrt(expected) + 8  # samples that reach the guess
    most = wanted + 5 * math.sqrt(wanted) + 8
    capacity = max(_LEAST_CAPACITY, min(largest, math.ceil(most / num_samples * numel)))
    num_keys = num_samples // _PER_KEY
    rank = math.ceil(num_keys * (1 - max(0.0, 1 - wanted / num_samples) ** _PER_KEY))
    if wanted + 4 * math.sqrt(wanted) > capacity / numel * num_samples or rank > num_keys // 2:
        return None
    return SelectionPlan(num_keys, _PER_KEY, rank, capacity, _room(wanted / num_samples * tile, tile))


def _wide_plan(numel: int, k: int, tile: int, num_samples: int, largest: int) -> SelectionPlan | None:
    """The candidates are those around the k-th largest; what reaches the limit is taken, too."""
    num_keys = num_samples // _PER_KEY_WIDE
    density = k / numel
    share = 1 - (1 - density) ** _PER_KEY_WIDE  # of the keys that reach the k-th largest entry
    spread = 3.5 * math.sqrt(share * (1 - share) * num_keys)
    rank, rank_of_limit = math.ceil(share * num_keys + spread) + 1, math.floor(share * num_keys - spread) - 1
    if rank_of_limit < 1 or rank >= num_keys or num_keys > max(largest, _LEAST_CAPACITY):
        return None
    low, high = (1 - (1 - n / num_keys) ** (1 / _PER_KEY_WIDE) for n in (rank_of_limit, rank))
    expected = (high - low) * numel
    if expected + 4 * math.sqrt(expected / num_samples * numel) > largest:
        return None
    return SelectionPlan(
        num_keys, _PER_KEY_WIDE, rank, largest, _room((high - low) * tile, tile), rank_of_limit
    )


def _room(of_tile: float, tile: int) -> int:
    """For so many candidates of a tile on average; tiles that have more are looked at again."""
    return min(1 << math.ceil(math.log2(of_tile + 3 * math.sqrt(of_tile) + 1)), tile // 32)
