"""Random draws as a function of (seed, worker, step, entry).

Counter-based: the same numbers batched and single, on CPU and GPU, and after a resume.
"""

import torch
from torch import Tensor

from regtopk import kernels

_MASK = (1 << 64) - 1
_NUM_ROUNDS = 16  # at 8, a chi-square test of 3- and 4-bit subsets fails; at 16 it passes


def mix(*words: int) -> int:
    """A 64-bit hash of a few integers (splitmix64, one round per integer)."""
    state = 0
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def uniform(index: Tensor, seed: int, step: int, numel: int) -> Tensor:
    """Uniform float64 numbers in [0, 1), one per entry: (..., numel) for workers of the given index.

    A splitmix64 of (seed, step), the worker and the entry, in wrapping int64 tensor code. An index, int64, of
    shape () on a rank gives (numel,), and (N, 1) in the simulator gives (N, numel).
    """
    word = random_words(index, seed, step, range(numel))
    return ((word >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def random_words(index: Tensor, seed: int, step: int, entries: range) -> Tensor:
    """Random 64-bit words, int64, one for each of some neighbouring entries: see `uniform`."""
    entry = torch.arange(entries.start, entries.stop, dtype=torch.int64, device=index.device)
    word = _splitmix(index.reshape(index.shape[:-1] if index.dim() else ()) + signed(mix(seed, step)))
    return _splitmix(word.unsqueeze(-1) + entry * signed(0x9E3779B97F4A7C15))


def _splitmix(word: Tensor) -> Tensor:
    word = (word ^ _shift_right(word, 30)) * signed(0xBF58476D1CE4E5B9)
    word = (word ^ _shift_right(word, 27)) * signed(0x94D049BB133111EB)
    return word ^ _shift_right(word, 31)


def _shift_right(word: Tensor, bits: int) -> Tensor:
    """A logical shift: int64 shifts drag the sign along."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def signed(word: int) -> int:
    """The int64 of the same 64 bits."""
    return word - (1 << 64) if word >> 63 else word


def random_subset(numel: int, k: int, seed: int, step: int, device: torch.device | None = None) -> Tensor:
    """k distinct entries of 0..J-1, ascending, (k,) int64: O(k), whatever J is."""
    return random_sequence(numel, k, seed, step, device).sort().values


def random_sequence(numel: int, k: int, seed: int, step: int, device: torch.device | None = None) -> Tensor:
    """k distinct entries of 0..J-1 in random order, (k,) int64: O(k), whatever J is.

    A keyed bijection of 0..2^b-1 (2^b >= J) maps 0, 1, ..., k-1 to distinct numbers. Those of J or more are
    mapped again until they fall below J, which keeps all distinct.
    """
    bits = max(1, (numel - 1).bit_length())
    drawn: Tensor
    if device is not None and (programs := kernels.programs_on(device, "random")) is not None:
        drawn = programs.draw(numel, k, bits, signed(mix(seed, step)), _NUM_ROUNDS, device)
        return drawn
    keys = [mix(seed, step, i) & ((1 << bits) - 1) for i in range(_NUM_ROUNDS)]
    drawn = _permute(torch.arange(k, dtype=torch.int64, device=device), bits, keys)
    while bool((outside := drawn >= numel).any()):
        drawn[outside] = _permute(drawn[outside], bits, keys)
    return drawn


def _permute(x: Tensor, bits: int, keys: list[int]) -> Tensor:
    """A bijection on b-bit integers: add a key, multiply by an odd number, fold the high half down."""
    mask = (1 << bits) - 1
    for key in keys:
        x = (x + key) & mask
        x = (x * 0x5BD1E995) & mask  # wraps modulo 2^64 first, which keeps the low b bits right
        x = x ^ (x >> ((bits + 1) // 2))
    return x
