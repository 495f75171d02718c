"""Every size formula, once: how many bytes a message of so many entries takes.

Value codes: "float32" sends values as they are, 4 bytes each. A float64 gradient is not rounded by it:
its values travel in their own 8 bytes, and are counted so.
"""

import torch
from torch import Tensor

from regtopk.errors import ArgumentError

VALUE_CODES = ("float32",)


def check_value_code(value_code: str) -> str:
    """Refuse an unknown value code."""
    if value_code not in VALUE_CODES:
        raise ArgumentError(
            f"value_code must be one of {', '.join(VALUE_CODES)}, got {value_code!r}"
        )
    return value_code


def value_bytes(count: Tensor, dtype: torch.dtype, value_code: str) -> Tensor:
    """Bytes of `count` values under a code."""
    check_value_code(value_code)
    return count * (8 if dtype == torch.float64 else 4)


def index_bytes(count: Tensor, numel: int) -> Tensor:
    """Bytes of `count` indices into a vector of `numel` entries."""
    return count * (4 if numel <= 2**31 else 8)
