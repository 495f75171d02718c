"""The Triton program of the first launch: from which key on entries are collected."""

import triton
import triton.language as tl

from regtopk.kernels.triton_words import (
    GUESS,
    LIMIT,
    NUM_SAMPLED,
    SIZES,
    key_of,
    leading_bits_of_rank,
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
    HAS_GRAD: tl.constexpr,
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
        a = tl.load(residual + offsets)
        if HAS_GRAD:
            a = (a + tl.load(grad + offsets)).to(a.dtype)
        largest = tl.maximum(largest, key_of(a, KEY_BITS))
    tl.store(keys + at, largest)


@triton.jit(do_not_specialize=SIZES)
def guess(
    residual,
    grad,
    work,
    keys,
    num_groups,
    rank,
    rank_of_limit,
    residual_stride,
    grad_stride,
    num_words,
    HAS_GRAD: tl.constexpr,
    IS_WIDE: tl.constexpr,
    KEY_BITS: tl.constexpr,
    NUM_BITS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    PER_KEY: tl.constexpr,
    NUM_SAMPLERS: tl.constexpr,
):
    """A row's programs take a sample; the last one to finish guesses.

    The guess is the leading bits of the `rank`-th largest key of the sample. The limit of a wide plan is more
    than the `rank_of_limit`-th largest.
    """
    row = tl.program_id(1).to(tl.int64)
    size: tl.constexpr = NUM_KEYS // NUM_SAMPLERS
    work += row * num_words
    keys += row * NUM_KEYS
    _sample(
        residual + row * residual_stride, grad + row * grad_stride, keys, num_groups, tl.program_id(0) * size,
        HAS_GRAD, KEY_BITS, NUM_KEYS, PER_KEY, size,
    )  # fmt: skip
    tl.debug_barrier()  # all threads have stored, before one says so
    if tl.atomic_add(work + NUM_SAMPLED, 1, sem="acq_rel") == NUM_SAMPLERS - 1:
        sample = tl.load(keys + tl.arange(0, NUM_KEYS), cache_modifier=".cg")
        found = leading_bits_of_rank(sample, rank, NUM_BITS, KEY_BITS)
        tl.store(work + GUESS, tl.maximum(found, 1))
        if IS_WIDE:
            one = tl.full((), 1, tl.int64)
            last_bit = one << (KEY_BITS - NUM_BITS)
            limit = leading_bits_of_rank(sample, rank_of_limit, NUM_BITS, KEY_BITS) + last_bit
            tl.store(work + LIMIT, tl.minimum(limit, (one << KEY_BITS) - 1))
