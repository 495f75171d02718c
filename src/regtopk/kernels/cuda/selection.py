"""Fast kernels for CUDA tensors: one pass over memory, then k-sized work, and the host never waits.

docs/kernels.md tells how. The entries that reach the guess are the candidates. If they do not suffice, the
digits of all entries are counted instead: the device decides, so a step can be captured in a CUDA graph. If k
is more than there is room for, the candidates are those around the k-th largest alone, and two more passes
move out what reaches it (a "wide" plan).
"""

import math

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from regtopk.kernels.cuda.plan import SelectionPlan, plan_for
from regtopk.kernels.cuda.programs import accumulate, damping, guess, movers, selection
from regtopk.kernels.cuda.programs.words import GUESS, NUM_ABOVE
from regtopk.kernels.cuda.replay import repeat
from regtopk.kernels.cuda.rows import DeviceRows
from regtopk.kernels.reference import selection as reference
from regtopk.kernels.reference.selection import Damped, Taken

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
    residual: Tensor, grad: Tensor, k: int, damped: Damped | None = None, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """See `reference.selection.take_largest_`."""
    if chunk is not None and chunk > _MAX_CHUNK:
        return reference.take_largest_(residual, grad, k, damped, chunk)
    increment_version(residual)  # torch does not see what programs write
    given = () if damped is None or damped.indices.shape[-1] == 0 else damped
    if chunk is not None:
        return repeat(_take_largest_per_chunk_, (chunk, k), [residual, grad], given)
    if k >= _MANY:
        return _take_largest_(k, residual, grad, *given)
    return repeat(_take_largest_, (k,), [residual, grad], given)


def _take_largest_(k: int, residual: Tensor, grad: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(residual):
        rows = DeviceRows(residual, grad, given)
        item_bytes = max(rows.key_dtype.itemsize, rows.offset_dtype.itemsize)
        plan = plan_for(rows.numel, k, _TILE, item_bytes)
        rows.arguments["k"] = k
        if plan.rank > 0:
            _guess(rows, plan)
        _accumulate_(rows, plan.room, plan.is_wide)
        _gather(rows, plan.capacity)
        num_parts = _num_stretches(rows, _MAX_STRETCHES if plan.capacity > 0 else _MAX_LONG_STRETCHES)
        for digit in range((rows.key_bits + 1) // 8):  # of the k-th largest key: among the words then
            rows.launch(selection.count_digit, num_parts, DIGIT=digit, BLOCK=_BLOCK)
        indices, values = rows.outputs(k)
        if plan.is_wide or plan.capacity == 0:
            _move_out_by_tile_(rows)
        else:
            _move_out_(rows)
    return indices, values


def take_above_(residual: Tensor, grad: Tensor | None, threshold: float | Tensor, capacity: int) -> Taken:
    """See `reference.selection.take_above_`."""
    fixed = [residual] if grad is None else [residual, grad]
    if not isinstance(threshold, Tensor):
        threshold = residual.new_full(residual.shape[:-1], threshold)
    increment_version(residual)
    return Taken(*repeat(_take_above_, (capacity,), fixed, [threshold]))


def _take_above_(capacity: int, residual: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *grads, threshold = others
    with torch.cuda.device_of(residual):
        rows = DeviceRows(residual, grads[0] if grads else None)
        wanted = threshold.to(residual.dtype).clamp_min(0).abs().expand(rows.batch).reshape(-1)
        rows.arguments["work"][:, GUESS.value] = wanted.view(rows.key_dtype).long()
        indices, values = (tensor.zero_() for tensor in rows.outputs(capacity))
        _accumulate_(rows, room=0)
        stops = rows.arguments["tile_stops"]
        rows.launch(accumulate.write_above, stops.shape[1], _TILE_WARPS, capacity=capacity)
        num_found = stops[:, -1].long().view(rows.batch)
        count = num_found.clamp_max(capacity)
    return indices, values, count, num_found - count


def _take_largest_per_chunk_(
    chunk: int, k: int, residual: Tensor, grad: Tensor, *given: Tensor
) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(residual):
        rows = DeviceRows(residual, grad, given)
        whole, rest = divmod(rows.numel, chunk)
        num_taken = whole * k + min(k, rest)
        indices, values = rows.outputs(num_taken)
        num_chunks, size = math.ceil(rows.numel / chunk), 1 << (chunk - 1).bit_length()
        starts = _cut(rows, rows.arguments["damped"], chunk, num_chunks, is_aligned=False)
        rows.launch(
            accumulate.take_per_chunk, num_chunks, min(16, max(1, size // 512)), damped_starts=starts,
            chunk=chunk, k=k, num_taken=num_taken, SIZE=size, BLOCK=_SMALL_BLOCK,
        )  # fmt: skip
    return indices, values


def _guess(rows: DeviceRows, plan: SelectionPlan) -> None:
    num_samplers = math.ceil(plan.num_keys / _KEYS_OF_SAMPLER)
    rows.launch(
        guess.guess, num_samplers, _SAMPLER_WARPS,
        keys=rows.empty(plan.num_keys, rows.key_dtype), num_groups=rows.numel // 4, rank=plan.rank,
        rank_of_limit=plan.rank_of_limit, IS_WIDE=plan.is_wide, NUM_KEYS=plan.num_keys, PER_KEY=plan.per_key,
        NUM_SAMPLERS=num_samplers,
        NUM_BITS=22 if rows.key_bits == 31 else 25,  # rounds the guess down by 2^-14 of it at most
    )  # fmt: skip


def _accumulate_(rows: DeviceRows, room: int, is_wide: bool = False) -> None:
    """Accumulate and count what reaches the guess in each tile; where there is room, keep which.

    In a wide plan also count what reaches the limit. Damped entries hold their scores from then on.
    """
    num_tiles = rows.num_tiles(_TILE)
    above = rows.empty(num_tiles if is_wide else 0, rows.offset_dtype)
    counts = rows.empty(num_tiles, rows.offset_dtype)
    rows.arguments |= {
        "tile_counts": counts, "tile_above": above, "slots": rows.empty(num_tiles * room, torch.int16),
        "damped_starts": _cut(rows, rows.arguments["damped"], _TILE, num_tiles, rows.is_aligned),
        "num_tiles": num_tiles, "IS_WIDE": is_wide, "ROOM": room, "TILE": _TILE,
    }  # fmt: skip
    registers = _TILE_REGISTERS if rows.key_bits == 31 else None
    rows.launch(accumulate.accumulate, num_tiles, _TILE_WARPS, registers, BLOCK=_SMALL_BLOCK)
    if is_wide:  # a sum of so many takes longer
        rows.arguments["work"][:, NUM_ABOVE.value] = above.cumsum(-1)[:, -1]
    rows.arguments["tile_stops"] = counts.cumsum(-1, dtype=rows.offset_dtype)


def _gather(rows: DeviceRows, capacity: int) -> None:
    """The offsets and keys of the candidates, in the order of the row, if they are enough."""
    offsets, keys = rows.empty(capacity, rows.offset_dtype), rows.empty(capacity, rows.key_dtype)
    rows.arguments |= {"capacity": capacity, "offsets": offsets, "keys": keys}
    if capacity > 0:
        num_parts = math.ceil(rows.arguments["num_tiles"] / _TILES_TOGETHER)
        rows.launch(selection.gather, num_parts, NUM_TILES=_TILES_TOGETHER)


def _move_out_(rows: DeviceRows) -> None:
    """Take what is above the threshold, and the first of what equals it: of the candidates, if enough."""
    num_parts = _num_stretches(rows, _MAX_STRETCHES)
    taken = rows.empty(2 * num_parts, torch.int64)  # of a row, those above the threshold and those equal
    rows.launch(selection.count_taken, num_parts, taken=taken, BLOCK=_BLOCK)
    rows.launch(selection.write_taken, num_parts, taken=taken, stops=taken.cumsum(-1), BLOCK=_BLOCK)
    if rows.num_damped > 0:
        indices, num_tiles = rows.arguments["indices"], rows.arguments["num_tiles"]
        starts = _cut(rows, indices, _TILE, num_tiles, rows.is_aligned, rows.arguments["damped_starts"])
        num_blocks = math.ceil(rows.num_damped / _SMALL_BLOCK)
        rows.launch(damping.undamp, num_blocks, starts=starts, BLOCK=_SMALL_BLOCK)


def _move_out_by_tile_(rows: DeviceRows) -> None:
    """The same of all entries, if k are many."""
    num_tiles = rows.arguments["num_tiles"]
    taken = rows.empty(2 * num_tiles, torch.int64)  # of a row, those above the threshold and those equal
    rows.launch(movers.settle, 1)
    num_parts = math.ceil(num_tiles / _TILES_COUNTED)
    rows.launch(movers.count_moved, num_parts, _TILE_WARPS, taken=taken, NUM_TILES=_TILES_COUNTED)
    stops = taken.cumsum(-1)
    rows.launch(movers.move_out, num_tiles, _TILE_WARPS, taken=taken, stops=stops, BLOCK=_SMALL_BLOCK)


def _cut(
    rows: DeviceRows, listed: Tensor, tile: int, num_tiles: int, is_aligned: bool, out: Tensor | None = None
) -> Tensor:
    """Where in an ascending list, (rows, m), the entries of each tile start; nothing if there are none."""
    num = listed.shape[1]
    starts = rows.empty(num_tiles + 1 if num > 0 else 0, rows.offset_dtype) if out is None else out
    if num > 0:
        rows.launch(
            damping.cut, math.ceil((num_tiles + 1) / _SMALL_BLOCK), listed=listed, starts=starts,
            num_listed=num, num_listed_bits=num.bit_length(), tile=tile, num_tiles=num_tiles,
            IS_ALIGNED=is_aligned, BLOCK=_SMALL_BLOCK,
        )  # fmt: skip
    return starts


def _num_stretches(rows: DeviceRows, most: int) -> int:
    """Programs that share a row's candidates, or the row: enough to fill a GPU, a power of two."""
    wanted = min(most // rows.num, rows.numel // (2 * _BLOCK))
    return 1 << max(0, wanted.bit_length() - 1)
