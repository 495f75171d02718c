"""The names of value and index codes, and every size formula, once.

docs/wire-format.md says what they mean. Users choose from `VALUE_CODES`.
"""

import math
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.blocks import BLOCK, NUM_SCALES, dequantise, to_symbols
from regtopk.core.options import check_choice
from regtopk.errors import ArgumentError

IntOrTensor = TypeVar("IntOrTensor", int, Tensor)

VALUE_CODES = ("float32", "bfloat16", "float16", "int8", "4bit", "2bit", "sign")
INDEX_CODES = ("elias-fano", "rice", "raw32")

HEADER_WORDS = 8
MAX_NUMEL = 2**40
MAX_FIELD_BITS = 32  # a field then never spans more than two words
VALUE_BITS = {  # "none": indices alone
    "none": 0, "float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "4bit": 4, "2bit": 2,
    "sign": 1,
}  # fmt: skip
_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def check_index_code(index_code: str, numel: int | None = None) -> str:
    """Refuse an unknown index code, or one that cannot hold indices below `numel`."""
    check_choice("index_code", index_code, INDEX_CODES)
    largest = 2**32 if index_code == "raw32" else MAX_NUMEL
    if numel is not None and not 0 <= numel <= largest:
        raise ArgumentError(f"numel must be in 0..{largest} with index_code {index_code!r}, got {numel}")
    return index_code


def is_lossless(value_code: str) -> bool:
    """Whether values travel as they are."""
    return value_code == "float32"


def wire_code(dtype: torch.dtype, value_code: str) -> str:
    """The code a frame names: float64 values that are not to be rounded travel as "float64"."""
    return "float64" if is_lossless(value_code) and dtype == torch.float64 else value_code


def quantise(values: Tensor, code: str, count: Tensor | None = None) -> Tensor:
    """The values as the receiver will see them: what a code loses is lost here.

    Idempotent, odd, zero for zero (but for "sign", which has none), and finite for finite values (too large
    ones saturate). NaN and inf stay, so that `wire.encode` notices them: a residual + gradient that
    overflowed must not travel as the largest number of a code. Blocks run along the last dimension from
    its start. Entries from ``count`` on, (...,) int64, are padding: it does not affect the other entries, and
    comes back as zero if the code has blocks.
    """
    if is_lossless(code):
        return values
    if (programs := kernels.block_programs(values, code, values.dtype)) is not None:
        rounded: Tensor = programs.quantise(values, VALUE_BITS[code], count)
        return rounded
    single_max = torch.finfo(torch.float32).max
    single = values.clamp(-single_max, single_max).float()
    if code in _HALF:
        largest = torch.finfo(_HALF[code]).max
        coded = single.clamp(-largest, largest).to(_HALF[code]).to(values.dtype)
    else:
        coded = dequantise(*to_symbols(single, code, count), code).to(values.dtype)
    coded = coded.where(values.abs() < torch.inf, values)
    if count is None or code in _HALF:
        return coded
    return coded.masked_fill(torch.arange(coded.shape[-1], device=coded.device) >= count[..., None], 0.0)


class IndexLayout(NamedTuple):
    """How `count` ascending indices below J are laid out: fields of a fixed width, and unary bits."""

    is_bitmap: Tensor
    width: Tensor
    field_words: Tensor
    unary_bits: Tensor


def index_layout(count: Tensor, numel: int, index_code: str, indices: Tensor | None = None) -> IndexLayout:
    """Sizes of the two sections of an index code, for counts, int64, of any shape.

    Only rice looks at the ``indices``, (..., m), which ascend up to count. Without them its unary bits are
    the most it can take, k + ((J - k) >> width).
    """
    check_index_code(index_code, numel)
    if index_code == "raw32":
        zero = torch.zeros_like(count)
        return IndexLayout(zero.bool(), zero + 32, count, zero)
    spread = (numel - count if index_code == "rice" else numel) // count.clamp(min=1)
    width = (torch.frexp(spread.double()).exponent.long() - 1).clamp(0, MAX_FIELD_BITS)
    field_words = num_words(count * width)
    if index_code == "rice":
        unary_bits = count + _unary_of_gaps(count, numel, width, indices)
        return IndexLayout(torch.zeros_like(count, dtype=torch.bool), width, field_words, unary_bits)
    unary_bits = (count + ((numel - 1) >> width)) * (count > 0)
    is_bitmap = num_words(numel) < field_words + num_words(unary_bits)
    is_split = ~is_bitmap
    unary_bits = torch.where(is_bitmap, numel, unary_bits)
    return IndexLayout(is_bitmap, width * is_split, field_words * is_split, unary_bits)


def _unary_of_gaps(count: Tensor, numel: int, width: Tensor, indices: Tensor | None) -> Tensor:
    most = ((numel - count) >> width) * (count > 0)
    if indices is None:
        return most
    is_valid = torch.arange(indices.shape[-1], device=indices.device) < count[..., None]
    gaps = indices.diff(dim=-1, prepend=indices.new_full((*indices.shape[:-1], 1), -1)) - 1
    found = ((gaps >> width[..., None]) * is_valid).sum(-1)
    return found.minimum(most).clamp(min=0)  # indices that break the contract take no memory


def scale_words(count: IntOrTensor, code: str) -> IntOrTensor:
    """32-bit words of the scales of `count` values; 0 if the code has no blocks."""
    return NUM_SCALES.get(code, 0) * ((count + BLOCK - 1) // BLOCK)


def value_words(count: IntOrTensor, code: str) -> IntOrTensor:
    """32-bit words of `count` values under a wire code, scales included."""
    return scale_words(count, code) + num_words(count * VALUE_BITS[code])


def message_bytes(
    count: Tensor,
    numel: int,
    *,
    dtype: torch.dtype,
    value_code: str,
    index_code: str = "elias-fano",
    indices: Tensor | None = None,
) -> Tensor:
    """Bytes of sparse messages of (...,) entries, frame included: exactly what `wire.encode` makes."""
    layout = index_layout(count, numel, index_code, indices)
    words = layout.field_words + num_words(layout.unary_bits)
    return 4 * (HEADER_WORDS + words + value_words(count, wire_code(dtype, value_code)))


def longest_message_bytes(numel: int) -> int:
    """More bytes than any message of a vector of J entries takes, in any code: a bound, not a size.

    A value takes up to 8 bytes and its index up to 8. Unary parts take up to 2 bits per entry of the vector,
    and scales 8 bytes per 128 values.
    """
    return 128 + 17 * numel


@lru_cache(maxsize=1024)
def full_message_bytes(
    count: int, numel: int, *, dtype: torch.dtype, value_code: str, index_code: str
) -> int:
    """`message_bytes` of one count as a Python number, cached; of "rice" if entries are spread at random."""
    counts = torch.tensor(count)
    size = int(message_bytes(counts, numel, dtype=dtype, value_code=value_code, index_code=index_code))
    if index_code != "rice" or not count:
        return size
    # a gap is geometric: as many unary bits as are expected take the place of the most there can be
    layout = index_layout(counts, numel, index_code)
    beyond = (1 - count / numel) ** (1 << int(layout.width))
    unary_bits = count + math.ceil(count * beyond / (1 - beyond))
    return size + 4 * (num_words(unary_bits) - int(num_words(layout.unary_bits)))


def segment_bytes(count: IntOrTensor, *, dtype: torch.dtype, value_code: str) -> IntOrTensor:
    """Bytes of a dense message of `count` values without indices, frame included."""
    return 4 * (HEADER_WORDS + value_words(count, wire_code(dtype, value_code)))


def num_words(bits: IntOrTensor) -> IntOrTensor:
    """How many 32-bit words hold so many bits."""
    return (bits + 31) // 32
