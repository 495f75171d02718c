"""Triton programs that draw: the walk of `core.random.random_sequence`, and rounding at random."""

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_FIRST, _SECOND = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64)), tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit(do_not_specialize=["numel", "state"])
def round_rows(rounded, vector, workers, numel, state, WORDS: tl.constexpr):
    """Add 16 random bits below those that bfloat16 keeps, and cut; a word has the bits of four entries."""
    row = tl.program_id(1).to(tl.int64)
    seed = _splitmix(tl.load(workers + row) + state)
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)[:, None]
    nth = tl.arange(0, 4)[None, :]
    place = 4 * word + nth
    mask = place < numel
    entries = tl.load(vector + row * numel + place, mask=mask, other=0.0).to(tl.float32)
    draws = (_splitmix(seed + word * _GOLDEN) >> (16 * nth)) & 0xFFFF
    bits = (entries.to(tl.int32, bitcast=True) + draws.to(tl.int32)) & -0x10000
    tl.store(rounded + row * numel + place, bits.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["numel", "k", "state", "bits", "num_rounds"])
def walk(drawn, numel, k, state, bits, num_rounds, BLOCK: tl.constexpr):
    """Send every number through the bijection, and on along its cycle until it is below J."""
    start = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.where(start < k, _permute(start, state, bits, num_rounds), 0)  # others may never come below J
    while tl.max((x >= numel).to(tl.int32)) > 0:
        x = tl.where(x >= numel, _permute(x, state, bits, num_rounds), x)
    tl.store(drawn + start, x, mask=start < k)


@triton.jit
def _permute(x, state, bits, num_rounds):
    mask = (tl.full((), 1, tl.int64) << bits) - 1
    fold = (bits + 1) // 2
    for i in range(num_rounds):
        key = _splitmix(tl.zeros_like(x) + state + i + _GOLDEN) & mask  # one more word of `core.random.mix`
        x = (x + key) & mask
        x = (x * 0x5BD1E995) & mask  # wraps modulo 2^64 first, which keeps the low b bits right
        x = x ^ (x >> fold)
    return x


@triton.jit
def _splitmix(word):
    word = (word ^ _shift_right(word, 30)) * _FIRST
    word = (word ^ _shift_right(word, 27)) * _SECOND
    return word ^ _shift_right(word, 31)


@triton.jit
def _shift_right(word, BITS: tl.constexpr):
    """A logical shift: int64 shifts drag the sign along."""
    return (word >> BITS) & ((1 << (64 - BITS)) - 1)
