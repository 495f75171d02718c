"""Codes with blocks: a value travels as its sign and the nearest of a few magnitudes of its block.

A block of 128 consecutive values has n + 1 magnitudes, from lo to hi:

    magnitude_i = (lo (T_n - T_i) + hi T_i) / T_n,   i = 0..n, T_0 = 0

    int8   T_i = i, n = 127          lo = 0         hi = max |x|   one float32 scale per block: hi
    4bit   T_i = i (i+1) / 2, n = 7  lo = min |x|   hi = max |x|   two: lo, hi
    2bit   T_i = i, n = 1            lo, hi = the means of the block's small and large magnitudes, lo = 0 if
                                     one of them is zero           two: lo, hi
    sign   n = 0, a magnitude for    the means of the block's positive and of its negative magnitudes
           either sign                                             two: minus, plus

docs/wire-format.md says why, and how much of a vector a code can lose.
"""

import torch
from torch import Tensor

from regtopk.core.exact import power_of_two

BLOCK = 128  # values that share their scales
NUM_SCALES = {"int8": 1, "4bit": 2, "2bit": 2, "sign": 2}

_NUM_LEVELS = {"int8": 128, "4bit": 8, "2bit": 2, "sign": 1}
_FRACTION_BITS = 40
_NUM_REFINEMENTS = 3


def to_symbols(values: Tensor, code: str, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What a code with blocks sends: one symbol per value, and the scales of each block.

    Symbols, (..., m) uint8, are the level, and above it the sign; zero in padding. Scales, (..., blocks,
    1 or 2) float32, are hi, lo and hi, or minus and plus; zero in blocks that are all padding.
    """
    size = values.shape[-1]
    num_blocks = -(-size // BLOCK)
    blocks = _in_blocks(values.float(), num_blocks)
    place = torch.arange(num_blocks * BLOCK, device=values.device).view(num_blocks, BLOCK)
    is_valid = place < (size if count is None else count[..., None, None])
    magnitude = blocks.abs().masked_fill(~is_valid, 0.0)
    is_negative = blocks.signbit()
    symbols = is_negative.to(torch.uint8) * _NUM_LEVELS[code]
    if code == "sign":
        scales = torch.cat(
            [_mean_where(is_sign & is_valid, magnitude) for is_sign in (is_negative, ~is_negative)], dim=-1
        )
    else:
        scales = _scales(magnitude, is_valid, code)
        symbols += _nearest_level(magnitude, scales, code)
    return (symbols * is_valid).flatten(-2)[..., :size], scales


def dequantise(symbols: Tensor, scales: Tensor, code: str) -> Tensor:
    """The values, (..., m) float32, of symbols (..., m) and scales (..., blocks, 1 or 2)."""
    size, num_levels = symbols.shape[-1], _NUM_LEVELS[code]
    symbols = _in_blocks(symbols, scales.shape[-2])
    if code == "sign":
        minus, plus = scales.split(1, dim=-1)
        return torch.where(symbols == 0, plus, -minus).flatten(-2)[..., :size]
    level = symbols & (num_levels - 1)
    if code == "int8":
        last = torch.full_like(scales, num_levels - 1)  # CUDA would multiply by the inverse of a number
        magnitude = scales * (level / last)
    else:
        magnitude = _levels(scales, code).gather(-1, level.long())
    return torch.where(symbols < num_levels, magnitude, -magnitude).flatten(-2)[..., :size]


def _in_blocks(vector: Tensor, num_blocks: int) -> Tensor:
    padded = torch.nn.functional.pad(vector, (0, num_blocks * BLOCK - vector.shape[-1]))
    return padded.view(*padded.shape[:-1], num_blocks, BLOCK)


def _levels(scales: Tensor, code: str) -> Tensor:
    """The magnitudes of each block, ascending, (..., blocks, n + 1) float32.

    The products are exact in float64, so a magnitude is the same on every device, level 0 is lo to the bit
    and the last is hi.
    """
    steps = torch.arange(_NUM_LEVELS[code], dtype=torch.float64, device=scales.device)
    if code == "4bit":
        steps = steps * (steps + 1) / 2
    last = steps[-1]  # not a Python number: CUDA would multiply by its inverse
    lo, hi = scales[..., :1], scales[..., 1:]
    return ((lo * (last - steps) + hi * steps) / last).float()


def _nearest_level(magnitude: Tensor, scales: Tensor, code: str) -> Tensor:
    """The level, (..., blocks, 128) uint8, whose magnitude is nearest."""
    if code == "int8":
        share = magnitude / scales.clamp(min=2.0**-149)  # the clamp only acts on a block of zeros
        return (share * (_NUM_LEVELS[code] - 1) + 0.5).to(torch.uint8)
    levels = _levels(scales, code).double()
    nearest = torch.zeros_like(magnitude, dtype=torch.uint8)
    magnitude = magnitude.double()
    for midpoint in ((levels[..., 1:] + levels[..., :-1]) / 2).split(1, dim=-1):
        nearest += magnitude > midpoint
    return nearest


def _scales(magnitude: Tensor, is_valid: Tensor, code: str) -> Tensor:
    high = magnitude.amax(-1, keepdim=True)
    if code == "int8":
        return high
    low = magnitude.masked_fill(~is_valid, torch.inf).amin(-1, keepdim=True).minimum(high)
    if code == "2bit":
        return _two_means(magnitude, is_valid, low, high)
    return torch.cat([low, high], dim=-1)


def _two_means(magnitude: Tensor, is_valid: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The means of the magnitudes below and above their midpoint, refined three times.

    They are computed in integers, in units of 2^-40 of the power of two above the maximum. Sums of integers
    do not depend on the order of addition, so a batch, a single worker and a GPU agree to the bit.
    """
    exponent = torch.frexp(high).exponent
    unit = power_of_two(_FRACTION_BITS - exponent)
    fixed, lo, hi = ((x * unit + 0.5).long() for x in (magnitude, low, high))
    total, num_valid = fixed.sum(-1, keepdim=True), is_valid.sum(-1, keepdim=True)
    holds_no_zero = low > 0
    for _ in range(_NUM_REFINEMENTS):
        is_upper = fixed > (lo + hi) >> 1
        num_upper = is_upper.sum(-1, keepdim=True)
        upper = (fixed * is_upper).sum(-1, keepdim=True)
        hi = torch.where(num_upper > 0, _mean(upper, num_upper), hi)
        lo = _mean(total - upper, num_valid - num_upper) * holds_no_zero
    unit = power_of_two(exponent - _FRACTION_BITS)
    return (torch.cat([lo, hi], dim=-1) * unit).float()


def _mean_where(is_counted: Tensor, magnitude: Tensor) -> Tensor:
    """The mean of some magnitudes of each block, (..., blocks, 1) float32, zero if there are none."""
    counted = magnitude * is_counted
    exponent = torch.frexp(counted.amax(-1, keepdim=True)).exponent
    fixed = (counted * power_of_two(_FRACTION_BITS - exponent) + 0.5).long()
    mean = _mean(fixed.sum(-1, keepdim=True), is_counted.sum(-1, keepdim=True))
    return (mean * power_of_two(exponent - _FRACTION_BITS)).float()


def _mean(total: Tensor, num: Tensor) -> Tensor:
    num = num.clamp(min=1)
    return (2 * total + num) // (2 * num)
