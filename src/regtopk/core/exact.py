"""Sums that do not depend on the order of addition: the same bits batched, single and on any device.

The floating-point sums of a batch (N, J) may differ in their last bits from the sum of one row, (J,). Sums of
integers do not. So numbers are first scaled by a power of two and rounded to integers.
"""

import torch
from torch import Tensor

SMALLEST_EXPONENT = -900  # below, entries count as zero


def exact_sum(x: Tensor) -> Tensor:
    """sum over the last dimension, (...,) float64, of finite numbers, rounded as by `to_integers`."""
    integers, unit = to_integers(x)
    return integers.sum(-1).double() * unit.squeeze(-1)


def to_integers(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as whole multiples of a unit: (..., J) int64, and each row's unit, (..., 1) float64.

    The unit is 2^-b of the power of two above the row's largest magnitude, b = 62 - the bits of J (38 with 24
    million entries), so that no sum of entries can overflow.
    """
    num_bits = 62 - x.shape[-1].bit_length()
    largest = x.abs().amax(-1, keepdim=True).double()
    exponent = torch.frexp(largest).exponent.clamp(min=SMALLEST_EXPONENT)
    integers = (x * power_of_two(num_bits - exponent)).round_().long()
    return integers, power_of_two(exponent - num_bits)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float64, exactly, for -1022..1023: `pow` need not be exact on every device."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)
