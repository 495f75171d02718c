"""The loops of the selection on a CPU, compiled by numba. A call works on one stretch of a row.

The bits of |x| read as an unsigned integer order like |x| itself: that integer is x's *key*. Loops that
only compare look at `bits`, the residual's memory as unsigned integers, because compilers turn integer
maxima and counts into vector instructions. `mask` clears the sign. Entries are read in lines of 64: they are
compared one by one only in a line whose largest key reaches the guess, which few lines do.
"""

from typing import Any

import numpy as np

from regtopk.kernels.cpu.compiled import Array, compiled, from_bfloat16

LINE = 64
BLOCK = 64 * LINE  # stays in the first-level cache between being added to and being looked at

# what a gradient's memory holds (bfloat16 as uint16), or that there is nothing to add
NATIVE, BFLOAT16, NOTHING = 0, 1, 2


@compiled
def add_(accumulated: Array, grad: Array, kind: int) -> None:
    """accumulated += grad."""
    if kind == NATIVE:
        for i in range(accumulated.size):
            accumulated[i] += grad[i]
    elif kind == BFLOAT16:
        for i in range(accumulated.size):
            accumulated[i] += from_bfloat16(grad[i])


@compiled
def largest_key_of_line(bits: Array, mask: Any) -> Any:
    """The largest key of exactly one line: a known length makes better code."""
    key_type = bits.dtype.type
    largest = key_type(0)
    for i in range(LINE):
        largest = max(largest, key_type(bits[i] & mask))
    return largest


@compiled
def add_line_(accumulated: Array, grad: Array, mask: Any) -> Any:
    """accumulated += grad on exactly one line of float32; its largest key.

    The key is made from the sum itself: read from `bits`, the same memory, it would have to wait until the
    sum is written, one entry after the other.
    """
    largest = np.uint32(0)
    for i in range(LINE):
        total = np.float32(accumulated[i] + grad[i])
        accumulated[i] = total
        largest = max(largest, np.uint32(total.view(np.uint32) & mask))
    return largest


@compiled
def num_at_least(bits: Array, mask: Any, key: Any) -> Any:
    """How many keys are at least the given one."""
    key_type = bits.dtype.type
    num = key_type(0)
    for i in range(bits.size):
        num = key_type(num + key_type(key_type(bits[i] & mask) >= key))
    return num


@compiled
def damp_(accumulated: Array, damped: Array, scores: Array, saved: Array, d: Any, stop: int) -> Any:
    """Put scores in the place of a, for the damped entries from the d-th up to `stop`."""
    while d < damped.size and damped[d] < stop:
        saved[d] = accumulated[damped[d]]
        accumulated[damped[d]] = scores[d]
        d += 1
    return d


@compiled
def sample_(accumulated: Array, grad: Array, kind: int, sample: Array) -> None:
    """residual + grad at groups of 8 neighbours, spread over the row like the golden ratio's multiples."""
    room = accumulated.size - 8 + 1
    step = int(0.6180339887498949 * room)
    start = 0
    for first in range(0, sample.size, 8):
        for i in range(8):
            sample[first + i] = accumulated[start + i]
        add_(sample[first : first + 8], grad[start : start + 8], kind)
        start = (start + step) % room


@compiled
def collect(
    bits: Array, start: int, stop: int, mask: Any, guess: Any, num: int, positions: Array, keys: Array
) -> int:
    """Append position and key of every entry with key >= guess, as far as they fit; count all of them."""
    for line in range(start, stop, LINE):
        end = min(line + LINE, stop)
        if end - line < LINE or largest_key_of_line(bits[line:end], mask) >= guess:
            for i in range(line, end):
                key = bits[i] & mask
                if key >= guess:
                    if num < positions.size:
                        positions[num], keys[num] = i, key
                    num += 1
    return num


@compiled
def accumulate_and_collect_(
    accumulated: Array, bits: Array, grad: Array, kind: int, mask: Any, damped: Array, scores: Array,
    saved: Array, start: int, stop: int, guess: Any, positions: Array, keys: Array,
) -> int:  # fmt: skip
    """residual += grad on a stretch, scores in the place of damped entries, and `collect`."""
    d: Any = np.searchsorted(damped, start)
    num = 0
    size = LINE if kind == NATIVE and bits.itemsize == 4 else BLOCK
    for block in range(start, stop, size):
        end = min(block + size, stop)
        may_hold_some = True
        if end - block == LINE and size == LINE:  # the usual case: memory is read and written once
            may_hold_some = add_line_(accumulated[block:end], grad[block:end], mask) >= guess
        else:
            add_(accumulated[block:end], grad[block:end], kind)
        if d < damped.size and damped[d] < end:
            d = damp_(accumulated, damped, scores, saved, d, end)
            may_hold_some = True
        if may_hold_some:
            num = collect(bits, block, end, mask, guess, num, positions, keys)
    return num


@compiled
def has_prefix(bits: Array, mask: Any, prefix: Any, shift: Any) -> bool:
    """Whether a key of the line starts with `prefix`, that is: equals it above `shift`."""
    key_type = bits.dtype.type
    num = key_type(0)
    for i in range(LINE):
        num = key_type(num + key_type(key_type(key_type(bits[i] & mask) >> shift) == prefix))
    return bool(num > 0)


@compiled
def count_next_digit(
    bits: Array, start: int, stop: int, mask: Any, prefix: Any, shift: Any, width: Any, counts: Array
) -> None:
    """Of the keys that start with `prefix`, count the `width` bits that follow it, above `shift`."""
    for line in range(start, stop, LINE):
        end = min(line + LINE, stop)
        above = bits.dtype.type(shift + width)
        if end - line < LINE or has_prefix(bits[line:end], mask, prefix, above):
            for i in range(line, end):
                key = (bits[i] & mask) >> shift
                if key >> width == prefix:
                    counts[key - (prefix << width)] += 1


@compiled
def emit_collected(positions: Array, keys: Array, threshold: Any, num_ties: int, indices: Array) -> None:
    """Indices of the collected keys > threshold, and of the first `num_ties` that equal it."""
    num = 0
    for c in range(keys.size):
        if keys[c] > threshold or (keys[c] == threshold and num_ties > 0):
            num_ties -= keys[c] == threshold
            indices[num] = positions[c]
            num += 1


@compiled
def emit_found(
    bits: Array, start: int, stop: int, mask: Any, threshold: Any, num_ties: int, indices: Array
) -> None:
    """The same over all entries of the stretch; ends when `indices` is full."""
    num = 0
    for line in range(start, stop, LINE):
        if num == indices.size:
            return
        end = min(line + LINE, stop)
        if end - line < LINE or largest_key_of_line(bits[line:end], mask) >= threshold:
            for i in range(line, end):
                key = bits[i] & mask
                if key > threshold or (key == threshold and num_ties > 0):
                    num_ties -= key == threshold
                    indices[num] = i
                    num += 1


@compiled
def take_(
    accumulated: Array, damped: Array, saved: Array, start: int, stop: int, indices: Array, values: Array
) -> None:
    """Give the stretch's damped entries their values back; then move the values at `indices` out."""
    for d in range(np.searchsorted(damped, start), np.searchsorted(damped, stop)):
        accumulated[damped[d]] = saved[d]
    for i in range(indices.size):
        values[i] = accumulated[indices[i]]
        accumulated[indices[i]] = 0


@compiled
def kth_largest_key(bits: Array, mask: Any, k: Any) -> Any:
    """The k-th largest key (or a smaller one that exactly k keys reach), one bit after the other."""
    key_type = bits.dtype.type
    threshold, bit = key_type(0), key_type((mask >> 1) + 1)
    while bit > 0:
        trial = key_type(threshold | bit)
        num = num_at_least(bits, mask, trial)
        if num >= k:
            threshold = trial
        if num == k:
            break
        bit = key_type(bit >> 1)
    return threshold


@compiled
def take_per_chunk_(
    accumulated: Array, bits: Array, grad: Array, kind: int, mask: Any, damped: Array, scores: Array,
    saved: Array, start: int, stop: int, chunk: int, k: int, indices: Array, values: Array,
) -> None:  # fmt: skip
    """On a stretch that starts with a chunk: accumulate, and take the k largest of every chunk."""
    d: Any = np.searchsorted(damped, start)
    num = 0
    for first in range(start, stop, chunk):
        last = min(first + chunk, stop)
        add_(accumulated[first:last], grad[first:last], kind)
        d = damp_(accumulated, damped, scores, saved, d, last)
        num_taken = min(k, last - first)
        threshold = kth_largest_key(bits[first:last], mask, num_taken)
        num_above = num_at_least(bits[first:last], mask, bits.dtype.type(threshold + 1))
        out = slice(num, num + num_taken)
        emit_found(bits, first, last, mask, threshold, num_taken - int(num_above), indices[out])
        take_(accumulated, damped, saved, first, last, indices[out], values[out])
        num += num_taken
