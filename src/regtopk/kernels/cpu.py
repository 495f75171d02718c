"""Fast kernels for CPU tensors: one pass over memory, then k-sized work.

The largest k of J entries are found without sorting or copying J of them:

1. A small sample says which key somewhat more than k entries reach (`_guess`).
2. One pass accumulates, and collects the entries that reach it.
3. If at least k were collected, the k-th largest of *them* is the threshold, exactly. Otherwise (the
   guess was wrong, many entries are equal, or k is a large part of J) all keys are counted by their
   leading 16 bits, then by the bits that follow: more passes, no more memory, exact for any input.

Of equal scores at the threshold the first in the row are taken: the result depends neither on the guess
nor on the number of threads, which is torch's.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regtopk.kernels import cpu_loops as loops
from regtopk.kernels.cpu_loops import Array
from regtopk.kernels.reference import Taken
from regtopk.kernels.threads import over_rows, side_by_side

_HALF_KINDS = {torch.bfloat16: loops.BFLOAT16, torch.float16: loops.FLOAT16}
_INFINITIES = {  # their memory as an unsigned integer
    torch.float64: 0x7FF << 52,
    torch.float32: 0xFF << 23,
    torch.bfloat16: 0xFF << 7,
    torch.float16: 0x1F << 10,
}
_SMALL_STRETCH = 1 << 17  # fewer entries are not worth a thread of their own
_MAX_STRETCHES = 16  # more threads would wait for memory, and each takes some
_NUM_SAMPLES = 1 << 14


@dataclass(frozen=True)
class _Row:
    """The memory of one row, as the loops read it, and the stretches it is cut into."""

    accumulated: Array
    bits: Array
    grad: Array
    kind: int
    mask: Any
    damped: Array
    damping: Array
    saved: Array
    stretches: tuple[tuple[int, int], ...] = ()

    @property
    def numel(self) -> int:
        return self.accumulated.size

    def cut(self, num_threads: int, multiple_of: int = loops.LINE) -> "_Row":
        """Into stretches: several for each thread, so that a slow one can do with fewer."""
        return replace(self, stretches=tuple(_cut(self.numel, num_threads, multiple_of)))


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
    rows = _rows(residual, grad, damped, damping)
    is_refused = [False] * len(rows)
    if non_finite is not None:
        is_refused = _find_non_finite(grad)
        non_finite.copy_(torch.tensor(is_refused).view(non_finite.shape))
    indices, values = _outputs(residual, k)

    def take_row(n: int, num_threads: int) -> None:
        if is_refused[n]:
            indices[n], values[n] = np.arange(k), 0.0
        else:
            _take_largest_of_row_(rows[n].cut(num_threads), k, indices[n], values[n])

    over_rows(take_row, len(rows))
    return _like(residual, indices), _like(residual, values)


def take_above_(residual: Tensor, grad: Tensor | None, threshold: float | Tensor, capacity: int) -> Taken:
    """See `reference.take_above_`."""
    rows = _rows(residual, grad, None, None)
    indices, values = _outputs(residual, capacity)
    num_found = np.empty(len(rows), np.int64)
    thresholds = torch.as_tensor(threshold, dtype=residual.dtype).clamp_min(0).abs()
    keys = thresholds.expand(residual.shape[:-1]).reshape(-1).numpy().view(rows[0].bits.dtype)

    def take_row(n: int, num_threads: int) -> None:
        row = rows[n].cut(num_threads)
        num_found[n] = _take_above_of_row_(row, keys[n], indices[n], values[n])

    over_rows(take_row, len(rows))
    found = _like(residual, num_found)
    count = found.clamp_max(capacity)
    return Taken(_like(residual, indices), _like(residual, values), count, found - count)


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
    rows = _rows(residual, grad, damped, damping)
    whole, rest = divmod(residual.shape[-1], chunk)
    indices, values = _outputs(residual, whole * k_per_chunk + min(k_per_chunk, rest))

    def take_stretch(n: int, start: int, stop: int) -> None:
        row, at = rows[n], slice(start // chunk * k_per_chunk, math.ceil(stop / chunk) * k_per_chunk)
        loops.take_per_chunk_(
            row.accumulated, row.bits, row.grad, row.kind, row.mask, row.damped, row.damping, row.saved,
            start, stop, chunk, k_per_chunk, indices[n, at], values[n, at],
        )  # fmt: skip

    def take_row(n: int, num_threads: int) -> None:
        stretches = rows[n].cut(num_threads, multiple_of=chunk).stretches
        side_by_side(take_stretch, [(n, *stretch) for stretch in stretches])

    over_rows(take_row, len(rows))
    return _like(residual, indices), _like(residual, values)


def find_non_finite_row(grad: Tensor) -> int | None:
    """See `reference.find_non_finite_row`."""
    is_refused = _find_non_finite(grad)
    return is_refused.index(True) if any(is_refused) else None


def _take_largest_of_row_(row: _Row, k: int, indices: Array, values: Array) -> None:
    guess, capacity = _guess(row, k)
    found = _collect_(row, guess, capacity // len(row.stretches))
    if k <= sum(num for num, _, _ in found) <= capacity:
        collected: list[Any] = _collected(row, guess, found)
        threshold, num_above, num_equal = _threshold_of_collected([keys for _, keys in collected], k)
    else:
        collected = [None] * len(found)
        threshold, num_above, num_equal = _threshold_by_digits(row, k)
    num_ties = _first(k - num_above.sum(), num_equal)
    stops = np.cumsum(num_above + num_ties)

    def emit(stretch: tuple[int, int], stop: int, above: int, ties: int, kept: Any) -> None:
        out = slice(stop - above - ties, stop)
        if kept is None:
            loops.emit_found(row.bits, *stretch, row.mask, threshold, ties, indices[out])
        else:
            positions, keys = kept
            loops.emit_collected(positions, keys, threshold, ties, indices[out])
        _take_(row, stretch, indices[out], values[out])

    tasks = zip(row.stretches, stops, num_above, num_ties, collected, strict=True)
    side_by_side(emit, list(tasks))


def _take_above_of_row_(row: _Row, key: Any, indices: Array, values: Array) -> int:
    capacity = indices.size
    found = _collect_(row, key, capacity)
    nums = np.array([num for num, _, _ in found])
    nums_taken = _first(capacity, nums)
    stops = np.cumsum(nums_taken)

    def emit(stretch: tuple[int, int], stop: int, num: int, positions: Array) -> None:
        out = slice(stop - num, stop)
        indices[out] = positions[:num]
        _take_(row, stretch, indices[out], values[out])

    positions = [positions for _, positions, _ in found]
    side_by_side(emit, list(zip(row.stretches, stops, nums_taken, positions, strict=True)))
    indices[stops[-1] :], values[stops[-1] :] = 0, 0.0
    return int(nums.sum())


def _guess(row: _Row, k: int) -> tuple[Any, int]:
    """A key that somewhat more than k entries should reach, and how many to collect at most.

    They are kept in arrays below J / 16 bytes each, up to density 0.001 all together. Where they would
    not fit, nothing is collected.
    """
    num_samples = min(_NUM_SAMPLES, row.numel // 16) // 8 * 8
    expected = k * num_samples / row.numel
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)
    num_wanted = rank / max(1, num_samples) * row.numel
    capacity = max(row.numel // 256, min(row.numel // 64, math.ceil(1.2 * num_wanted)), 1 << 14)
    if rank > num_samples // 2 or num_wanted > 0.9 * capacity:
        return row.mask, 0
    sample = np.empty(num_samples, row.accumulated.dtype)
    loops.sample_(row.accumulated, row.grad, row.kind, sample)
    keys = sample.view(row.bits.dtype) & row.mask
    keys.partition(num_samples - rank)
    return max(keys[num_samples - rank], row.bits.dtype.type(1)), capacity


def _collect_(row: _Row, guess: Any, capacity: int) -> list[tuple[int, Array, Array]]:
    """Accumulate. For each stretch: how many keys reach the guess, their positions, and they."""

    def collect(start: int, stop: int) -> tuple[int, Array, Array]:
        room = min(capacity, stop - start)
        positions = np.empty(room, np.uint32 if row.numel <= 2**32 else np.uint64)
        keys = np.empty(room, row.bits.dtype)
        num = loops.accumulate_and_collect_(
            row.accumulated, row.bits, row.grad, row.kind, row.mask, guess,
            row.damped, row.damping, row.saved, start, stop, positions, keys,
        )  # fmt: skip
        return num, positions, keys

    return side_by_side(collect, row.stretches)


def _collected(row: _Row, guess: Any, found: list[tuple[int, Array, Array]]) -> list[tuple[Array, Array]]:
    """What was found in each stretch; looked for again where there was not room for all of it."""
    for n, (num, positions, keys) in enumerate(found):
        if num > positions.size:
            positions, keys = np.empty(num, positions.dtype), np.empty(num, keys.dtype)
            loops.collect(row.bits, *row.stretches[n], row.mask, guess, 0, positions, keys)
            found[n] = num, positions, keys
    return [(positions[:num], keys[:num]) for num, positions, keys in found]


def _threshold_of_collected(stretches: list[Array], k: int) -> tuple[Any, Array, Array]:
    """The k-th largest key, and how many of each stretch are above it and equal to it."""
    keys = np.concatenate(stretches)
    keys.partition(keys.size - k)
    threshold = keys[keys.size - k]
    num_above = np.array([np.count_nonzero(s > threshold) for s in stretches])
    num_equal = np.array([np.count_nonzero(s == threshold) for s in stretches])
    return threshold, num_above, num_equal


def _threshold_by_digits(row: _Row, k: int) -> tuple[Any, Array, Array]:
    """The same, over all entries of the row: one pass for each 16 bits of a key."""
    num_bits = 8 * row.bits.itemsize - 1  # of the threshold's, not known yet
    prefix, num_above = 0, np.zeros(len(row.stretches), np.int64)
    while num_bits > 0:
        width = min(16, num_bits)
        num_bits -= width
        counts = _count_digit(row, prefix, num_bits, width)
        num_reaching = counts.sum(0, dtype=np.int64)[::-1].cumsum()[::-1]
        digit = int(np.flatnonzero(num_reaching >= k - num_above.sum())[-1])
        num_above += counts[:, digit + 1 :].sum(1, dtype=np.int64)
        prefix = (prefix << width) | digit
    return row.bits.dtype.type(prefix), num_above, counts[:, digit].astype(np.int64)


def _count_digit(row: _Row, prefix: int, shift: int, width: int) -> Array:
    """For each stretch, how often each digit follows the prefix."""
    key_type = row.bits.dtype.type
    counts = np.zeros((len(row.stretches), 1 << width), np.uint32 if row.numel < 2**32 else np.uint64)

    def count(start: int, stop: int, own: Array) -> None:
        at = row.bits, start, stop, row.mask
        if shift + width == 8 * row.bits.itemsize - 1:
            loops.count_leading_digit(*at, key_type(shift), own)
        else:
            loops.count_next_digit(*at, key_type(prefix), key_type(shift), key_type(width), own)

    stretches = zip(row.stretches, counts, strict=True)
    side_by_side(count, [(*stretch, own) for stretch, own in stretches])
    return counts


def _cut(numel: int, num_threads: int, multiple_of: int) -> list[tuple[int, int]]:
    num = min(4 * num_threads, _MAX_STRETCHES, numel // _SMALL_STRETCH) if num_threads > 1 else 1
    size = math.ceil(numel / max(1, num) / multiple_of) * multiple_of
    return [(start, min(start + size, numel)) for start in range(0, numel, size)]


def _first(num: int, available: Array) -> Array:
    """Deal `num` out to stretches in order, each up to what is available there."""
    before = np.cumsum(available) - available
    dealt: Array = np.clip(num - before, 0, available)
    return dealt


def _take_(row: _Row, stretch: tuple[int, int], indices: Array, values: Array) -> None:
    loops.take_(row.accumulated, row.damped, row.saved, *stretch, indices, values)


def _find_non_finite(grad: Tensor) -> list[bool]:
    """Whether each row holds a NaN or inf."""
    bits = _flat(grad.view({2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[grad.itemsize]))
    key_type = bits.dtype.type
    mask, infinity = key_type((1 << (8 * grad.itemsize - 1)) - 1), key_type(_INFINITIES[grad.dtype])
    is_refused = [False] * len(bits)

    def check_row(n: int, num_threads: int) -> None:
        stretches = _cut(bits[n].size, num_threads, loops.LINE)
        tasks = [(bits[n], *stretch, mask, infinity) for stretch in stretches]
        is_refused[n] = not all(side_by_side(loops.is_finite, tasks))

    over_rows(check_row, len(bits))
    return is_refused


def _rows(residual: Tensor, grad: Tensor | None, damped: Tensor | None, damping: Tensor | None) -> list[_Row]:
    """Each row's memory; the damped entries in ascending order."""
    key_type = np.uint32 if residual.dtype == torch.float32 else np.uint64
    mask = key_type((1 << (8 * residual.itemsize - 1)) - 1)
    accumulated = _flat(residual)
    if damped is None or damping is None:
        damped = residual.new_empty(*residual.shape[:-1], 0, dtype=torch.int64)
        damping = residual.new_empty(*residual.shape[:-1], 0)
    damped, damping = damped.contiguous(), damping.contiguous()
    if not all(loops.is_ascending(where) for where in _flat(damped)):
        damped, order = damped.sort(dim=-1)
        damping = damping.gather(-1, order)
    kind = loops.NOTHING if grad is None else _HALF_KINDS.get(grad.dtype, loops.NATIVE)
    if grad is not None and kind != loops.NATIVE:
        grad = grad.view(torch.uint16)
    grads = accumulated if grad is None else _flat(grad)
    return [
        _Row(a, a.view(key_type), g, kind, mask, where, by, np.empty(where.size, a.dtype))
        for a, g, where, by in zip(accumulated, grads, _flat(damped), _flat(damping), strict=True)
    ]


def _flat(tensor: Tensor) -> Array:
    """The rows of a tensor, (rows, m), sharing its memory."""
    *batch, size = tensor.shape
    numpy: Array = tensor.detach().view(math.prod(batch), size).numpy()
    return numpy


def _outputs(residual: Tensor, size: int) -> tuple[Array, Array]:
    accumulated = _flat(residual)
    shape = (accumulated.shape[0], size)
    return np.empty(shape, np.int64), np.empty(shape, accumulated.dtype)


def _like(residual: Tensor, rows: Array) -> Tensor:
    """Results, (rows, ...), with the leading dimensions of the residual."""
    return torch.from_numpy(rows).view((*residual.shape[:-1], *rows.shape[1:]))
