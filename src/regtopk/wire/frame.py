"""The frame of a message: how it is made, and how it is checked (docs/wire-format.md)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regtopk.core.blocks import BLOCK
from regtopk.core.codes import HEADER_WORDS, MAX_FIELD_BITS, IndexLayout, index_layout, num_words, value_words
from regtopk.errors import ArgumentError, WireFormatError
from regtopk.wire.bits import reinterpret

MAGIC = int.from_bytes(b"RTKG", "little")
VERSION = 1
INDEX_IDS = {"dense": 0, "elias-fano": 1, "bitmap": 2, "rice": 3, "raw32": 4}
_BY_ID = ("none", "float32", "float64", "bfloat16", "float16", "int8", "4bit", "2bit", "sign")
VALUE_IDS = {code: number for number, code in enumerate(_BY_ID)}

# What can be wrong with a message; bit i of a status stands for entry i.
REASONS = {
    "magic": "magic must be 'RTKG'",
    "version": f"version must be {VERSION}",
    "codes": "index and value codes must be those expected",
    "numel": "numel must be the J expected",
    "count": "count must be in 0..J and within the capacity",
    "length": "length must be what count and codes ask for",
    "checksum": "checksum must be that of the words",
    "indices": "indices must be below J, ascending and distinct",
    "values": "values and scales must be finite",
    "indices_sent": "the sender's indices must be below J, ascending and distinct (count is -1)",
    "values_sent": "the sender's values must be finite (count is -2: its residual + gradient has overflowed, "
    "or it has refused a message itself)",
}
BITS = {reason: 1 << i for i, reason in enumerate(REASONS)}

# In the place of the count: the sender itself says that nobody can use its entries.
_COUNT_OF_BAD_INDICES, _COUNT_OF_BAD_VALUES = -1, -2

# What programs that write and read whole messages know of the format.
NUMBERS = {
    "MAGIC": MAGIC,
    "VERSION": VERSION,
    "ELIAS_FANO_ID": INDEX_IDS["elias-fano"],
    "BITMAP_ID": INDEX_IDS["bitmap"],
    "VALUE_BLOCK": BLOCK,
    "MAX_FIELD_BITS": MAX_FIELD_BITS,
    "COUNT_OF_BAD_INDICES": _COUNT_OF_BAD_INDICES,
    "COUNT_OF_BAD_VALUES": _COUNT_OF_BAD_VALUES,
    **{f"BAD_{reason.upper()}": bit for reason, bit in BITS.items()},
}


class Header(NamedTuple):
    """What frames say, each (...,). The number of entries is within bounds even if the status is not 0."""

    num_entries: Tensor
    status: Tensor
    layout: IndexLayout | None  # None for dense segments


def raise_for_status(status: Tensor, ranks: Sequence[int] | None = None) -> None:
    """Raise what is wrong with the first bad message, (..., N), if there is one. Reads the status once.

    `ranks` is what the N ranks are called; None: 0 to N - 1.
    """
    names = ranks or range(status.shape[-1] if status.dim() else 1)
    for number, bits in enumerate(status.flatten().tolist()):
        if bits:
            raise WireFormatError(f"message of rank {names[number % len(names)]} is refused: {reasons(bits)}")


def reasons(bits: int) -> str:
    """What the bits of one status say."""
    return "; ".join(text for reason, text in REASONS.items() if bits & BITS[reason])


def make_frame(
    values: Tensor, numel: int, count: int | Tensor, kinds: int | Tensor, is_ascending: Tensor | None = None
) -> Tensor:
    """The frame's words (..., 8), its checksum still zero.

    Rows whose indices do not ascend, or whose values are not finite, are marked in the place of the count:
    receivers refuse them. The sender does not do so itself: it would have to wait for its device.
    """
    is_finite = torch.isfinite(values).all(-1)
    is_ascending = torch.ones_like(is_finite) if is_ascending is None else is_ascending
    frame = torch.zeros(*is_finite.shape, 4, dtype=torch.int64, device=is_finite.device)
    # Filled in by slices: a tensor from a list, or a number for a single entry, waits for the device.
    frame[..., :1] = MAGIC | (kinds if isinstance(kinds, int) else kinds.unsqueeze(-1)) << 32
    frame[..., 1:2] = numel
    frame[..., 2] = torch.where(is_ascending, count, _COUNT_OF_BAD_INDICES).where(
        is_finite, _COUNT_OF_BAD_VALUES
    )
    return reinterpret(frame, torch.int32)


def kinds_of(index_code: str, value_code: str) -> int:
    """The frame's second word."""
    return VERSION | INDEX_IDS[index_code] << 8 | VALUE_IDS[value_code] << 16


def seal(sections: list[Tensor], is_sent: Tensor | None = None) -> Tensor:
    """A frame and the sections behind it as bytes (..., num_bytes), with their checksum.

    Where not all words are sent, those that are not must be zero. Rows are then joined to one, (num_bytes,).
    """
    words = torch.cat(sections, dim=-1)
    place = torch.arange(words.shape[-1], device=words.device) if is_sent is None else is_sent.cumsum(-1) - 1
    words[..., 6:8] = reinterpret(_checksum(words, place).unsqueeze(-1), torch.int32)
    return reinterpret(words if is_sent is None else words[is_sent], torch.uint8)


def _checksum(words: Tensor, place: Tensor) -> Tensor:
    """sum of (2 i + 3) word_i modulo 2^64, without the two words of the checksum: (...,) int64."""
    weight = 2 * place + 3
    weight[..., 6:8] = 0
    return (words * weight).sum(-1)


def to_words(messages: Tensor) -> Tensor:
    """Bytes (..., num_bytes) as words; refuses lengths no message has."""
    num_bytes = messages.shape[-1]
    if messages.dtype != torch.uint8:
        raise ArgumentError(f"messages must be uint8, got {messages.dtype}")
    if num_bytes < 4 * HEADER_WORDS or num_bytes % 4:
        raise WireFormatError(
            f"a message must have a multiple of 4 and at least {4 * HEADER_WORDS} bytes, got {num_bytes}"
        )
    return reinterpret(messages, torch.int32)


def check_frame(words: Tensor, numel: int, capacity: int, index_code: str, value_code: str) -> Header:
    """What each frame says, checked."""
    kinds = words[..., 1]
    found_numel, count, checksum = reinterpret(words[..., 2:8], torch.int64).unbind(-1)
    is_counted = (count >= 0) & (count <= min(numel, capacity))
    has_bad_indices, has_bad_values = count == _COUNT_OF_BAD_INDICES, count == _COUNT_OF_BAD_VALUES
    count = count * is_counted
    size = HEADER_WORDS + value_words(count, value_code)  # the fewest words it can take
    layout, index_id = None, torch.zeros_like(kinds)
    if index_code != "dense":
        layout = index_layout(count, numel, index_code)
        index_id = torch.where(layout.is_bitmap, INDEX_IDS["bitmap"], INDEX_IDS[index_code])
        unary_bits = count if index_code == "rice" else layout.unary_bits
        size = size + layout.field_words + num_words(unary_bits)
    status = status_of(
        magic=words[..., 0] == MAGIC,
        version=(kinds & 0xFF) == VERSION,
        codes=((kinds >> 8) == (index_id | VALUE_IDS[value_code] << 8)) | ~is_counted,
        numel=found_numel == numel,
        count=is_counted | has_bad_indices | has_bad_values,
        length=size <= words.shape[-1],
        checksum=checksum == _checksum(words, torch.arange(words.shape[-1], device=words.device)),
        indices_sent=~has_bad_indices,
        values_sent=~has_bad_values,
    )
    return Header(count, status, layout)


def status_of(**is_met: Tensor) -> Tensor:
    """The bits of the checks that failed, added up."""
    (first, *others) = (~met * BITS[reason] for reason, met in is_met.items())
    return sum(others, start=first)
