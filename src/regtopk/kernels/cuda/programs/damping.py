"""Triton programs for entries whose score is given: the damped ones, in ascending order.

While a selection runs, the residual holds their scores, and `saved` what they will get back. Entries of one
tile are neighbours in an ascending list: `cut` finds where those of each tile start.
"""

import triton
import triton.language as tl

from regtopk.kernels.cuda.programs.tiles import lead_of
from regtopk.kernels.cuda.programs.words import SIZES, key_of


@triton.jit
def count_below(ascending, num, num_steps, x):
    """How many of `num` ascending numbers are below each x, by bisection; `num` has `num_steps` bits."""
    below = tl.zeros_like(x)
    for step in range(num_steps):
        probe = below + (tl.full((), 1, tl.int64) << (num_steps - 1 - step))
        at = tl.load(ascending + probe - 1, mask=probe <= num, other=0)
        below = tl.where((probe <= num) & (at < x), probe, below)
    return below


@triton.jit(do_not_specialize=SIZES)
def cut(
    listed, starts, num_listed, num_listed_bits, num_tiles, tile, residual_stride,
    IS_ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where in an ascending list the entries of every tile start, and where those of the last one end."""
    row = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = t * tile - lead_of(row, residual_stride, IS_ALIGNED)
    below = count_below(listed + row * num_listed, num_listed, num_listed_bits, first)
    tl.store(starts + row * (num_tiles + 1) + t, below, mask=t <= num_tiles)


@triton.jit
def key_of_sample(key, j, damped, scores, num_damped, num_damped_bits, KEY_BITS: tl.constexpr):
    """The keys of entries j, or those of their scores where these are given."""
    at = count_below(damped, num_damped, num_damped_bits, j)
    is_damped = tl.load(damped + at, mask=at < num_damped, other=-1) == j
    score = tl.load(scores + at, mask=is_damped, other=0.0)
    return tl.where(is_damped, key_of(score, KEY_BITS), key)


@triton.jit
def first_of_tile(starts, row, tile, damped, given, num_damped, BLOCK: tl.constexpr):
    """Where the damped entries of a tile start and stop in memory; the first of them, and what is given.

    There is a program for each tile. One that loads them before it needs them does not wait for them.
    """
    starts += row * (tl.num_programs(0) + 1) + tile
    first, stop = row * num_damped + tl.load(starts), row * num_damped + tl.load(starts + 1)
    j, x = load_damped(damped, given, first, stop, BLOCK)
    return first, stop, j, x


@triton.jit
def load_damped(damped, given, first, stop, BLOCK: tl.constexpr):
    """The next few damped entries from `first` on, and what is given for each."""
    d = first + tl.arange(0, BLOCK)
    return tl.load(damped + d, mask=d < stop, other=0), tl.load(given + d, mask=d < stop, other=0.0)


@triton.jit
def put(residual, damped, given, first, stop, j, x, BLOCK: tl.constexpr):
    """Write what is given for a tile's damped entries, from `first_of_tile`; then all threads see it."""
    tl.debug_barrier()
    while first < stop:
        tl.store(residual + j, x, mask=first + tl.arange(0, BLOCK) < stop)
        first += BLOCK
        j, x = load_damped(damped, given, first, stop, BLOCK)
    tl.debug_barrier()


@triton.jit
def exchange(place, x, mask, KEY_BITS: tl.constexpr):
    """Write x, and return what was there: one trip to the cache."""
    integer = tl.int32 if KEY_BITS == 31 else tl.int64
    bits = x.to(integer, bitcast=True)
    old = tl.atomic_xchg(place.to(tl.pointer_type(integer)), bits, mask=mask, sem="relaxed")
    return old.to(x.dtype, bitcast=True)


@triton.jit(do_not_specialize=SIZES)
def undamp(
    residual, damped, saved, indices, values, starts, num_damped, num_tiles, k, residual_stride,
    IS_ALIGNED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Give damped entries back what they held: among the values if they were taken, else in the residual.

    They are looked for among what was taken of their tile, which starts at `starts`.
    """
    row = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = d < num_damped
    d = row * num_damped + d
    j = tl.load(damped + d, mask=mask, other=0)
    a = tl.load(saved + d, mask=mask, other=0.0)
    at_tile = starts + row * (num_tiles + 1) + (j + lead_of(row, residual_stride, IS_ALIGNED)) // TILE
    first, stop = tl.load(at_tile), tl.load(at_tile + 1)
    num_steps, most = 0, tl.max(stop - first)
    while most > 0:
        num_steps += 1
        most = most // 2
    at = first + count_below(indices + row * k + first, stop - first, num_steps, j)
    is_taken = tl.load(indices + row * k + at, mask=mask & (at < stop), other=-1) == j
    tl.store(values + row * k + at, a, mask=mask & is_taken)
    tl.store(residual + row * residual_stride + j, a, mask=mask & (is_taken == 0))
