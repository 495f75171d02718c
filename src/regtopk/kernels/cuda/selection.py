"""Fast kernels for CUDA tensors: one pass over memory, then k-sized work, and the host never waits.

The programs are written in Triton (`triton_*`). The plan is that of `cpu`: a sample says which key somewhat
more than k entries reach. One pass accumulates, and collects the entries that reach it: the candidates. The
k-th largest candidate is then found digit by digit. If the candidates do not suffice (the guess was wrong,
many entries are equal), the digits of all entries are counted instead. The device decides which of the two is
done, so a step can be captured in a CUDA graph. If k is more than there is room for, the candidates are
those around the k-th largest alone, and two more passes move out what reaches it (a "wide" plan). Of equal
scores at the threshold the first in the row are taken.

A temporary takes at most J / 16 bytes per row (in whole tiles of 2,048 entries), or 32 KiB where that is
more. Up to density 0.001 all temporaries together take about as much. Those of length k are not counted.
"""

import math

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from regtopk.kernels.cuda.launch import launch
from regtopk.kernels.cuda.pieces import join_, spread_
from regtopk.kernels.cuda.plan import (
    Candidates,
    Damped,
    Plan,
    Rows,
    Tiles,
    as_rows,
    plan_for,
    rows_of,
    stride,
)
from regtopk.kernels.cuda.programs import accumulate as triton_accumulate
from regtopk.kernels.cuda.programs import damping as triton_damping
from regtopk.kernels.cuda.programs import guess as triton_guess
from regtopk.kernels.cuda.programs import movers as triton_movers
from regtopk.kernels.cuda.programs import selection as triton_selection
from regtopk.kernels.cuda.programs.words import GUESS, NUM_ABOVE
from regtopk.kernels.cuda.replay import repeat
from regtopk.kernels.reference import selection as reference
from regtopk.kernels.reference.selection import Taken

__all__ = ["join_", "spread_", "take_above_", "take_largest_", "take_largest_per_chunk_"]

# entries of a program that passes over all, its warps and registers (benchmarks/kernel_launches.py --tiles)
_TILE, _TILE_WARPS, _TILE_REGISTERS = 1 << 10, 4, 40
_BLOCK = 1 << 10  # entries looked at together after that
_TILES_TOGETHER, _TILES_COUNTED = 32, 16  # one program gathers, or counts, the candidates of so many tiles
_SMALL_BLOCK = 1 << 8  # damped entries that a program looks at together
_KEYS_OF_SAMPLER, _SAMPLER_WARPS = 1 << 7, 8  # keys of the sample that one program takes
_MAX_STRETCHES, _MAX_LONG_STRETCHES = 1 << 9, 1 << 12  # programs that share a row's candidates, or the row
_MANY = 1 << 22  # so many entries are worth launches of their own, and not worth being copied
_MAX_CHUNK = 1 << 14  # a larger one does not fit in a program's registers


def take_largest_(
    residual: Tensor,
    grad: Tensor,
    k: int,
    *,
    damped: Tensor | None = None,
    scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.take_largest_`."""
    increment_version(residual)  # torch does not see what programs write
    given = _given(damped, scores)
    if k >= _MANY:
        return _take_largest_(k, residual, grad, *given)
    indices, values = repeat(_take_largest_, (k,), [residual, grad], given)
    return indices, values


def _take_largest_(k: int, residual: Tensor, grad: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(residual):
        rows = rows_of(residual, grad)
        damped = _damped(rows, *given)
        plan = plan_for(rows.numel, k, _TILE, rows.item_bytes)
        if plan.rank > 0:
            _guess(rows, plan, damped)
        tiles = _accumulate_(rows, damped, plan.room, plan.is_wide)
        candidates = _gather(rows, k, plan.capacity, tiles)
        _find_threshold(rows, k, candidates)
        move_out = _move_out_by_tile_ if plan.is_wide or plan.capacity == 0 else _move_out_
        indices, values = move_out(rows, k, damped, tiles, candidates)
    return _as_batch(residual, indices), _as_batch(residual, values)


def take_above_(residual: Tensor, grad: Tensor | None, threshold: float | Tensor, capacity: int) -> Taken:
    """See `reference.take_above_`."""
    fixed = [residual] if grad is None else [residual, grad]
    inputs, number = ([threshold], None) if isinstance(threshold, Tensor) else ([], threshold)
    increment_version(residual)
    return Taken(*repeat(_take_above_, (capacity, number, grad is not None), fixed, inputs))


def _take_above_(
    capacity: int, number: float | None, has_grad: bool, residual: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad = others[0] if has_grad else None
    threshold = others[-1] if number is None else number
    with torch.cuda.device_of(residual):
        rows = rows_of(residual, grad)
        rows.work[:, GUESS.value] = _keys_of(threshold, residual)
        indices = rows.empty(capacity, torch.int64).zero_()
        values = rows.empty(capacity, residual.dtype).zero_()
        tiles = _accumulate_(rows, _damped(rows), room=0)
        own = {"indices": indices, "values": values, "capacity": capacity}
        grid = tiles.stops.shape[1], rows.num
        launch(triton_accumulate.write_above, grid, rows.options | tiles.options() | own, _TILE_WARPS)
        num_found = tiles.stops[:, -1].long().view(residual.shape[:-1])
        count = num_found.clamp_max(capacity)
    return _as_batch(residual, indices), _as_batch(residual, values), count, num_found - count


def take_largest_per_chunk_(
    residual: Tensor,
    grad: Tensor,
    chunk: int,
    k_per_chunk: int,
    *,
    damped: Tensor | None = None,
    scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.take_largest_per_chunk_`."""
    if chunk > _MAX_CHUNK:
        return reference.take_largest_per_chunk_(
            residual, grad, chunk, k_per_chunk, damped=damped, scores=scores
        )
    increment_version(residual)
    given = _given(damped, scores)
    indices, values = repeat(_take_largest_per_chunk_, (chunk, k_per_chunk), [residual, grad], given)
    return indices, values


def _take_largest_per_chunk_(
    chunk: int, k_per_chunk: int, residual: Tensor, grad: Tensor, *given: Tensor
) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(residual):
        rows = rows_of(residual, grad)
        damped = _damped(rows, *given)
        whole, rest = divmod(rows.numel, chunk)
        num_taken = whole * k_per_chunk + min(k_per_chunk, rest)
        indices, values = rows.empty(num_taken, torch.int64), rows.empty(num_taken, residual.dtype)
        size = 1 << (chunk - 1).bit_length()
        own = {
            "grad": rows.grad_or_any, "indices": indices, "values": values, "chunk": chunk, "k": k_per_chunk,
            "num_taken": num_taken, "grad_stride": stride(rows.grad_or_any), "SIZE": size,
        }  # fmt: skip
        num_chunks = math.ceil(rows.numel / chunk)
        own["damped_starts"] = _cut(rows, damped.indices, chunk, num_chunks, is_aligned=False)
        own |= rows.options | damped.options() | {"BLOCK": _SMALL_BLOCK}
        launch(triton_accumulate.take_per_chunk, (num_chunks, rows.num), own, min(16, max(1, size // 512)))
    return _as_batch(residual, indices), _as_batch(residual, values)


def _guess(rows: Rows, plan: Plan, damped: Damped) -> None:
    num_samplers = math.ceil(plan.num_keys / _KEYS_OF_SAMPLER)
    own = {
        "grad": rows.grad_or_any, "grad_stride": stride(rows.grad_or_any), "num_groups": rows.numel // 4,
        "keys": rows.empty(plan.num_keys, rows.key_dtype),
        "rank": plan.rank, "rank_of_limit": plan.rank_of_limit, "IS_WIDE": plan.is_wide,
        "NUM_KEYS": plan.num_keys,
        "PER_KEY": plan.per_key, "NUM_SAMPLERS": num_samplers,
        "NUM_BITS": 22 if rows.key_bits == 31 else 25,  # rounds the guess down by 2^-14 of it at most
    }  # fmt: skip
    own |= rows.options | damped.options()
    launch(triton_guess.guess, (num_samplers, rows.num), own, _SAMPLER_WARPS)


def _accumulate_(rows: Rows, damped: Damped, room: int, is_wide: bool = False) -> Tiles:
    """Accumulate and count what reaches the guess in each tile; where there is room, keep which.

    Damped entries hold their scores from then on.
    """
    num_tiles = rows.num_tiles(_TILE)
    above = rows.empty(num_tiles if is_wide else 0, rows.offset_dtype)
    counts, slots = rows.empty(num_tiles, rows.offset_dtype), rows.empty(num_tiles * room, torch.int16)
    damped_starts = _cut(rows, damped.indices, _TILE, num_tiles, rows.is_aligned)
    own = {
        "grad": rows.grad_or_any, "grad_stride": stride(rows.grad_or_any), "tile_counts": counts,
        "tile_above": above, "slots": slots, "HAS_GRAD": rows.grad is not None, "IS_WIDE": is_wide,
        "damped_starts": damped_starts, "ROOM": room, "TILE": _TILE, "BLOCK": _SMALL_BLOCK,
    }  # fmt: skip
    own |= rows.options | damped.options()
    registers = _TILE_REGISTERS if rows.key_bits == 31 else None
    launch(triton_accumulate.accumulate, (num_tiles, rows.num), own, _TILE_WARPS, registers)
    if is_wide:
        rows.work[:, NUM_ABOVE.value] = above.cumsum(-1)[:, -1]  # a sum of so many takes longer
    stops = counts.cumsum(-1, dtype=rows.offset_dtype)
    return Tiles(_TILE, room, counts, stops, slots, above, is_wide, damped_starts)


def _gather(rows: Rows, k: int, capacity: int, tiles: Tiles) -> Candidates:
    """The candidates, if they are enough."""
    offsets, keys = rows.empty(capacity, rows.offset_dtype), rows.empty(capacity, rows.key_dtype)
    candidates = Candidates(capacity, offsets, keys)
    if capacity > 0:
        own = {"slots": tiles.slots, "ROOM": tiles.room, "k": k, "NUM_TILES": _TILES_TOGETHER}
        grid = math.ceil(tiles.counts.shape[1] / _TILES_TOGETHER), rows.num
        launch(triton_selection.gather, grid, rows.options | tiles.options() | candidates.options() | own)
    return candidates


def _find_threshold(rows: Rows, k: int, candidates: Candidates) -> None:
    """Find the k-th largest key digit by digit; the result is among the words."""
    own = rows.options | candidates.options() | {"k": k, "BLOCK": _BLOCK}
    most = _MAX_STRETCHES if candidates.capacity > 0 else _MAX_LONG_STRETCHES
    grid = _num_stretches(rows, most), rows.num
    for digit in range((rows.key_bits + 1) // 8):
        launch(triton_selection.count_digit, grid, own | {"DIGIT": digit})


def _move_out_(
    rows: Rows, k: int, damped: Damped, tiles: Tiles, candidates: Candidates
) -> tuple[Tensor, Tensor]:
    """Take what is above the threshold, and the first of what equals it: of the candidates, if they suffice.

    Damped entries get back what they held.
    """
    indices, values = rows.empty(k, torch.int64), rows.empty(k, rows.residual.dtype)
    num_parts = _num_stretches(rows, _MAX_STRETCHES)
    taken = rows.empty(2 * num_parts, torch.int64)  # of a row, those above the threshold and those equal
    own = {"indices": indices, "values": values, "k": k, "taken": taken, "BLOCK": _BLOCK}
    own |= rows.options | candidates.options()
    grid = num_parts, rows.num
    launch(triton_selection.count_taken, grid, own)
    launch(triton_selection.write_taken, grid, own | {"stops": taken.cumsum(-1)})
    if damped.num > 0:
        num_tiles = tiles.counts.shape[1]
        starts = _cut(rows, indices, tiles.size, num_tiles, rows.is_aligned, out=tiles.damped_starts)
        own |= damped.options() | tiles.options() | {"starts": starts, "BLOCK": _SMALL_BLOCK}
        launch(triton_damping.undamp, (math.ceil(damped.num / _SMALL_BLOCK), rows.num), own)
    return indices, values


def _move_out_by_tile_(
    rows: Rows, k: int, damped: Damped, tiles: Tiles, candidates: Candidates
) -> tuple[Tensor, Tensor]:
    """The same of all entries, if k are many."""
    indices, values = rows.empty(k, torch.int64), rows.empty(k, rows.residual.dtype)
    num_tiles = tiles.counts.shape[1]
    taken = rows.empty(2 * num_tiles, torch.int64)  # of a row, those above the threshold and those equal
    own = {
        "indices": indices, "values": values, "k": k, "taken": taken, "BLOCK": _SMALL_BLOCK,
        "damped_starts": tiles.damped_starts, "NUM_TILES": _TILES_COUNTED,
    }  # fmt: skip
    own |= rows.options | tiles.options() | candidates.options() | damped.options()
    launch(triton_movers.settle, (1, rows.num), own)
    launch(triton_movers.count_moved, (math.ceil(num_tiles / _TILES_COUNTED), rows.num), own, _TILE_WARPS)
    launch(triton_movers.move_out, (num_tiles, rows.num), own | {"stops": taken.cumsum(-1)}, _TILE_WARPS)
    return indices, values


def _given(damped: Tensor | None, scores: Tensor | None) -> list[Tensor]:
    """The entries whose score is given, and the scores; nothing if there are none."""
    return [] if damped is None or scores is None or damped.shape[-1] == 0 else [damped, scores]


def _damped(rows: Rows, *given: Tensor) -> Damped:
    if not given:  # tensors that are not read
        return Damped(rows.empty(0, torch.int64), rows.empty(0, rows.residual.dtype), rows.residual)
    indices, scores = (as_rows(tensor.contiguous()) for tensor in given)
    return Damped(indices, scores, rows.empty(indices.shape[-1], rows.residual.dtype))


def _cut(
    rows: Rows, listed: Tensor, tile: int, num_tiles: int, is_aligned: bool, out: Tensor | None = None
) -> Tensor:
    """Where in an ascending list, (rows, m), the entries of each tile start; nothing if there are none."""
    num = listed.shape[1]
    starts = rows.empty(num_tiles + 1 if num > 0 else 0, rows.offset_dtype) if out is None else out
    if num > 0:
        own = {
            "listed": listed, "starts": starts, "num_listed": num, "num_listed_bits": num.bit_length(),
            "tile": tile, "num_tiles": num_tiles, "BLOCK": _SMALL_BLOCK,
        }  # fmt: skip
        own |= rows.options | {"IS_ALIGNED": is_aligned}
        launch(triton_damping.cut, (math.ceil((num_tiles + 1) / _SMALL_BLOCK), rows.num), own)
    return starts


def _num_stretches(rows: Rows, most: int) -> int:
    """Programs that share a row's candidates, or the row: enough to fill a GPU, a power of two."""
    wanted = min(most // rows.num, rows.numel // (2 * _BLOCK))
    return 1 << max(0, wanted.bit_length() - 1)


def _keys_of(threshold: float | Tensor, residual: Tensor) -> Tensor:
    """One threshold per row, as keys, (rows,) int64."""
    batch = residual.shape[:-1]
    if not isinstance(threshold, Tensor):
        threshold = residual.new_full(batch, threshold)
    wanted = threshold.to(residual.dtype).clamp_min(0).abs().expand(batch).reshape(-1)
    return wanted.view(torch.int32 if residual.dtype == torch.float32 else torch.int64).long()


def _as_batch(residual: Tensor, rows: Tensor) -> Tensor:
    return rows.view(*residual.shape[:-1], rows.shape[1])
