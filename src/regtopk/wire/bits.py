"""Bits and 32-bit words, on any device and with leading dimensions; nothing is read back to the host."""

import torch
from torch import Tensor

from regtopk.core.codes import num_words


def reinterpret(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits as numbers of another dtype, along the last dimension."""
    *batch, size = numbers.shape
    flat = numbers.flatten()
    is_aligned = flat.storage_offset() * flat.element_size() % dtype.itemsize == 0
    if flat.stride(0) != 1 or not is_aligned:  # torch only views aligned storage without gaps
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(dtype).view(*batch, size * numbers.element_size() // dtype.itemsize)


def pack(symbols: Tensor, width: int) -> Tensor:
    """Symbols (..., m) uint8 of 1, 2, 4 or 8 bits each, as words (..., w), zero-padded."""
    size = symbols.shape[-1]
    padded = torch.nn.functional.pad(symbols, (0, num_words(size * width) * 32 // width - size))
    groups = padded.view(*padded.shape[:-1], -1, 8 // width)  # what shares a byte
    packed = (groups << _shifts(width, symbols.device)).sum(-1, dtype=torch.uint8)
    return reinterpret(packed, torch.int32)


def unpack(words: Tensor, width: int) -> Tensor:
    """All symbols of 1, 2, 4 or 8 bits in words (..., w): (..., w 32 / width) uint8."""
    groups = reinterpret(words, torch.uint8).unsqueeze(-1) >> _shifts(width, words.device)
    return (groups & ((1 << width) - 1)).flatten(-2)


def add_fields_(words: Tensor, bit: Tensor, fields: Tensor) -> None:
    """Write integers (..., m) int64 below 2^32, each from its own bit (..., m) on, where words are zero.

    Words (..., w) are int64. What lies past them goes to the last two.
    """
    word, shifted = (bit >> 5).clamp(0, words.shape[-1] - 2), fields << (bit & 31)
    words.scatter_add_(-1, word, shifted & 0xFFFFFFFF)
    words.scatter_add_(-1, word + 1, shifted >> 32)


def read_fields(words: Tensor, start: Tensor, width: Tensor, num: int) -> Tensor:
    """The first `num` fields (..., num) int64 of each row's own start and width, (..., 1), 0..32.

    What lies past the words, (..., w), is arbitrary.
    """
    bit = torch.arange(num, device=words.device) * width
    word = start + (bit >> 5)
    last = words.shape[-1] - 1
    low = words.gather(-1, word.clamp(max=last)).long() & 0xFFFFFFFF
    high = words.gather(-1, (word + 1).clamp(max=last)).long() << 32
    return ((high | low) >> (bit & 31)) & ((1 << width) - 1)


def take_words(words: Tensor, start: Tensor, num: int) -> Tensor:
    """`num` words (..., num) of each row from its own start (..., 1); past the end they are arbitrary."""
    place = start + torch.arange(num, device=words.device)
    return words.gather(-1, place.clamp(max=words.shape[-1] - 1))


def _shifts(width: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, width, dtype=torch.uint8, device=device)
