"""Fast kernels for CUDA tensors: one pass over memory, then k-sized work, and the host never waits.

The same plan as `cpu`: a sample says which key somewhat more than k entries reach, one pass accumulates
and collects the entries that reach it, and the k-th largest of those is found digit by digit. Where they
do not do (the guess was wrong, many entries are equal, or k is a large part of J), the digits of all
entries are counted instead. Which of the two is decided on the device, so a step can be captured in a
CUDA graph. Of equal scores at the threshold the first in the row are taken.

Temporaries: each below J / 16 bytes, and up to density 0.001 all of them together.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regtopk.kernels import reference
from regtopk.kernels import triton_loops as loops
from regtopk.kernels.reference import Taken, find_non_finite_row

__all__ = ["find_non_finite_row", "take_above_", "take_largest_", "take_largest_per_chunk_"]

_MAX_SAMPLES = 1 << 15
_MAX_STRETCHES = 1 << 10
_MAX_CHUNK = 1 << 14  # a larger one does not fit in a program's registers
_SMALL_BLOCK = 1 << 10


@dataclass(frozen=True)
class _Rows:
    """What all launches of a call share: (rows, J) tensors, and which rows to leave alone."""

    residual: Tensor
    grad: Tensor | None
    flags: Tensor | None = None

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
        return math.ceil(self.numel / loops.TILE)

    def flag_options(self) -> dict[str, Any]:
        return {
            "flags": self.residual if self.flags is None else self.flags,
            "HAS_FLAGS": self.flags is not None,
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


@dataclass(frozen=True)
class _Plan:
    """How many entries of a row to sample, which of them to guess from, and room to collect in."""

    num_samples: int
    rank: int
    capacity: int


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
        flags = None if non_finite is None else _check(_as_rows(grad), non_finite)
        rows = _Rows(_as_rows(residual), _as_rows(grad), flags)
        selected = _take_largest_(rows, k, _damped(rows, damped, damping))
    return _as_batch(residual, selected[0]), _as_batch(residual, selected[1])


def take_above_(residual: Tensor, grad: Tensor | None, threshold: float | Tensor, capacity: int) -> Taken:
    """See `reference.take_above_`."""
    with torch.cuda.device_of(residual):
        rows = _Rows(_as_rows(residual), None if grad is None else _as_rows(grad))
        least_keys = _keys_of(threshold, residual)
        indices = rows.empty(capacity, torch.int64).zero_()
        values = rows.empty(capacity, residual.dtype).zero_()
        tile_counts = rows.empty(rows.num_tiles, torch.int32)
        _accumulate_(rows, least_keys, tile_counts)
        tile_stops = tile_counts.cumsum(-1)
        loops.write_above[(rows.num_tiles, rows.num)](
            rows.residual, least_keys, tile_stops, indices, values, rows.numel, capacity,
            _stride(rows.residual), KEY_BITS=rows.key_bits, TILE=loops.TILE, num_warps=8,
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
        rows = _Rows(_as_rows(residual), _as_rows(grad))
        damp = _damped(rows, damped, damping)
        if damp is not None:
            rows.residual.add_(_as_rows(grad))
            rows = _Rows(rows.residual, None)
            _damp_here_(rows, damp)
        whole, rest = divmod(rows.numel, chunk)
        num_taken = whole * k_per_chunk + min(k_per_chunk, rest)
        indices, values = rows.empty(num_taken, torch.int64), rows.empty(num_taken, residual.dtype)
        size = 1 << (chunk - 1).bit_length()
        loops.take_per_chunk[(math.ceil(rows.numel / chunk), rows.num)](
            rows.residual, _grad_or_any(rows), indices, values, rows.numel, chunk, k_per_chunk, num_taken,
            _stride(rows.residual), _stride(_grad_or_any(rows)), HAS_GRAD=rows.grad is not None,
            KEY_BITS=rows.key_bits, SIZE=size, num_warps=min(16, max(1, size // 512)),
        )  # fmt: skip
        if damp is not None:
            _undamp_(rows, damp, indices, values)
    return _as_batch(residual, indices), _as_batch(residual, values)


def _take_largest_(rows: _Rows, k: int, damp: _Damped | None) -> tuple[Tensor, Tensor]:
    plan = _plan(rows.numel, k)
    work = rows.empty(loops.num_words(rows.key_bits), torch.int64).zero_()
    if plan.rank:
        _guess(rows, plan, work)
    if damp is not None:
        _damp_before_(rows, damp)
    tile_counts = rows.empty(rows.num_tiles, torch.int32)
    tile_starts = torch.empty_like(tile_counts)
    offset_type = torch.int32 if rows.numel < 2**31 else torch.int64
    slots = rows.empty(plan.capacity, offset_type)
    least_keys = work[:, loops.GUESS.value :]
    _accumulate_(rows, least_keys, tile_counts, work, tile_starts, slots)
    if damp is not None:
        _damp_after_(rows, damp, work)
    offsets = torch.empty_like(slots)
    keys = rows.empty(plan.capacity, torch.int32 if rows.key_bits == 31 else torch.int64)
    tiles = tile_counts, tile_starts, tile_counts.cumsum(-1)
    _find_threshold(rows, k, work, tiles, slots, offsets, keys)
    indices, values = _move_out_(rows, k, work, offsets, keys)
    if damp is not None:
        _undamp_(rows, damp, indices, values)
    return indices, values


def _plan(numel: int, k: int) -> _Plan:
    num_samples = min(_MAX_SAMPLES, 1 << (numel // 16).bit_length() >> 1)
    expected = k * num_samples / numel
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)
    num_wanted = rank / max(1, num_samples) * numel
    capacity = max(numel // 256, min(numel // 64, math.ceil(1.2 * num_wanted)), 1 << 12)
    if num_samples < 8 or rank > num_samples // 2 or num_wanted > 0.9 * capacity:
        return _Plan(0, 0, 1)  # nothing to collect: all entries are looked at
    return _Plan(num_samples, rank, capacity)


def _check(grad: Tensor, non_finite: Tensor) -> Tensor:
    flags = non_finite.view(-1).view(torch.uint8).zero_()
    block = 2 * loops.TILE
    loops.check[(math.ceil(grad.shape[1] / block), grad.shape[0])](
        grad, flags, grad.shape[1], _stride(grad), BLOCK=block, num_warps=8
    )
    return flags


def _guess(rows: _Rows, plan: _Plan, work: Tensor) -> None:
    num_groups = rows.numel // 8
    step = int(0.6180339887498949 * num_groups) | 1
    loops.guess[(1, rows.num)](
        rows.residual, rows.grad, work, num_groups, step, plan.rank, _stride(rows.residual),
        _stride(_grad_or_any(rows)), work.shape[1],
        KEY_BITS=rows.key_bits, NUM_SAMPLES=plan.num_samples, num_warps=16,
    )  # fmt: skip


def _accumulate_(
    rows: _Rows,
    least_keys: Tensor,
    tile_counts: Tensor,
    work: Tensor | None = None,
    tile_starts: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """Accumulate and count what reaches the keys; where there is room, in slots, keep which."""
    grad = _grad_or_any(rows)
    loops.accumulate[(rows.num_tiles, rows.num)](
        rows.residual, grad, least_keys=least_keys, num_candidates=least_keys if work is None else work,
        tile_counts=tile_counts, tile_starts=tile_counts if tile_starts is None else tile_starts,
        slots=tile_counts if slots is None else slots, numel=rows.numel,
        capacity=0 if slots is None else slots.shape[1], residual_stride=_stride(rows.residual),
        grad_stride=_stride(grad), word_stride=least_keys.stride(0), HAS_GRAD=rows.grad is not None,
        KEEP=slots is not None and slots.shape[1] > 1, KEY_BITS=rows.key_bits, TILE=loops.TILE,
        num_warps=8, **rows.flag_options(),
    )  # fmt: skip


def _find_threshold(
    rows: _Rows,
    k: int,
    work: Tensor,
    tiles: tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    offsets: Tensor,
    keys: Tensor,
) -> None:
    grid, capacity = (_num_stretches(rows), rows.num), slots.shape[1]
    options = {"KEY_BITS": rows.key_bits, "BLOCK": loops.BLOCK, **rows.flag_options()}
    loops.sort_and_count[grid](
        rows.residual, work=work, tile_counts=tiles[0], tile_starts=tiles[1], tile_stops=tiles[2],
        slots=slots, offsets=offsets, keys=keys, numel=rows.numel, k=k, capacity=capacity,
        num_tiles=rows.num_tiles, residual_stride=_stride(rows.residual), num_words=work.shape[1],
        TILE=loops.TILE, **options,
    )  # fmt: skip
    for digit in range(1, (rows.key_bits + 1) // 8):
        loops.count_next[grid](
            rows.residual, work=work, keys=keys, numel=rows.numel, k=k, capacity=capacity,
            residual_stride=_stride(rows.residual), num_words=work.shape[1], DIGIT=digit, **options,
        )  # fmt: skip


def _move_out_(rows: _Rows, k: int, work: Tensor, offsets: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Take what is above the threshold, and the first of what equals it."""
    indices, values = rows.empty(k, torch.int64), rows.empty(k, rows.residual.dtype)
    num_stretches = _num_stretches(rows)
    num_above, num_equal = rows.empty(num_stretches, torch.int64), rows.empty(num_stretches, torch.int64)
    shared = {
        "work": work, "keys": keys, "num_above": num_above, "num_equal": num_equal,
        "numel": rows.numel, "k": k, "capacity": offsets.shape[1], "num_words": work.shape[1],
        "residual_stride": _stride(rows.residual), "KEY_BITS": rows.key_bits, "BLOCK": loops.BLOCK,
        **rows.flag_options(),
    }  # fmt: skip
    loops.count_taken[(num_stretches, rows.num)](rows.residual, **shared)
    loops.write_taken[(num_stretches, rows.num)](
        rows.residual, offsets=offsets, indices=indices, values=values, NUM_STRETCHES=num_stretches, **shared
    )
    return indices, values


def _damped(rows: _Rows, damped: Tensor | None, damping: Tensor | None) -> _Damped | None:
    if damped is None or damping is None or damped.shape[-1] == 0:
        return None
    indices, factors = _as_rows(damped).contiguous(), _as_rows(damping).contiguous()
    return _Damped(indices, factors, rows.empty(damped.shape[-1], rows.residual.dtype))


def _damp_before_(rows: _Rows, damp: _Damped) -> None:
    grad = _grad_or_any(rows)
    loops.damp_before[damp.grid](
        rows.residual, grad, damped=damp.indices, damping=damp.factors, saved=damp.saved,
        num_damped=damp.num, residual_stride=_stride(rows.residual), grad_stride=_stride(grad),
        BLOCK=_SMALL_BLOCK, **rows.flag_options(),
    )  # fmt: skip


def _damp_after_(rows: _Rows, damp: _Damped, work: Tensor) -> None:
    loops.damp_after[damp.grid](
        rows.residual, damped=damp.indices, damping=damp.factors, saved=damp.saved, work=work,
        num_damped=damp.num, residual_stride=_stride(rows.residual), num_words=work.shape[1],
        KEY_BITS=rows.key_bits, BLOCK=_SMALL_BLOCK, **rows.flag_options(),
    )  # fmt: skip


def _damp_here_(rows: _Rows, damp: _Damped) -> None:
    loops.damp_here[damp.grid](
        rows.residual, damped=damp.indices, damping=damp.factors, saved=damp.saved,
        num_damped=damp.num, residual_stride=_stride(rows.residual), BLOCK=_SMALL_BLOCK,
    )  # fmt: skip


def _undamp_(rows: _Rows, damp: _Damped, indices: Tensor, values: Tensor) -> None:
    k = indices.shape[1]
    num_steps = (k - 1).bit_length()
    loops.undamp[damp.grid](
        rows.residual, damped=damp.indices, saved=damp.saved, indices=indices, values=values,
        num_damped=damp.num, k=k, half_k=1 << num_steps >> 1, num_steps=num_steps,
        residual_stride=_stride(rows.residual), BLOCK=_SMALL_BLOCK, **rows.flag_options(),
    )  # fmt: skip


def _num_stretches(rows: _Rows) -> int:
    """Programs that share a row: enough to fill a GPU, a power of two."""
    wanted = min(_MAX_STRETCHES // rows.num, rows.numel // (2 * loops.BLOCK))
    return 1 << max(0, wanted.bit_length() - 1)


def _keys_of(threshold: float | Tensor, residual: Tensor) -> Tensor:
    """One threshold a row, as keys, (rows,) int64."""
    batch = residual.shape[:-1]
    if not isinstance(threshold, Tensor):
        threshold = residual.new_full(batch, threshold)
    wanted = threshold.to(residual.dtype).clamp_min(0).abs().expand(batch).reshape(-1)
    return wanted.view(torch.int32 if residual.dtype == torch.float32 else torch.int64).long()


def _as_rows(tensor: Tensor) -> Tensor:
    """(..., m) as (rows, m), sharing memory."""
    *batch, size = tensor.shape
    return tensor.detach().view(math.prod(batch), size)


def _as_batch(residual: Tensor, rows: Tensor) -> Tensor:
    return rows.view(*residual.shape[:-1], rows.shape[1])


def _grad_or_any(rows: _Rows) -> Tensor:
    """The gradient, or in its place a tensor that is not read."""
    return rows.residual if rows.grad is None else rows.grad


def _stride(rows: Tensor) -> int:
    """From row to row. Of a single one, 0: a multiple of 16, which lets loads be 16 bytes wide."""
    return rows.stride(0) if rows.shape[0] > 1 else 0
