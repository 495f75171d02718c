"""Random draws as a function of (seed, step): the same numbers on every rank, device and after a resume."""

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_NUM_ROUNDS = 16  # at 8, a chi-square test of 3- and 4-bit subsets fails; at 16 it passes


def mix(*words: int) -> int:
    """A 64-bit hash of a few integers (splitmix64, one round a word)."""
    state = 0
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def random_subset(numel: int, k: int, seed: int, step: int) -> Tensor:
    """k distinct entries of 0..J-1, ascending (k,) int64 on the CPU: O(k), whatever J is.

    A keyed bijection of 0..2^b-1 (2^b >= J) sends 0, 1, ..., k-1 to distinct numbers; those that fall
    outside J are sent on along their cycle until they fall inside, which keeps them distinct.
    """
    bits = max(1, (numel - 1).bit_length())
    keys = [mix(seed, step, i) & ((1 << bits) - 1) for i in range(_NUM_ROUNDS)]
    drawn = _permute(torch.arange(k, dtype=torch.int64), bits, keys)
    while bool((outside := drawn >= numel).any()):
        drawn[outside] = _permute(drawn[outside], bits, keys)
    return drawn.sort().values


def _permute(x: Tensor, bits: int, keys: list[int]) -> Tensor:
    """A bijection on b-bit integers: add a key, multiply by an odd number, fold the high half down."""
    mask = (1 << bits) - 1
    for key in keys:
        x = (x + key) & mask
        x = (x * 0x5BD1E995) & mask  # wraps modulo 2^64 first, which keeps the low b bits right
        x = x ^ (x >> ((bits + 1) // 2))
    return x
