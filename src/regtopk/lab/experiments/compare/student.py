"""Student's t, for intervals of a mean over few seeds."""

import math
from functools import cache

_SHARE = 0.95  # how often an interval holds the true mean


@cache
def student_t(num_free: int) -> float:
    """The t that |T| stays below with a probability of 95 %.

    Args:
        num_free: degrees of freedom of T, >= 1: for a mean of n differences, n - 1.
    """
    low, high = 0.0, math.pi / 2
    while low < (angle := (low + high) / 2) < high:  # halved down to the last bit
        low, high = (angle, high) if _share_below(angle, num_free) < _SHARE else (low, angle)
    return math.sqrt(num_free) * math.tan(low)


def _share_below(angle: float, num_free: int) -> float:
    """P(|T| < sqrt(num_free) tan(angle)), by a finite series (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    is_odd = num_free % 2
    sine, cosine = math.sin(angle), math.cos(angle)
    total, term = 0.0, cosine if is_odd else 1.0
    for power in range(is_odd, num_free - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cosine**2
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
