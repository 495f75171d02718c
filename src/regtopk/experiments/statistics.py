"""Means, spreads, and paired differences with an interval."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

# Student's t, two-sided 95 %, for 1, 2, 3, ... degrees of freedom
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation over seeds; no deviation of a single one."""
    return fmean(values), stdev(values) if len(values) > 1 else None


def paired_difference(values: Sequence[float], base: Sequence[float]) -> dict[str, float | None]:
    """Mean of value - base, seed by seed, and its 95 % interval by Student's t (None of a single seed)."""
    differences = [value - other for value, other in zip(values, base, strict=True)]
    mean = fmean(differences)
    if len(differences) < 2:
        return {"mean": mean, "low": None, "high": None}
    t = _T[len(differences) - 2] if len(differences) - 2 < len(_T) else 1.96
    margin = t * stdev(differences) / math.sqrt(len(differences))
    return {"mean": mean, "low": mean - margin, "high": mean + margin}
