"""How the loops of the CPU kernels are compiled by numba, and how they read bfloat16."""

from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]


def compiled(function: Any) -> Any:
    """The function compiled by numba, once for all processes if there is a place to keep it."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba can write neither beside this file nor below HOME
        return njit(nogil=True)(function)


@compiled
def from_bfloat16(word: Any) -> Any:
    """The float32 of the same value."""
    return np.uint32(np.uint32(word) << np.uint32(16)).view(np.float32)
