"""The orthonormal discrete cosine transform (DCT-II) of tiles, with the same bits everywhere.

    X = C_h x C_w',   C_ui = s_u cos(pi (2i + 1) u / 2n),   s_0 = sqrt(1 / n), else s_u = sqrt(2 / n)
    x = C_h' X C_w

A matrix product adds in an order that depends on its shape, the device and the number of threads. Sums of
whole numbers do not. So C is rounded to multiples of 2^-26, and a tile, before it is multiplied, to 24 bits:
to multiples of 2^-24 of the power of two above its largest entry. A row of C adds up to at most sqrt(n) in
magnitude, 8 = 2^3 for tiles of 64. Products and sums then are whole numbers up to 2^53, and float64 has them
exactly. The error is of the size of float32's rounding, in float64 too.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from regtopk.core.exact import SMALLEST_EXPONENT, power_of_two

LONGEST_SIDE = 64
_TILE_BITS, _MATRIX_BITS = 24, 26
_TILES_AT_ONCE = 1024  # bounds the memory of the float64 copies


def dct(tiles: Tensor) -> Tensor:
    """The coefficients of tiles, (..., T, height, width), each side at most 64, float32 or float64."""
    return _transformed(tiles, is_inverse=False)


def inverse_dct(coefficients: Tensor) -> Tensor:
    """The tiles of coefficients: the inverse of `dct`, to rounding."""
    return _transformed(coefficients, is_inverse=True)


def _transformed(tiles: Tensor, *, is_inverse: bool) -> Tensor:
    height, width = tiles.shape[-2:]
    left, right = (_cosines(side, is_inverse, tiles.device) for side in (height, width))
    done = torch.empty_like(tiles)
    for part, done_part in zip(tiles.split(_TILES_AT_ONCE, -3), done.split(_TILES_AT_ONCE, -3), strict=True):
        in_rows = _times(part.double(), right)
        done_part.copy_(_times(in_rows.transpose(-2, -1), left).transpose(-2, -1))
    return done


def _times(tiles: Tensor, matrix: Tensor) -> Tensor:
    """Each tile, rounded to 24 bits, times the matrix: exact in any order of addition."""
    largest = tiles.abs().amax((-2, -1), keepdim=True)
    exponent = torch.frexp(largest).exponent.clamp(min=SMALLEST_EXPONENT)
    whole = (tiles * power_of_two(_TILE_BITS - exponent)).round_()
    return (whole @ matrix).mul_(power_of_two(exponent - _TILE_BITS - _MATRIX_BITS))


@lru_cache(maxsize=4 * LONGEST_SIDE)
def _cosines(side: int, is_inverse: bool, device: torch.device) -> Tensor:
    """2^26 C', which transforms rows of `side` entries, or 2^26 C, its inverse; whole numbers in float64."""
    place = torch.arange(side, dtype=torch.float64)
    frequency = place.unsqueeze(-1)
    cosines = torch.cos(math.pi / (2 * side) * (2 * place + 1) * frequency)
    scale = torch.where(frequency > 0, math.sqrt(2 / side), math.sqrt(1 / side))
    matrix = (cosines * scale * 2.0**_MATRIX_BITS).round_()
    return (matrix if is_inverse else matrix.t()).contiguous().to(device)
