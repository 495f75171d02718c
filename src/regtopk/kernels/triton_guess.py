"""The Triton program of the first launch: which key to collect from, and is the gradient finite?"""

import triton
import triton.language as tl

from regtopk.kernels.triton_words import (
    GUESS,
    NON_FINITE,
    NUM_SAMPLED,
    SIZES,
    key_of,
    lead_of,
    leading_bits_of_rank,
    start_of,
)


@triton.jit
def offset_of_sample(i, num_groups):
    """Where in the row a sample's i-th entry is: groups of 4 neighbours, at multiples of the golden ratio.

    The product stays below 2^63 up to 2^37 entries, whose residual alone would be 512 GiB.
    """
    fraction = (((i // 4).to(tl.int64) * 2654435769) & 0xFFFFFFFF) >> 4  # of 2^28
    return (fraction * num_groups >> 28) * 4 + i % 4


@triton.jit
def _sample(
    residual,
    grad,
    keys,
    num_groups,
    first,
    KEY_BITS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    PER_KEY: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Keys of a sample of a: SIZE of NUM_KEYS, from `first` on, each the largest of PER_KEY entries'."""
    at = first + tl.arange(0, SIZE)
    largest = tl.zeros((SIZE,), keys.dtype.element_ty)
    for part in tl.static_range(PER_KEY):
        offsets = offset_of_sample(part * NUM_KEYS + at, num_groups)
        r = tl.load(residual + offsets)
        largest = tl.maximum(largest, key_of((r + tl.load(grad + offsets)).to(r.dtype), KEY_BITS))
    tl.store(keys + at, largest)


@triton.jit
def _is_finite(grad, start, lead, numel, BLOCK: tl.constexpr):
    places = start + tl.arange(0, BLOCK)
    if (start >= lead) & (start + BLOCK <= lead + numel):  # without a mask, loads are 16 bytes wide
        x = tl.load(grad + places)
    else:
        x = tl.load(grad + places, mask=(places >= lead) & (places < lead + numel), other=0.0)
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    return tl.sum((tl.abs(x) < float("inf")).to(tl.int32)) == BLOCK


@triton.jit(do_not_specialize=SIZES)
def guess_and_check(
    residual,
    grad,
    work,
    keys,
    numel,
    num_groups,
    rank,
    residual_stride,
    grad_stride,
    num_words,
    IS_ALIGNED: tl.constexpr,
    KEY_BITS: tl.constexpr,
    NUM_BITS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    PER_KEY: tl.constexpr,
    NUM_SAMPLERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's first programs take a sample, and the last of them guesses; the others look for NaN and inf.

    In one launch, because the guess keeps a single multiprocessor busy for as long as the check takes
    all others. It is the leading bits of the `rank`-th largest key of the sample.
    """
    row = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    work += row * num_words
    if NUM_SAMPLERS > 0:  # noqa: SIM102 (one is known when compiling)
        if part < NUM_SAMPLERS:
            size: tl.constexpr = NUM_KEYS // NUM_SAMPLERS
            keys += row * NUM_KEYS
            _sample(
                residual + row * residual_stride, grad + row * grad_stride, keys, num_groups, part * size,
                KEY_BITS, NUM_KEYS, PER_KEY, size,
            )  # fmt: skip
            tl.debug_barrier()  # all threads have stored, before one says so
            if tl.atomic_add(work + NUM_SAMPLED, 1, sem="acq_rel") == NUM_SAMPLERS - 1:
                sample = tl.load(keys + tl.arange(0, NUM_KEYS), cache_modifier=".cg")
                guess = leading_bits_of_rank(sample, rank, NUM_BITS, KEY_BITS)
                tl.store(work + GUESS, tl.maximum(guess, 1))
    if part >= NUM_SAMPLERS:
        grad += start_of(row, grad_stride, IS_ALIGNED)
        start = (part - NUM_SAMPLERS).to(tl.int64) * BLOCK
        if not _is_finite(grad, start, lead_of(row, grad_stride, IS_ALIGNED), numel, BLOCK):
            tl.store(work + NON_FINITE, 1)
