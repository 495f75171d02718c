"""Messages: a frame that says what it holds, the values, and the indices.

The frame is 32 bytes, little-endian: magic (4), version (1), index code (1), value code (1), zero (1), J (8),
count (8), checksum (8). The checksum is the sum of (2 i + 3) · word_i modulo 2^64 over the 32-bit words of
the message, read as signed, without its own two: any change of one word, and of any two bits, changes it.

`encode` and `decode` handle a message; `decode_rows` and `decode_segment` handle what a collective brings, on
its device and without reading anything back: what is wrong is returned as a status, for one
`raise_for_status` where the host next waits anyway.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from regtopk.core.codes import (
    HEADER_WORDS,
    MAX_NUMEL,
    check_index_code,
    index_layout,
    num_words,
    value_words,
    wire_code,
)
from regtopk.core.sparse import SparseGradient
from regtopk.errors import ArgumentError, WireFormatError
from regtopk.wire.bits import reinterpret
from regtopk.wire.indices import pack_indices, unpack_indices
from regtopk.wire.values import pack_values, unpack_values

MAGIC = int.from_bytes(b"RTKG", "little")
VERSION = 1
INDEX_IDS = {"dense": 0, "elias-fano": 1, "bitmap": 2, "rice": 3, "raw32": 4}
VALUE_IDS = {
    "none": 0,
    "float32": 1,
    "float64": 2,
    "bfloat16": 3,
    "float16": 4,
    "int8": 5,
    "4bit": 6,
    "2bit": 7,
}

# What can be wrong with a message; bit i of a status stands for entry i.
REASONS = (
    "magic must be 'RTKG'",
    f"version must be {VERSION}",
    "index and value codes must be those expected",
    "numel must be the J expected",
    "count must be in 0..J and within the capacity (-1: the sender's entries were broken)",
    "length must be what count and codes ask for",
    "checksum must be that of the words",
    "indices must be below J, ascending and distinct",
    "values and scales must be finite",
)
_MAGIC, _VERSION, _CODES, _NUMEL, _COUNT, _LENGTH, _CHECKSUM, _INDICES, _VALUES = (
    1 << i for i in range(len(REASONS))
)


class _Body(NamedTuple):
    sparse: SparseGradient
    status: Tensor
    end: Tensor


def encode(sparse: SparseGradient, index_code: str = "elias-fano") -> Tensor:
    """One worker's message, or a batch of equally long ones, as bytes (..., num_bytes) uint8.

    Nothing is read back from the device, except one number where the length depends on values there:
    with "rice", and with padding. Indices that are not ascending and distinct, and values that are not
    finite, are marked in the frame and refused by every receiver.

    Args:
        sparse: values on the grid of its code. Leading dimensions are a batch; with padding or with
            "rice" the lengths would differ, so then there must be none.
        index_code: one of `INDEX_CODES`.

    Raises:
        ArgumentError: the code cannot hold J, or the batch is not of equal lengths.
    """
    check_index_code(index_code, sparse.numel)
    if sparse.indices.dim() > 1 and (sparse.count is not None or index_code == "rice"):
        raise ArgumentError(
            "sparse must have no leading dimensions where lengths may differ (padding or rice), "
            f"got indices of shape {tuple(sparse.indices.shape)}"
        )
    indices, values = sparse.indices, sparse.values
    if sparse.count is not None:
        num = int(sparse.count)
        indices, values = indices[:num], values[:num]
    if indices.shape[-1] > sparse.numel:
        raise ArgumentError(f"sparse must hold at most J = {sparse.numel} entries, got {indices.shape[-1]}")
    packed = pack_indices(indices, sparse.numel, index_code)
    unary = packed.unary
    if index_code == "rice":
        unary = unary[..., : num_words(int(packed.unary_bits))]
    value_code = wire_code(values.dtype, sparse.code)
    is_sound = _are_indices(indices, sparse.numel) & torch.isfinite(values).all(-1)
    frame = _frame(is_sound, sparse.numel, indices.shape[-1], packed.code, value_code)
    return _seal([frame, pack_values(values, value_code), packed.fields, unary])


def encode_segment(values: Tensor, code: str = "float32") -> Tensor:
    """Dense values (..., m) on the grid of a code, without indices, as bytes (..., num_bytes)."""
    value_code = wire_code(values.dtype, code)
    size = values.shape[-1]
    frame = _frame(torch.isfinite(values).all(-1), size, size, "dense", value_code)
    return _seal([frame, pack_values(values, value_code)])


def decode(message: Tensor, numel: int) -> SparseGradient:
    """The sparse gradient in one message (num_bytes,) uint8, of a vector of `numel` entries.

    Every length is checked before anything is allocated for it.

    Raises:
        WireFormatError: the message is damaged, truncated, of another format or of another J.
    """
    if message.dim() != 1 or not 0 <= numel <= MAX_NUMEL:
        raise ArgumentError(
            f"message must have shape (num_bytes,) and numel be in 0..{MAX_NUMEL}, "
            f"got {tuple(message.shape)} and {numel}"
        )
    words = _words(message).unsqueeze(0)
    index_id, value_id = message[5:7].tolist()
    index_code = {i: code for code, i in INDEX_IDS.items() if code != "dense"}.get(index_id)
    value_code = {i: code for code, i in VALUE_IDS.items()}.get(value_id)
    if index_code is None or value_code is None:
        raise WireFormatError(
            f"index and value codes of a message must be known, got {index_id} and {value_id}"
        )
    index_code = "elias-fano" if index_code == "bitmap" else index_code
    count, status = _check_header(words, numel, numel, index_code, value_code)
    raise_for_status(status)
    body = _decode_body(words, status, count, numel, int(count), index_code, value_code)
    raise_for_status(body.status)
    if int(body.end) != words.shape[-1]:
        raise WireFormatError(f"message must be {4 * int(body.end)} bytes long, got {4 * words.shape[-1]}")
    found = body.sparse
    return SparseGradient(found.indices[0], found.values[0], numel, code=found.code)


def decode_rows(
    messages: Tensor,
    numel: int,
    capacity: int,
    index_code: str = "elias-fano",
    value_code: str = "float32",
    dtype: torch.dtype = torch.float32,
) -> tuple[SparseGradient, Tensor]:
    """The sparse gradients of many messages, on their device and without reading anything back.

    Args:
        messages: (N, num_bytes) uint8; shorter ones followed by zeros up to the length of the longest.
        numel: J.
        capacity: the most entries a message may hold.
        index_code: the index code expected of all.
        value_code: the value code expected of all.
        dtype: of the values: float32, or float64 where the gradients are.

    Returns:
        (N, capacity) entries with a count for each row, and a status (N,) int64: 0, or one bit for each of
        `REASONS`. A row that is not in order counts no entries.

    Raises:
        WireFormatError: no message can have this length.
    """
    check_index_code(index_code, numel)
    words = _words(messages)
    value_code = wire_code(dtype, value_code)
    count, status = _check_header(words, numel, capacity, index_code, value_code)
    body = _decode_body(words, status, count, numel, capacity, index_code, value_code, dtype)
    return body.sparse, body.status


def decode_segment(
    messages: Tensor, size: int, code: str = "float32", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Dense values (..., size) of messages (..., num_bytes), zero in bad ones, and a status (...,)."""
    words = _words(messages)
    value_code = wire_code(dtype, code)
    count, status = _check_header(words, size, size, "dense", value_code)
    status = status | (count != size) * _COUNT
    start = torch.full_like(count, HEADER_WORDS)
    values, is_sound = unpack_values(words, start, count, size, value_code, dtype)
    status = status | ~is_sound * _VALUES
    return values.where((status == 0).unsqueeze(-1), 0), status


def raise_for_status(status: Tensor) -> None:
    """Raise what is wrong with the first bad row, if there is one. Reads the status back, once."""
    for rank, bits in enumerate(status.flatten().tolist()):
        if bits:
            reasons = [reason for i, reason in enumerate(REASONS) if bits >> i & 1]
            raise WireFormatError(f"message of rank {rank} is damaged: {'; '.join(reasons)}")


def _frame(is_sound: Tensor, numel: int, count: int, index_code: str, value_code: str) -> Tensor:
    """The frame's words (..., 8), its checksum still zero; a count of -1 marks entries not to be trusted."""
    kinds = VERSION | INDEX_IDS[index_code] << 8 | VALUE_IDS[value_code] << 16
    frame = torch.tensor([MAGIC | kinds << 32, numel, count, 0], device=is_sound.device)
    frame = frame.repeat(*is_sound.shape, 1)
    frame[..., 2] = frame[..., 2].where(is_sound, -1)
    return reinterpret(frame, torch.int32)


def _are_indices(indices: Tensor, numel: int) -> Tensor:
    is_rising = (indices.diff(dim=-1) > 0).all(-1)
    is_inside = ((indices >= 0) & (indices < numel)).all(-1)
    return is_rising & is_inside


def _seal(sections: list[Tensor]) -> Tensor:
    words = torch.cat(sections, dim=-1)
    words[..., 6:8] = reinterpret(_checksum(words).unsqueeze(-1), torch.int32)
    return reinterpret(words, torch.uint8)


def _checksum(words: Tensor) -> Tensor:
    """sum of (2 i + 3) word_i modulo 2^64, without the two words of the checksum: (...,) int64."""
    weight = 2 * torch.arange(words.shape[-1], device=words.device) + 3
    weight[6:8] = 0
    return (words * weight).sum(-1)


def _words(messages: Tensor) -> Tensor:
    """Bytes (..., num_bytes) as words; refuses lengths no message has."""
    num_bytes = messages.shape[-1]
    if messages.dtype != torch.uint8:
        raise ArgumentError(f"messages must be uint8, got {messages.dtype}")
    if num_bytes < 4 * HEADER_WORDS or num_bytes % 4:
        raise WireFormatError(
            f"a message must have a multiple of 4 and at least {4 * HEADER_WORDS} bytes, got {num_bytes}"
        )
    is_aligned = messages.storage_offset() % 4 == 0
    return reinterpret(messages if is_aligned else messages.clone(), torch.int32)


def _check_header(
    words: Tensor, numel: int, capacity: int, index_code: str, value_code: str
) -> tuple[Tensor, Tensor]:
    """What each frame says, checked: the count to go by (0 if anything is wrong) and the status."""
    kinds = words[..., 1]
    found_numel, count, checksum = reinterpret(words[..., 2:8], torch.int64).unbind(-1)
    is_counted = (count >= 0) & (count <= min(numel, capacity))
    count = count.where(is_counted, 0)
    index_id, size = _expected(count, numel, index_code, value_code)
    expected_kinds = VERSION | index_id << 8 | VALUE_IDS[value_code] << 16
    status = (words[..., 0] != MAGIC) * _MAGIC
    status = status | ((kinds & 0xFF) != VERSION) * _VERSION
    status = status | ((kinds >> 8) != (expected_kinds >> 8)) * _CODES
    status = status | (found_numel != numel) * _NUMEL
    status = status | ~is_counted * _COUNT
    status = status | (size > words.shape[-1]) * _LENGTH
    status = status | (checksum != _checksum(words)) * _CHECKSUM
    return count.where(status == 0, 0), status


def _expected(count: Tensor, numel: int, index_code: str, value_code: str) -> tuple[Tensor, Tensor]:
    """The index id a frame of so many entries must name, and the fewest words it can take."""
    size = HEADER_WORDS + value_words(count, value_code)
    if index_code == "dense":
        return torch.zeros_like(count), size
    layout = index_layout(count, numel, index_code)
    index_id = torch.where(layout.is_bitmap, INDEX_IDS["bitmap"], INDEX_IDS[index_code])
    unary_bits = count if index_code == "rice" else layout.unary_bits
    return index_id, size + layout.field_words + num_words(unary_bits)


def _decode_body(
    words: Tensor,
    status: Tensor,
    count: Tensor,
    numel: int,
    capacity: int,
    index_code: str,
    value_code: str,
    dtype: torch.dtype | None = None,
) -> _Body:
    start = torch.full_like(count, HEADER_WORDS)
    dtype = dtype or (torch.float64 if value_code == "float64" else torch.float32)
    values, values_are_sound = unpack_values(words, start, count, capacity, value_code, dtype)
    start = start + value_words(count, value_code)
    indices, indices_are_sound, end = unpack_indices(words, start, count, numel, capacity, index_code)
    status = status | ~indices_are_sound * _INDICES | ~values_are_sound * _VALUES
    status = status | (end > words.shape[-1]) * _LENGTH
    count = count.where(status == 0, 0)
    is_valid = torch.arange(capacity, device=words.device) < count.unsqueeze(-1)
    code = "float32" if value_code == "float64" else value_code
    sparse = SparseGradient(indices.where(is_valid, 0), values.where(is_valid, 0), numel, count, code)
    return _Body(sparse, status, end)
