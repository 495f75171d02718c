"""What the Triton programs of one call share, and how one launch tells the next what it found.

The bits of |x| read as an integer order like |x| itself: that integer is x's *key*. Every program works
on one row, number `program_id(1)`. What a launch finds, it writes to the row's words in `work` (int64, zero
at first), where the next launch reads it. The host reads nothing back.

    0          candidates: entries whose key reached the guess
    1          the guess
    2          programs that have taken their part of the sample
    3          the limit: where there is one, entries whose key reaches it are no candidates, but taken
    4          how many keys reach the limit
    8 + i      the leading i digits of the threshold (8 bits a digit)
    24 + i     how many more are to be taken among the keys that start so
    40 + 256 i how many keys have each value of digit i, after the digits before it

Parameters are annotated with constexpr or not at all: Triton reads annotations itself, and knows no other.
"""

import triton
import triton.language as tl

NUM_CANDIDATES, GUESS, NUM_SAMPLED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LIMIT, NUM_ABOVE = tl.constexpr(3), tl.constexpr(4)
PREFIX, WANTED, COUNTS = tl.constexpr(8), tl.constexpr(24), tl.constexpr(40)
BINS = tl.constexpr(256)
# sizes that change from call to call: no program is compiled again because one is a multiple of 16
SIZES = [
    "numel", "k", "capacity", "num_damped", "num_damped_bits", "num_groups", "num_tiles", "num_taken", "rank",
    "rank_of_limit", "chunk", "most", "num_listed", "num_listed_bits", "tile", "row_words", "num_words",
    "num_value_words", "num_field_words", "num_unary_words", "num_parts",
]  # fmt: skip


def words_per_row(key_bits: int) -> int:
    """How many words of `work` a row has."""
    return int(COUNTS.value) + (key_bits + 1) // 8 * int(BINS.value)


@triton.jit
def key_of(x, KEY_BITS: tl.constexpr):
    """|x| as an integer: 31 bits of a float32, 63 of a float64."""
    if KEY_BITS == 31:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF


@triton.jit
def leading_bits_of_rank(keys, rank, num_bits, KEY_BITS: tl.constexpr):
    """The leading bits of the `rank`-th largest key, found one after the other; int64."""
    found = tl.full((), 0, tl.int64)
    bit = tl.full((), 1, tl.int64) << (KEY_BITS - 1)
    for _ in range(num_bits):
        num = tl.sum((keys >= (found + bit).to(keys.dtype)).to(tl.int32))
        found = tl.where(num >= rank, found + bit, found)
        bit = bit >> 1
    return found


@triton.jit
def is_enough(work, k, capacity):
    """Whether the k-th largest is sure to be among a row's candidates, and all of these were kept."""
    num = tl.load(work + NUM_CANDIDATES)
    above = tl.load(work + NUM_ABOVE)
    return (num <= capacity) & (above + num >= k) & (above < k)
