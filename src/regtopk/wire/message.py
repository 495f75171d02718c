"""Messages: a frame, the values, and the indices (docs/wire-format.md).

`encode` and `decode` handle a message; `decode_rows` and `decode_segment` handle what a collective brings, on
its device and without reading anything back: what is wrong is returned as a status, for one
`raise_for_status` where the host next waits anyway.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core import codes
from regtopk.core.blocks import NUM_SCALES
from regtopk.core.sparse import SparseGradient
from regtopk.errors import ArgumentError, WireFormatError
from regtopk.wire import frame
from regtopk.wire.bits import reinterpret
from regtopk.wire.indices import are_in_order, layout_of_count, pack_indices, unpack_indices
from regtopk.wire.values import pack_values, unpack_values

_VALUE_CODES = {number: code for code, number in frame.VALUE_IDS.items()}
_INDEX_CODES = {number: code for code, number in frame.INDEX_IDS.items() if code != "dense"}
_INDEX_CODES[frame.INDEX_IDS["bitmap"]] = "elias-fano"  # which is sent as a bitmap where that is smaller


def encode(sparse: SparseGradient, index_code: str = "elias-fano") -> Tensor:
    """One worker's message, or a batch of equally long ones, as bytes (..., num_bytes) uint8.

    The values must lie on the grid of their code. With padding or "rice" the lengths of a batch would differ:
    then there must be no leading dimensions (`encode_rows` takes such), and numbers are read back from the
    device. Indices that are not ascending and distinct, and values that are not finite (residual + gradient
    may overflow), are marked in the frame, and every receiver refuses the message.
    """
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
    settings = sparse.numel, index_code, codes.wire_code(values.dtype, sparse.code)
    if index_code == "rice":
        return encode_rows(replace(sparse, indices=indices[None], values=values[None], count=None), "rice")[0]
    (message,) = kernels.repeat(_encode, settings, (), (indices, values))
    return message


def _encode(
    numel: int, index_code: str, value_code: str, indices: Tensor, values: Tensor
) -> tuple[Tensor, ...]:
    *batch, count = indices.shape
    layout, size = layout_of_count(count, numel, index_code)
    kinds = frame.kinds_of("bitmap" if layout.is_bitmap else index_code, value_code)
    value_words = pack_values(values, value_code)
    if (programs := kernels.message_programs(indices, index_code)) is not None:
        num_field_words = int(layout.field_words)
        sizes = bool(layout.is_bitmap), int(layout.width), num_field_words, size - num_field_words
        num_rows = math.prod(batch)  # not -1: there may be no entries
        rows = (t.reshape(num_rows, t.shape[-1]).contiguous() for t in (indices, values, value_words))
        words = programs.write_messages(*rows, sizes, {**frame.NUMBERS, "KINDS": kinds, "numel": numel})
        return (reinterpret(words, torch.uint8).view(*batch, -1),)
    start = frame.make_frame(values, numel, count, kinds, are_in_order(indices, numel))
    return (frame.seal([start, value_words, pack_indices(indices, layout, size, index_code)]),)


def encode_rows(sparse: SparseGradient, index_code: str = "elias-fano") -> tuple[Tensor, Tensor]:
    """The messages of rows (N, m) with a count for each, as bytes one after another, and their sizes (N,).

    They are what `encode` makes of each row, in as many operations as of one. Two numbers are read back.
    """
    (indices, values), count, numel = sparse.without_padding(), sparse.counts, sparse.numel
    value_code = codes.wire_code(values.dtype, sparse.code)
    layout = codes.index_layout(count, numel, index_code, indices)
    index_words = layout.field_words + codes.num_words(layout.unary_bits)
    kind, bitmap_kind = (frame.kinds_of(code, value_code) for code in (index_code, "bitmap"))
    kinds = torch.where(layout.is_bitmap, bitmap_kind, kind)
    start = frame.make_frame(values, numel, count, kinds, are_in_order(indices, numel, sparse.is_valid))
    value_words = pack_values(values, value_code, count)
    columns, size = codes.IndexLayout(*(part.unsqueeze(-1) for part in layout)), int(index_words.max())
    packed = pack_indices(indices, columns, size, index_code, sparse.is_valid)
    num_scales = codes.scale_words(indices.shape[-1], value_code)
    sections = (
        (codes.HEADER_WORDS, torch.full_like(count, codes.HEADER_WORDS)),
        (num_scales, codes.scale_words(count, value_code)),
        (value_words.shape[-1] - num_scales, codes.num_words(count * codes.VALUE_BITS[value_code])),
        (size, index_words),
    )
    places = [torch.arange(capacity, device=count.device) < num.unsqueeze(-1) for capacity, num in sections]
    is_sent = torch.cat(places, dim=-1)
    return frame.seal([start, value_words, packed], is_sent), 4 * is_sent.sum(-1)


def encode_segment(values: Tensor, code: str = "float32") -> Tensor:
    """Dense values (..., m) on the grid of a code, without indices, as bytes (..., num_bytes)."""
    value_code = codes.wire_code(values.dtype, code)
    size = values.shape[-1]
    start = frame.make_frame(values, size, size, frame.kinds_of("dense", value_code))
    return frame.seal([start, pack_values(values, value_code)])


def decode(message: Tensor, numel: int) -> SparseGradient:
    """The sparse gradient in one message (num_bytes,) uint8, of a vector of `numel` entries.

    Raises `WireFormatError` if the message is damaged, truncated, of another format or of another J. Every
    length is checked before anything is allocated for it.
    """
    if message.dim() != 1:
        raise ArgumentError(f"message must have shape (num_bytes,), got {tuple(message.shape)}")
    words = frame.to_words(message).unsqueeze(0)
    index_id, value_id = message[5:7].tolist()
    if index_id not in _INDEX_CODES or value_id not in _VALUE_CODES:
        raise WireFormatError(f"codes of a message must be known, got {index_id} and {value_id}")
    index_code, value_code = _INDEX_CODES[index_id], _VALUE_CODES[value_id]
    try:
        codes.check_index_code(index_code, numel)
    except ArgumentError as error:
        raise WireFormatError(f"index code of a message must hold indices below J: {error}") from None
    header = frame.check_frame(words, numel, numel, index_code, value_code)
    _raise_if(header.status)
    # As algorithms call it: float64 is how float32 travels where gradients are float64.
    dtype, code = (torch.float64, "float32") if value_code == "float64" else (torch.float32, value_code)
    capacity = int(header.num_entries)
    *entries, _, status, end = _decode_body(words, header, numel, capacity, index_code, value_code, dtype)
    _raise_if(status)
    if int(end) != words.shape[-1]:
        raise WireFormatError(f"message must be {4 * int(end)} bytes long, got {4 * words.shape[-1]}")
    indices, values = (rows[0] for rows in entries)
    return SparseGradient(indices, values, numel, code=code)


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
        index_code, value_code: the codes expected of all.
        dtype: of the values: float32, or float64 where the gradients are.

    Returns:
        (N, capacity) entries with a count for each row, and a status (N,) int64: 0, or one bit for each of
        `REASONS`. A row that is not in order counts no entries.
    """
    codes.check_index_code(index_code, numel)
    settings = numel, capacity, index_code, codes.wire_code(dtype, value_code), dtype
    indices, values, count, status = kernels.repeat(_decode_rows, settings, (), (frame.to_words(messages),))
    return SparseGradient(indices, values, numel, count, value_code), status


def _decode_rows(
    numel: int, capacity: int, index_code: str, value_code: str, dtype: torch.dtype, words: Tensor
) -> tuple[Tensor, ...]:
    if (programs := kernels.message_programs(words, index_code)) is None:
        header = frame.check_frame(words, numel, capacity, index_code, value_code)
        return _decode_body(words, header, numel, capacity, index_code, value_code, dtype)[:4]
    words = words.contiguous()
    known = {
        **frame.NUMBERS,
        "VALUE_ID": frame.VALUE_IDS[value_code],
        "VALUE_BITS": codes.VALUE_BITS.get(value_code, 0),
        "NUM_SCALES": NUM_SCALES.get(value_code, 0),
        "HAS_FLOATS": value_code == "float32" and dtype == torch.float32,
        "numel": numel,
        "capacity": capacity,
        "most": min(numel, capacity),
    }
    facts, are_bad = programs.read_frames(words, known)
    values = None
    if not known["HAS_FLOATS"]:
        values, are_sound = unpack_values(words, facts[0], capacity, value_code, dtype)
        are_bad = (~are_sound).long()
    entries: tuple[Tensor, ...] = programs.read_entries(words, facts, are_bad, values, known)
    return entries


def decode_segment(
    messages: Tensor, size: int, code: str = "float32", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Dense values (..., size) of messages (..., num_bytes), zero in bad ones, and a status (...,)."""
    words = frame.to_words(messages)
    value_code = codes.wire_code(dtype, code)
    count, status, _ = frame.check_frame(words, size, size, "dense", value_code)
    values, is_sound = unpack_values(words, count, size, value_code, dtype)
    is_full = (count == size) | (status != 0)  # what else is wrong explains it
    status = status + frame.status_of(values=is_sound, count=is_full)
    return values.masked_fill((status != 0).unsqueeze(-1), 0), status


def _raise_if(status: Tensor) -> None:
    if bits := int(status):
        raise WireFormatError(f"message is refused: {frame.reasons(bits)}")


def _decode_body(
    words: Tensor,
    header: frame.Header,
    numel: int,
    capacity: int,
    index_code: str,
    value_code: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Indices and values, (..., capacity), counts and statuses, and the words behind the messages, (...,)."""
    count, status, _ = header
    values, values_are_sound = unpack_values(words, count, capacity, value_code, dtype)
    start = codes.HEADER_WORDS + codes.value_words(count, value_code)
    indices, indices_are_sound, end = unpack_indices(words, start, header, numel, capacity, index_code)
    is_whole = (end <= words.shape[-1]) | (status & frame.BITS["length"] != 0)  # once is enough
    status = status + frame.status_of(indices=indices_are_sound, values=values_are_sound, length=is_whole)
    count = count * (status == 0)
    is_padding = torch.arange(capacity, device=words.device) >= count.unsqueeze(-1)
    return indices.masked_fill(is_padding, 0), values.masked_fill(is_padding, 0), count, status, end
