"""How the loops of the CPU kernels are compiled by numba, and how they read 16-bit floats."""

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


@compiled
def from_float16(word: Any) -> Any:
    """The float32 of the same value."""
    magnitude = np.uint32(np.uint32(word) & np.uint32(0x7FFF))
    # moving the exponent from 5 to 8 bits multiplies by 2^-112; exact for denormals too
    shifted = np.uint32(magnitude << np.uint32(13)).view(np.float32)
    bits = np.float32(shifted * np.float32(2.0**112)).view(np.uint32)
    if magnitude >= np.uint32(0x7C00):  # inf or NaN
        bits = np.uint32(bits | np.uint32(0x7F800000))
    sign = np.uint32((np.uint32(word) & np.uint32(0x8000)) << np.uint32(16))
    return np.uint32(bits | sign).view(np.float32)
