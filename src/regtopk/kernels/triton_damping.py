"""Triton programs that put scores in the place of damped entries, and take them away again."""

import triton
import triton.language as tl

from regtopk.kernels.triton_words import GUESS, NUM_LOST, SIZES, is_enough, key_of, lead_of

COMPARED_AT_ONCE = tl.constexpr(8)  # candidates; with fewer, there are more waits for memory in a row


@triton.jit
def _find_in_tile(offsets, num, j, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Where j is among the first `num` offsets, which are in order, or -1: for BLOCK different j.

    By bisection down to a few, and those all at once, which waits for memory only once.
    """
    low = tl.zeros((BLOCK,), tl.int64)  # of the last few that start at or before j, the first
    width = tl.full((), TILE // 2, tl.int64)
    most = tl.max(num)
    while (width >= most) & (width >= COMPARED_AT_ONCE):
        width = width // 2
    while width >= COMPARED_AT_ONCE:
        probe = low + width
        at = tl.load(offsets + probe, mask=probe < num, other=0)
        low = tl.where((probe < num) & (at <= j), probe, low)
        width = width // 2
    position = tl.full((BLOCK,), -1, tl.int64)
    for step in tl.static_range(COMPARED_AT_ONCE):
        at = tl.load(offsets + low + step, mask=low + step < num, other=-1)
        position = tl.where(at == j, low + step, position)
    return position


@triton.jit(do_not_specialize=SIZES)
def damp_before(
    residual,
    grad,
    damped,
    scores,
    saved,
    work,
    num_damped,
    residual_stride,
    grad_stride,
    num_words,
    KEY_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Save a where it is damped, and leave a residual there that `accumulate` cannot overlook.

    The residual becomes ±score with the gradient's sign, so that what
    `accumulate` finds, |±score + g|, is at least the score. Count where only that sum reaches the guess.
    """
    row = tl.program_id(1).to(tl.int64)
    work += row * num_words
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = d < num_damped
    d = row * num_damped + d
    j = tl.load(damped + d, mask=mask, other=0)
    here = residual + row * residual_stride + j
    r = tl.load(here, mask=mask, other=0.0)
    g = tl.load(grad + row * grad_stride + j, mask=mask, other=0.0)
    a = (r + g).to(r.dtype)
    score = tl.load(scores + d, mask=mask, other=0.0)
    announced = tl.where(g < 0, -score, score)
    tl.store(saved + d, a, mask=mask)
    tl.store(here, announced, mask=mask)
    found = (announced + g).to(r.dtype)
    least = tl.load(work + GUESS)
    is_lost = mask & (key_of(found, KEY_BITS) >= least) & (key_of(score, KEY_BITS) < least)
    num_lost = tl.sum(is_lost.to(tl.int32))
    if num_lost > 0:
        tl.atomic_add(work + NUM_LOST, num_lost.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def damp_after(
    residual,
    damped,
    scores,
    saved,
    work,
    tile_counts,
    tile_stops,
    offsets,
    keys,
    num_damped,
    k,
    capacity,
    num_tiles,
    residual_stride,
    num_words,
    IS_ALIGNED: tl.constexpr,
    KEY_BITS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put a back if the candidates suffice, with the score's key among theirs; otherwise put the score.

    A damped entry is looked for among the candidates of its tile.
    """
    row = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = d < num_damped
    d = row * num_damped + d
    j = tl.load(damped + d, mask=mask, other=0)
    a = tl.load(saved + d, mask=mask, other=0.0)
    score = tl.load(scores + d, mask=mask, other=0.0)
    here = residual + row * residual_stride + j
    if is_enough(work + row * num_words, k, capacity):
        tl.store(here, a, mask=mask)
        at_tile = row * num_tiles + (j + lead_of(row, residual_stride, IS_ALIGNED)) // TILE
        num = tl.load(tile_counts + at_tile, mask=mask, other=0)
        first = row * capacity + tl.load(tile_stops + at_tile, mask=mask, other=0) - num
        position = _find_in_tile(offsets + first, num, j, TILE, BLOCK)
        tl.store(keys + first + position, key_of(score, KEY_BITS), mask=position >= 0)
    else:
        tl.store(here, score, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def damp_here(
    residual,
    damped,
    scores,
    saved,
    num_damped,
    residual_stride,
    BLOCK: tl.constexpr,
):
    """Save what is already accumulated where it is damped, and put the score there."""
    row = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = d < num_damped
    d = row * num_damped + d
    here = residual + row * residual_stride + tl.load(damped + d, mask=mask, other=0)
    a = tl.load(here, mask=mask, other=0.0)
    tl.store(saved + d, a, mask=mask)
    tl.store(here, tl.load(scores + d, mask=mask, other=0.0), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def undamp(
    residual,
    damped,
    saved,
    work,
    indices,
    values,
    num_damped,
    k,
    capacity,
    half_k,
    num_steps,
    residual_stride,
    num_words,
    BLOCK: tl.constexpr,
):
    """Put a back for the score: among the values if the entry was taken, else in the residual.

    Looks for it in the ascending indices by bisection, from 2^(num_steps - 1) = half_k < k on. Where
    the candidates sufficed, `damp_after` has put a back already. A capacity of -1 says that it was not there.
    """
    row = tl.program_id(1).to(tl.int64)
    if not is_enough(work + row * num_words, k, capacity):
        d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = d < num_damped
        d = row * num_damped + d
        j = tl.load(damped + d, mask=mask, other=0)
        a = tl.load(saved + d, mask=mask, other=0.0)
        indices += row * k
        low = tl.zeros((BLOCK,), tl.int64)  # the last position whose index is <= j, if any
        width = tl.full((), 0, tl.int64) + half_k
        for _ in range(num_steps):
            probe = low + width
            at = tl.load(indices + probe, mask=mask & (probe < k), other=0)
            low = tl.where((probe < k) & (at <= j), probe, low)
            width = width // 2
        is_taken = tl.load(indices + low, mask=mask, other=-1) == j
        tl.store(values + row * k + low, a, mask=mask & is_taken)
        tl.store(residual + row * residual_stride + j, a, mask=mask & (is_taken == 0))
