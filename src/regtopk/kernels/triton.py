"""Fast kernels for CUDA tensors: one pass over memory, then k-sized work, and the host never waits.

The same plan as `cpu`: a sample says which key somewhat more than k entries reach, one pass accumulates
and collects the entries that reach it, and the k-th largest of those is found digit by digit. Where they
do not do (the guess was wrong, many entries are equal, or k is a large part of J), the digits of all
entries are counted instead. Which of the two is decided on the device, so a step can be captured in a
CUDA graph. Of equal scores at the threshold the first in the row are taken.

Temporaries: each below J / 16 bytes, and up to density 0.001 all of them together.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regtopk.kernels import reference, triton_accumulate, triton_damping, triton_selection
from regtopk.kernels.reference import Taken, find_non_finite_row
from regtopk.kernels.triton_words import GUESS, words_per_row

__all__ = ["find_non_finite_row", "take_above_", "take_largest_", "take_largest_per_chunk_"]

_TILE, _TILE_WARPS = 1 << 12, 8  # entries an accumulating program works on (benchmarks/kernels.py --tiles)
_BLOCK = 1 << 11  # entries looked at together after that
_MAX_SAMPLES = 1 << 14
_MAX_STRETCHES = 1 << 10
_MAX_CHUNK = 1 << 14  # a larger one does not fit in a program's registers
_SMALL_BLOCK = 1 << 10


@dataclass(frozen=True)
class _Rows:
    """What all launches of a call share: (rows, J) tensors, and words through which they speak."""

    residual: Tensor
    grad: Tensor | None
    work: Tensor
    is_checked: bool = False

    @property
    def num(self) -> int:
        return self.residual.shape[0]

    @property
    def numel(self) -> int:
        return self.residual.shape[1]

    @property
    def key_bits(self) -> int:
        return 8 * self.residual.itemsize - 1

    @property
    def num_tiles(self) -> int:
        return math.ceil(self.numel / _TILE)

    @property
    def grad_or_any(self) -> Tensor:
        """The gradient, or in its place a tensor that is not read."""
        return self.residual if self.grad is None else self.grad

    def options(self) -> dict[str, Any]:
        """Arguments of most programs."""
        return {
            "residual": self.residual,
            "residual_stride": _stride(self.residual),
            "work": self.work,
            "num_words": self.work.shape[1],
            "IS_CHECKED": self.is_checked,
        }

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.num, size, dtype=dtype, device=self.residual.device)


@dataclass(frozen=True)
class _Damped:
    """The damped entries of each row, (rows, m), and room for what is there."""

    indices: Tensor
    factors: Tensor
    saved: Tensor

    @property
    def num(self) -> int:
        return self.indices.shape[1]

    @property
    def grid(self) -> tuple[int, int]:
        return math.ceil(self.num / _SMALL_BLOCK), self.indices.shape[0]

    def options(self) -> dict[str, Any]:
        """Arguments of the programs that read them."""
        return {
            "damped": self.indices, "saved": self.saved, "num_damped": self.num, "BLOCK": _SMALL_BLOCK,
        }  # fmt: skip


@dataclass(frozen=True)
class _Plan:
    """How many entries of a row to sample, which of them to guess from, and room to collect in."""

    num_samples: int
    rank: int
    capacity: int


@dataclass(frozen=True)
class _Collected:
    """Offsets of the entries that reached the guess; each tile's are together, in its order."""

    capacity: int
    tile_counts: Tensor
    tile_starts: Tensor
    tile_stops: Tensor
    slots: Tensor


def take_largest_(
    residual: Tensor,
    grad: Tensor,
    k: int,
    *,
    damped: Tensor | None = None,
    damping: Tensor | None = None,
    non_finite: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.take_largest_`."""
    with torch.cuda.device_of(residual):
        rows = _rows(residual, grad, is_checked=non_finite is not None)
        damp = _damped(rows, damped, damping)
        if rows.is_checked:
            _check(rows)
        plan = _plan(rows.numel, k)
        if plan.rank:
            _guess(rows, plan)
        if damp is not None:
            _damp_before_(rows, damp)
        collected = _collect_(rows, plan.capacity)
        if damp is not None:
            _damp_after_(rows, damp)
        offsets, keys = _find_threshold(rows, k, collected)
        indices, values = _move_out_(rows, k, offsets, keys, non_finite)
        if damp is not None:
            _undamp_(rows, damp, indices, values)
    return _as_batch(residual, indices), _as_batch(residual, values)


def take_above_(residual: Tensor, grad: Tensor | None, threshold: float | Tensor, capacity: int) -> Taken:
    """See `reference.take_above_`."""
    with torch.cuda.device_of(residual):
        rows = _rows(residual, grad)
        rows.work[:, GUESS.value] = _keys_of(threshold, residual)
        indices = rows.empty(capacity, torch.int64).zero_()
        values = rows.empty(capacity, residual.dtype).zero_()
        tile_stops = _collect_(rows, 0).tile_stops
        options = rows.options()
        del options["IS_CHECKED"]
        triton_accumulate.write_above[(rows.num_tiles, rows.num)](
            tile_stops=tile_stops, indices=indices, values=values, numel=rows.numel, capacity=capacity,
            KEY_BITS=rows.key_bits, TILE=_TILE, num_warps=_TILE_WARPS, **options,
        )  # fmt: skip
        num_found = tile_stops[:, -1].view(residual.shape[:-1])
        count = num_found.clamp_max(capacity)
    return Taken(_as_batch(residual, indices), _as_batch(residual, values), count, num_found - count)


def take_largest_per_chunk_(
    residual: Tensor,
    grad: Tensor,
    chunk: int,
    k_per_chunk: int,
    *,
    damped: Tensor | None = None,
    damping: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.take_largest_per_chunk_`."""
    if chunk > _MAX_CHUNK:
        return reference.take_largest_per_chunk_(
            residual, grad, chunk, k_per_chunk, damped=damped, damping=damping
        )
    with torch.cuda.device_of(residual):
        rows = _rows(residual, grad)
        damp = _damped(rows, damped, damping)
        if damp is not None:
            residual.add_(grad)
            rows = replace(rows, grad=None)
            _damp_here_(rows, damp)
        whole, rest = divmod(rows.numel, chunk)
        num_taken = whole * k_per_chunk + min(k_per_chunk, rest)
        indices, values = rows.empty(num_taken, torch.int64), rows.empty(num_taken, residual.dtype)
        size = 1 << (chunk - 1).bit_length()
        triton_accumulate.take_per_chunk[(math.ceil(rows.numel / chunk), rows.num)](
            rows.residual, rows.grad_or_any, indices, values, rows.numel, chunk, k_per_chunk, num_taken,
            _stride(rows.residual), _stride(rows.grad_or_any), HAS_GRAD=rows.grad is not None,
            KEY_BITS=rows.key_bits, SIZE=size, num_warps=min(16, max(1, size // 512)),
        )  # fmt: skip
        if damp is not None:
            _undamp_(rows, damp, indices, values)
    return _as_batch(residual, indices), _as_batch(residual, values)


def _plan(numel: int, k: int) -> _Plan:
    num_samples = min(_MAX_SAMPLES, 1 << (numel // 16).bit_length() >> 1)
    expected = k * num_samples / numel
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)
    num_wanted = rank / max(1, num_samples) * numel
    capacity = max(numel // 256, min(numel // 64, math.ceil(1.2 * num_wanted)), 1 << 12)
    if num_samples < 8 or rank > num_samples // 2 or num_wanted > 0.9 * capacity:
        return _Plan(0, 0, 0)  # nothing to collect: all entries are looked at
    return _Plan(num_samples, rank, capacity)


def _check(rows: _Rows) -> None:
    block = 2 * _TILE
    grad = rows.grad_or_any
    triton_accumulate.check[(math.ceil(rows.numel / block), rows.num)](
        grad, rows.work, rows.numel, _stride(grad), rows.work.shape[1], BLOCK=block, num_warps=_TILE_WARPS
    )


def _guess(rows: _Rows, plan: _Plan) -> None:
    options = rows.options()
    del options["IS_CHECKED"]
    num_bits = 14 if rows.key_bits == 31 else 17  # 1.6 % of the threshold
    triton_accumulate.guess[(1, rows.num)](
        grad=rows.grad_or_any, num_groups=rows.numel // 4, rank=plan.rank,
        grad_stride=_stride(rows.grad_or_any), KEY_BITS=rows.key_bits, NUM_BITS=num_bits,
        NUM_SAMPLES=plan.num_samples, num_warps=16, **options,
    )  # fmt: skip


def _collect_(rows: _Rows, capacity: int) -> _Collected:
    """Accumulate and count what reaches the guess in each tile; where there is room, keep which."""
    tile_counts = rows.empty(rows.num_tiles, torch.int64)
    tile_starts = rows.empty(rows.num_tiles, torch.int32)
    slots = rows.empty(max(1, capacity), torch.int32 if rows.numel < 2**31 else torch.int64)
    triton_accumulate.accumulate[(rows.num_tiles, rows.num)](
        grad=rows.grad_or_any, tile_counts=tile_counts, tile_starts=tile_starts, slots=slots,
        numel=rows.numel, capacity=capacity, grad_stride=_stride(rows.grad_or_any),
        HAS_GRAD=rows.grad is not None, KEEP=capacity > 0, KEY_BITS=rows.key_bits, TILE=_TILE,
        num_warps=_TILE_WARPS, **rows.options(),
    )  # fmt: skip
    return _Collected(capacity, tile_counts, tile_starts, tile_counts.cumsum(-1), slots)


def _find_threshold(rows: _Rows, k: int, found: _Collected) -> tuple[Tensor, Tensor]:
    """The candidates' offsets and keys in the order of the row; the threshold is among the words."""
    grid = _num_stretches(rows), rows.num
    offsets = torch.empty_like(found.slots)
    keys = torch.empty_like(found.slots, dtype=torch.int32 if rows.key_bits == 31 else torch.int64)
    shared = {
        "keys": keys, "numel": rows.numel, "k": k, "capacity": found.capacity,
        "KEY_BITS": rows.key_bits, "BLOCK": _BLOCK, **rows.options(),
    }  # fmt: skip
    triton_selection.sort_and_count[grid](
        tile_counts=found.tile_counts, tile_starts=found.tile_starts, tile_stops=found.tile_stops,
        slots=found.slots, offsets=offsets, num_tiles=rows.num_tiles, TILE=_TILE, **shared,
    )  # fmt: skip
    for digit in range(1, (rows.key_bits + 1) // 8):
        triton_selection.count_next[grid](DIGIT=digit, **shared)
    return offsets, keys


def _move_out_(
    rows: _Rows, k: int, offsets: Tensor, keys: Tensor, non_finite: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Take what is above the threshold, and the first of what equals it."""
    indices, values = rows.empty(k, torch.int64), rows.empty(k, rows.residual.dtype)
    num_stretches = _num_stretches(rows)
    shared = {
        "keys": keys, "num_above": rows.empty(num_stretches, torch.int64),
        "num_equal": rows.empty(num_stretches, torch.int64), "numel": rows.numel, "k": k,
        "capacity": offsets.shape[1], "KEY_BITS": rows.key_bits, "BLOCK": _BLOCK, **rows.options(),
    }  # fmt: skip
    flags = rows.work if non_finite is None else non_finite.view(-1).view(torch.uint8)
    triton_selection.count_taken[(num_stretches, rows.num)](**shared)
    triton_selection.write_taken[(num_stretches, rows.num)](
        offsets=offsets,
        non_finite=flags,
        indices=indices,
        values=values,
        NUM_STRETCHES=num_stretches,
        **shared,
    )
    return indices, values


def _damped(rows: _Rows, damped: Tensor | None, damping: Tensor | None) -> _Damped | None:
    if damped is None or damping is None or damped.shape[-1] == 0:
        return None
    indices, factors = _as_rows(damped).contiguous(), _as_rows(damping).contiguous()
    return _Damped(indices, factors, rows.empty(damped.shape[-1], rows.residual.dtype))


def _damp_before_(rows: _Rows, damp: _Damped) -> None:
    grad = rows.grad_or_any
    triton_damping.damp_before[damp.grid](
        damping=damp.factors, grad=grad, grad_stride=_stride(grad), **damp.options(), **rows.options()
    )


def _damp_after_(rows: _Rows, damp: _Damped) -> None:
    triton_damping.damp_after[damp.grid](
        damping=damp.factors, KEY_BITS=rows.key_bits, **damp.options(), **rows.options()
    )


def _damp_here_(rows: _Rows, damp: _Damped) -> None:
    triton_damping.damp_here[damp.grid](
        rows.residual, damping=damp.factors, residual_stride=_stride(rows.residual), **damp.options()
    )


def _undamp_(rows: _Rows, damp: _Damped, indices: Tensor, values: Tensor) -> None:
    k = indices.shape[1]
    num_steps = (k - 1).bit_length()
    triton_damping.undamp[damp.grid](
        indices=indices, values=values, k=k, half_k=1 << num_steps >> 1, num_steps=num_steps,
        **damp.options(), **rows.options(),
    )  # fmt: skip


def _num_stretches(rows: _Rows) -> int:
    """Programs that share a row: enough to fill a GPU, a power of two."""
    wanted = min(_MAX_STRETCHES // rows.num, rows.numel // (2 * _BLOCK))
    return 1 << max(0, wanted.bit_length() - 1)


def _keys_of(threshold: float | Tensor, residual: Tensor) -> Tensor:
    """One threshold a row, as keys, (rows,) int64."""
    batch = residual.shape[:-1]
    if not isinstance(threshold, Tensor):
        threshold = residual.new_full(batch, threshold)
    wanted = threshold.to(residual.dtype).clamp_min(0).abs().expand(batch).reshape(-1)
    return wanted.view(torch.int32 if residual.dtype == torch.float32 else torch.int64).long()


def _rows(residual: Tensor, grad: Tensor | None, is_checked: bool = False) -> _Rows:
    rows = _as_rows(residual)
    words = words_per_row(8 * residual.itemsize - 1)
    work = torch.zeros(rows.shape[0], words, dtype=torch.int64, device=residual.device)
    return _Rows(rows, None if grad is None else _as_rows(grad), work, is_checked)


def _as_rows(tensor: Tensor) -> Tensor:
    """(..., m) as (rows, m), sharing memory."""
    *batch, size = tensor.shape
    return tensor.detach().view(math.prod(batch), size)


def _as_batch(residual: Tensor, rows: Tensor) -> Tensor:
    return rows.view(*residual.shape[:-1], rows.shape[1])


def _stride(rows: Tensor) -> int:
    """From row to row. Of a single one, 0: a multiple of 16, which lets loads be 16 bytes wide."""
    return rows.stride(0) if rows.shape[0] > 1 else 0
