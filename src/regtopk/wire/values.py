"""Values as words: plain numbers, or a symbol per value and the scales of each block."""

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.blocks import BLOCK, NUM_SCALES, dequantise, to_symbols
from regtopk.core.codes import HEADER_WORDS, VALUE_BITS, num_words, scale_words
from regtopk.wire import bits

_NUMBERS = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


def pack_values(values: Tensor, code: str, count: Tensor | None = None) -> Tensor:
    """Values (..., m) on the grid of a wire code, as words; lossless for those.

    Entries from ``count`` on, (...,), are zero and not sent: their words are for the caller to leave out.
    """
    if code == "none":
        return values.new_empty(*values.shape[:-1], 0, dtype=torch.int32)
    if code in _NUMBERS:
        numbers = values.to(_NUMBERS[code])
        if VALUE_BITS[code] == 16:
            numbers = torch.nn.functional.pad(numbers, (0, numbers.shape[-1] % 2))
        return bits.reinterpret(numbers, torch.int32)
    if (programs := kernels.block_programs(values, code, values.dtype)) is not None:
        words: Tensor = programs.pack(values, VALUE_BITS[code], count)
        return words
    symbols, scales = to_symbols(values, code, count)
    packed_scales = bits.reinterpret(scales.flatten(-2), torch.int32)
    return torch.cat([packed_scales, bits.pack(symbols, VALUE_BITS[code])], dim=-1)


def unpack_values(
    words: Tensor, count: Tensor, capacity: int, code: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The values (..., capacity) behind the frames of messages, and whether they are sound (...,).

    Rows of words (..., w) int32 may hold different numbers of values, count (...,); the rest is zero.
    """
    if code == "none":
        nothing = torch.zeros(*count.shape, capacity, dtype=dtype, device=words.device)
        return nothing, torch.ones_like(count, dtype=torch.bool)
    if capacity and (programs := kernels.block_programs(words, code, dtype)) is not None:
        found: tuple[Tensor, Tensor] = programs.unpack(words, count, capacity, VALUE_BITS[code], dtype)
        return found
    is_padding = torch.arange(capacity, device=words.device) >= count.unsqueeze(-1)
    num = num_words(capacity * VALUE_BITS[code])
    start = torch.full_like(count, HEADER_WORDS).unsqueeze(-1)
    if code in _NUMBERS:
        section = bits.take_words(words, start, num)
        values = bits.reinterpret(section, _NUMBERS[code])[..., :capacity].masked_fill(is_padding, 0)
        return values.to(dtype), torch.isfinite(values).all(-1)
    num_blocks = -(-capacity // BLOCK)
    section = bits.take_words(words, start, num_blocks * NUM_SCALES[code])
    scales = section.view(torch.float32).view(*count.shape, num_blocks, NUM_SCALES[code])
    first = torch.arange(0, num_blocks * BLOCK, BLOCK, device=words.device)
    scales.masked_fill_((first >= count.unsqueeze(-1)).unsqueeze(-1), 0.0)
    section = bits.take_words(words, start + scale_words(count, code).unsqueeze(-1), num)
    symbols = bits.unpack(section, VALUE_BITS[code])[..., :capacity]
    values = dequantise(symbols, scales, code).masked_fill(is_padding, 0)
    lo, hi = scales[..., 0], scales[..., -1]
    # The two scales of "sign", minus and plus, may come in any order.
    is_ordered = torch.isfinite(lo) & (hi >= 0) if code == "sign" else lo <= hi
    is_sound = (torch.isfinite(hi) & (lo >= 0) & is_ordered).all(-1)
    return values.to(dtype), is_sound
