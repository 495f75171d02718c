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
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from regtopk.kernels import (
    reference,
    triton_accumulate,
    triton_damping,
    triton_guess,
    triton_movers,
    triton_selection,
)
from regtopk.kernels.cuda_pieces import join_, spread_
from regtopk.kernels.reference import Taken
from regtopk.kernels.replay import repeat
from regtopk.kernels.triton_launch import launch
from regtopk.kernels.triton_plan import (
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
from regtopk.kernels.triton_words import GUESS, NUM_ABOVE

__all__ = ["join_", "spread_", "take_above_", "take_largest_", "take_largest_per_chunk_"]

# entries per accumulating program, its warps and registers (benchmarks/kernel_launches.py --tiles)
_TILE, _TILE_WARPS, _TILE_REGISTERS = 1 << 11, 8, None
_BLOCK = 1 << 10  # entries looked at together after that
_TILES_TOGETHER = 16  # one program gathers the candidates of so many tiles
_SMALL_BLOCK = 1 << 8  # damped entries per program; they lie all over the row
_KEYS_OF_SAMPLER, _SAMPLER_WARPS = 1 << 7, 8  # keys of the sample that one program takes
_MAX_STRETCHES, _MAX_LONG_STRETCHES = 1 << 10, 1 << 12  # programs that share a row's candidates, or the row
_MOVED, _MOVER_WARPS = 1 << 10, 4  # entries that one program looks at, to move some out
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
        damp = _damped(rows, *given)
        plan = plan_for(rows.numel, k, _TILE, rows.item_bytes)
        # Candidates that damping takes away must leave enough. Else scores are in place before there are any.
        first = None
        if damp is not None and (plan.is_wide or k + damp.indices.shape[1] > plan.capacity):
            first, damp = damp, None
            residual.add_(grad)
            rows = replace(rows, grad=None)
            _damp_here_(rows, first)
        if plan.rank > 0:
            _guess(rows, plan)
        if damp is not None:
            _damp_before_(rows, damp)
        tiles = _accumulate_(rows, plan.room, plan.is_wide)
        candidates = _gather(rows, k, plan.capacity, tiles)
        if damp is not None:
            _damp_after_(rows, damp, k, tiles, candidates)
        _find_threshold(rows, k, candidates)
        indices, values = _move_out_(rows, k, candidates, plan.is_wide)
        if first is not None:
            _undamp_(rows, first, -1, indices, values)
        if damp is not None:
            _undamp_(rows, damp, plan.capacity, indices, values)
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
        tiles = _accumulate_(rows, room=0)
        own = {"indices": indices, "values": values, "capacity": capacity}
        grid = tiles.stops.shape[1], rows.num
        launch(triton_accumulate.write_above, grid, rows.options | tiles.options() | own, _TILE_WARPS)
        num_found = tiles.stops[:, -1].view(residual.shape[:-1])
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
        damp = _damped(rows, *given)
        if damp is not None:
            residual.add_(grad)
            rows = replace(rows, grad=None)
            _damp_here_(rows, damp)
        whole, rest = divmod(rows.numel, chunk)
        num_taken = whole * k_per_chunk + min(k_per_chunk, rest)
        indices, values = rows.empty(num_taken, torch.int64), rows.empty(num_taken, residual.dtype)
        size = 1 << (chunk - 1).bit_length()
        own = {
            "grad": rows.grad_or_any, "indices": indices, "values": values, "chunk": chunk, "k": k_per_chunk,
            "num_taken": num_taken, "grad_stride": stride(rows.grad_or_any),
            "HAS_GRAD": rows.grad is not None, "SIZE": size,
        }  # fmt: skip
        grid = math.ceil(rows.numel / chunk), rows.num
        launch(triton_accumulate.take_per_chunk, grid, rows.options | own, min(16, max(1, size // 512)))
        if damp is not None:
            _undamp_(rows, damp, -1, indices, values)
    return _as_batch(residual, indices), _as_batch(residual, values)


def _guess(rows: Rows, plan: Plan) -> None:
    num_samplers = math.ceil(plan.num_keys / _KEYS_OF_SAMPLER)
    own = {
        "grad": rows.grad_or_any, "grad_stride": stride(rows.grad_or_any), "num_groups": rows.numel // 4,
        "HAS_GRAD": rows.grad is not None, "keys": rows.empty(plan.num_keys, rows.key_dtype),
        "rank": plan.rank, "rank_of_limit": plan.rank_of_limit, "IS_WIDE": plan.is_wide,
        "NUM_KEYS": plan.num_keys,
        "PER_KEY": plan.per_key, "NUM_SAMPLERS": num_samplers,
        "NUM_BITS": 22 if rows.key_bits == 31 else 25,  # rounds the guess down by 2^-14 of it at most
    }  # fmt: skip
    launch(triton_guess.guess, (num_samplers, rows.num), rows.options | own, _SAMPLER_WARPS)


def _accumulate_(rows: Rows, room: int, is_wide: bool = False) -> Tiles:
    """Accumulate and count what reaches the guess in each tile; where there is room, keep which."""
    num_tiles = rows.num_tiles(_TILE)
    above = rows.empty(num_tiles if is_wide else 0, torch.int64)
    counts, slots = rows.empty(num_tiles, torch.int64), rows.empty(num_tiles * room, torch.int16)
    own = {
        "grad": rows.grad_or_any, "grad_stride": stride(rows.grad_or_any), "tile_counts": counts,
        "tile_above": above, "slots": slots, "HAS_GRAD": rows.grad is not None, "IS_WIDE": is_wide,
        "ROOM": room, "TILE": _TILE,
    }  # fmt: skip
    grid = num_tiles, rows.num
    launch(triton_accumulate.accumulate, grid, rows.options | own, _TILE_WARPS, _TILE_REGISTERS)
    if is_wide:
        rows.work[:, NUM_ABOVE.value] = above.sum(-1)
    return Tiles(_TILE, room, counts, counts.cumsum(-1), slots)


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


def _move_out_(rows: Rows, k: int, candidates: Candidates, is_wide: bool) -> tuple[Tensor, Tensor]:
    """Take what is above the threshold, and the first of what equals it."""
    indices, values = rows.empty(k, torch.int64), rows.empty(k, rows.residual.dtype)
    is_by_tile = is_wide or candidates.capacity == 0
    num_parts = -(-rows.numel // _MOVED) if is_by_tile else _num_stretches(rows, _MAX_STRETCHES)
    taken = rows.empty(2 * num_parts, torch.int64)  # of a row, those above the threshold and those equal
    own = {
        "indices": indices, "values": values, "k": k, "taken": taken, "BLOCK": _BLOCK, "TILE": _MOVED,
    }  # fmt: skip
    own |= rows.options | candidates.options()
    grid = num_parts, rows.num
    if is_by_tile:
        launch(triton_movers.settle, (1, rows.num), own)
        launch(triton_movers.count_moved, grid, own, _MOVER_WARPS)
        own["stops"] = taken.cumsum(-1)
        launch(triton_movers.move_out, grid, own, _MOVER_WARPS)
    else:
        launch(triton_selection.count_taken, grid, own)
        launch(triton_selection.write_taken, grid, own | {"stops": taken.cumsum(-1)})
    return indices, values


def _given(damped: Tensor | None, scores: Tensor | None) -> list[Tensor]:
    """The entries whose score is given, and the scores; nothing if there are none."""
    return [] if damped is None or scores is None or damped.shape[-1] == 0 else [damped, scores]


def _damped(rows: Rows, *given: Tensor) -> Damped | None:
    if not given:
        return None
    indices, scores = (as_rows(tensor.contiguous()) for tensor in given)
    return Damped(indices, scores, rows.empty(indices.shape[-1], rows.residual.dtype), _SMALL_BLOCK)


def _damp_before_(rows: Rows, damp: Damped) -> None:
    own = {"grad": rows.grad_or_any, "grad_stride": stride(rows.grad_or_any)}
    launch(triton_damping.damp_before, damp.grid, rows.options | damp.options() | own)


def _damp_after_(rows: Rows, damp: Damped, k: int, tiles: Tiles, candidates: Candidates) -> None:
    own = rows.options | damp.options() | tiles.options() | candidates.options() | {"k": k}
    launch(triton_damping.damp_after, damp.grid, own)


def _damp_here_(rows: Rows, damp: Damped) -> None:
    launch(triton_damping.damp_here, damp.grid, rows.options | damp.options())


def _undamp_(rows: Rows, damp: Damped, capacity: int, indices: Tensor, values: Tensor) -> None:
    k = indices.shape[1]
    num_steps = (k - 1).bit_length()
    own = {
        "indices": indices, "values": values, "k": k, "capacity": capacity, "num_steps": num_steps,
        "half_k": 1 << num_steps >> 1,
    }  # fmt: skip
    launch(triton_damping.undamp, damp.grid, rows.options | damp.options() | own)


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
