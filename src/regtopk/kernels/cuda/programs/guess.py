"""The Triton program of the first launch: from which key on entries are collected."""

import triton
import triton.language as tl

from regtopk.kernels.cuda.programs.damping import key_of_sample
from regtopk.kernels.cuda.programs.words import GUESS, LIMIT, NUM_SAMPLED, SIZES, key_of, leading_bits_of_rank


@triton.jit
def offset_of_sample(i, num_groups):
    """Where in the row a sample's i-th entry is: groups of 4 neighbours, at multiples of the golden ratio.

    The product stays below 2^63 up to 2^37 entries, whose residual alone would be 512 GiB.
    """
    fraction = (((i // 4).to(tl.int64) * 2654435769) & 0xFFFFFFFF) >> 4  # of 2^28
    return (fraction * num_groups >> 28) * 4 + i % 4


@triton.jit(do_not_specialize=SIZES)
def guess(
    residual, grad, damped, scores, work, keys, num_groups, num_damped, num_damped_bits, rank,
    rank_of_limit, residual_stride, grad_stride, num_words, HAS_DAMPED: tl.constexpr,
    IS_WIDE: tl.constexpr, KEY_BITS: tl.constexpr, NUM_BITS: tl.constexpr, NUM_KEYS: tl.constexpr,
    PER_KEY: tl.constexpr, NUM_SAMPLERS: tl.constexpr,
):  # fmt: skip
    """A row's programs take a sample of a; the last one to finish guesses.

    The sample has NUM_KEYS keys, each the largest of PER_KEY entries'. The guess is the leading bits of the
    `rank`-th largest of them. The limit of a wide plan is more than the `rank_of_limit`-th largest.
    """
    row = tl.program_id(1).to(tl.int64)
    size: tl.constexpr = NUM_KEYS // NUM_SAMPLERS
    work += row * num_words
    keys += row * NUM_KEYS
    at = tl.program_id(0) * size + tl.arange(0, size)
    offsets = offset_of_sample(tl.arange(0, PER_KEY)[:, None] * NUM_KEYS + at[None, :], num_groups)
    a = tl.load(residual + row * residual_stride + offsets)
    key = key_of((a + tl.load(grad + row * grad_stride + offsets)).to(a.dtype), KEY_BITS)
    if HAS_DAMPED:
        damped += row * num_damped
        scores += row * num_damped
        key = key_of_sample(key, offsets, damped, scores, num_damped, num_damped_bits, KEY_BITS)
    tl.store(keys + at, tl.max(key, 0))
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
