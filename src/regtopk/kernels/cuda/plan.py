"""What the launches of one call on CUDA share: the rows, the plan, and memory for what they find."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from regtopk.kernels.cuda.programs.words import words_per_row

_MAX_SAMPLES = 1 << 15
_PER_KEY, _PER_KEY_WIDE = 8, 4  # samples per key: the largest of them is the key
_LEAST_CAPACITY = 1 << 12
_ENTRIES_PER_BYTE = 16  # memory for candidates takes J / 16 bytes at most


@dataclass(frozen=True)
class Rows:
    """The (rows, J) tensors of a call, and the words through which its launches communicate."""

    residual: Tensor
    grad: Tensor | None
    work: Tensor

    @property
    def num(self) -> int:
        """How many rows."""
        return self.residual.shape[0]

    @property
    def numel(self) -> int:
        """J."""
        return self.residual.shape[1]

    @property
    def key_bits(self) -> int:
        """The bits of a number without its sign."""
        return 8 * self.residual.itemsize - 1

    @property
    def key_dtype(self) -> torch.dtype:
        """The integer that holds a key."""
        return torch.int32 if self.key_bits == 31 else torch.int64

    @property
    def offset_dtype(self) -> torch.dtype:
        """The integer that holds a place in the row."""
        return torch.int32 if self.numel < 2**31 else torch.int64

    @property
    def item_bytes(self) -> int:
        """Bytes of a candidate's key or of its offset, whichever is larger."""
        return max(self.key_dtype.itemsize, self.offset_dtype.itemsize)

    @property
    def grad_or_any(self) -> Tensor:
        """The gradient, or in its place a tensor that is not read."""
        return self.residual if self.grad is None else self.grad

    @property
    def is_aligned(self) -> bool:
        """Whether tiles may start a few entries before a row, where loads can be 16 bytes wide."""
        return stride(self.residual) % 4 == stride(self.grad_or_any) % 4

    @cached_property
    def options(self) -> dict[str, Any]:
        """Arguments of most programs."""
        return {
            "residual": self.residual,
            "residual_stride": stride(self.residual),
            "work": self.work,
            "num_words": self.work.shape[1],
            "numel": self.numel,
            "IS_ALIGNED": self.is_aligned,
            "KEY_BITS": self.key_bits,
        }

    def num_tiles(self, tile: int) -> int:
        """How many tiles cover a row, wherever in 16 bytes it starts."""
        lead = 3 if self.is_aligned and stride(self.residual) % 4 else 0
        return math.ceil((self.numel + lead) / tile)

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory of shape (rows, size), not initialised."""
        return torch.empty(self.num, size, dtype=dtype, device=self.residual.device)


def rows_of(residual: Tensor, grad: Tensor | None) -> Rows:
    """A call's rows, which the programs will change, with words that are zero."""
    rows = as_rows(residual)
    words = words_per_row(8 * residual.itemsize - 1)
    work = torch.zeros(rows.shape[0], words, dtype=torch.int64, device=residual.device)
    return Rows(rows, None if grad is None else as_rows(grad), work)


def as_rows(tensor: Tensor) -> Tensor:
    """(..., m) as (rows, m), sharing memory."""
    *batch, size = tensor.shape
    return tensor.detach().view(math.prod(batch), size)


def stride(rows: Tensor) -> int:
    """Entries from row to row; 0 for a single row: a multiple of 16 lets loads be 16 bytes wide."""
    return rows.stride(0) if rows.shape[0] > 1 else 0


@dataclass(frozen=True)
class Plan:
    """Which key of a sample is the guess, and how many candidates to keep; all zero: keep none.

    Attributes:
        num_keys: keys to look at, each the largest of ``per_key`` samples.
        per_key: see above.
        rank: which of them is the guess, from 1 for the largest.
        capacity: how many candidates of a row are kept.
        room: how many of a tile are kept at first; a power of two.
        rank_of_limit: which is the limit, from 1; 0: there is none. A plan with a limit is wide.
    """

    num_keys: int = 0
    per_key: int = 0
    rank: int = 0
    capacity: int = 0
    room: int = 0
    rank_of_limit: int = 0

    @property
    def is_wide(self) -> bool:
        """Whether more entries are taken than there is room for candidates."""
        return self.rank_of_limit > 0


@lru_cache(maxsize=1024)
def plan_for(numel: int, k: int, tile: int, item_bytes: int) -> Plan:
    """A guess that at least k entries reach (within 4 sigma), but not more than there is room for.

    If k are too many for that, the guess has a limit, and k entries are between those that reach the one and
    those that reach the other (within 3.5 sigma).

    Args:
        numel: J.
        k: how many are to be taken.
        tile: entries that one program accumulates.
        item_bytes: of a candidate's key or of its offset, whichever is larger.
    """
    num_samples = min(_MAX_SAMPLES, 1 << (numel // 16).bit_length() >> 1)
    if num_samples < _PER_KEY:
        return Plan()
    largest = numel // (_ENTRIES_PER_BYTE * item_bytes)
    narrow = _narrow_plan(numel, k, tile, num_samples, largest)
    return narrow or _wide_plan(numel, k, tile, num_samples, largest) or Plan()


def _narrow_plan(numel: int, k: int, tile: int, num_samples: int, largest: int) -> Plan | None:
    """All that is taken is among the candidates."""
    expected = k * num_samples / numel
    wanted = expected + 4 * math.sqrt(expected) + 8  # samples that reach the guess
    most = wanted + 5 * math.sqrt(wanted) + 8
    capacity = max(_LEAST_CAPACITY, min(largest, math.ceil(most / num_samples * numel)))
    num_keys = num_samples // _PER_KEY
    rank = math.ceil(num_keys * (1 - max(0.0, 1 - wanted / num_samples) ** _PER_KEY))
    if wanted + 4 * math.sqrt(wanted) > capacity / numel * num_samples or rank > num_keys // 2:
        return None
    return Plan(num_keys, _PER_KEY, rank, capacity, _room(wanted / num_samples * tile, tile))


def _wide_plan(numel: int, k: int, tile: int, num_samples: int, largest: int) -> Plan | None:
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
    return Plan(num_keys, _PER_KEY_WIDE, rank, largest, _room((high - low) * tile, tile), rank_of_limit)


def _room(of_tile: float, tile: int) -> int:
    """For so many candidates of a tile on average; tiles that have more are looked at again."""
    return min(1 << math.ceil(math.log2(of_tile + 3 * math.sqrt(of_tile) + 1)), tile // 32)


@dataclass(frozen=True)
class Tiles:
    """How many candidates each tile has, how many there are up to its end, and where its first are in it.

    In a wide plan also how many entries of it reach the limit. Where in their list its damped entries start.
    """

    size: int
    room: int
    counts: Tensor
    stops: Tensor
    slots: Tensor
    above: Tensor
    is_wide: bool
    damped_starts: Tensor

    def options(self) -> dict[str, Any]:
        """Arguments of the programs that read them."""
        return {
            "tile_counts": self.counts,
            "tile_stops": self.stops,
            "tile_above": self.above,
            "num_tiles": self.counts.shape[1],
            "IS_WIDE": self.is_wide,
            "TILE": self.size,
        }


@dataclass(frozen=True)
class Candidates:
    """Memory for the offsets and keys of a row's candidates, in the order of the row."""

    capacity: int
    offsets: Tensor
    keys: Tensor

    def options(self) -> dict[str, Any]:
        """Arguments of the programs that read them."""
        return {"capacity": self.capacity, "offsets": self.offsets, "keys": self.keys}


@dataclass(frozen=True)
class Damped:
    """The entries of each row whose score is given, (rows, m), ascending, and memory to save what they hold.

    There may be none; then the programs do not look at them.
    """

    indices: Tensor
    scores: Tensor
    saved: Tensor

    @property
    def num(self) -> int:
        """How many of each row."""
        return self.indices.shape[1]

    def options(self) -> dict[str, Any]:
        """Arguments of the programs that read them."""
        return {
            "damped": self.indices,
            "scores": self.scores,
            "saved": self.saved,
            "num_damped": self.num,
            "num_damped_bits": self.num.bit_length(),
            "HAS_DAMPED": self.num > 0,
        }
