"""Index codes: ascending distinct indices as fields of a fixed width and unary bits (docs/wire-format.md).

All codes are these two sections, so one decoder serves them.
"""

from functools import lru_cache

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.codes import IndexLayout, index_layout, num_words
from regtopk.wire import bits
from regtopk.wire.frame import Header


def pack_indices(
    indices: Tensor, layout: IndexLayout, size: int, index_code: str, is_valid: Tensor | None = None
) -> Tensor:
    """The words, (..., size) int32, of the fields and of the unary bits behind them, followed by zeros.

    Indices, (..., k), are ascending and distinct where they are valid; None: all are. The layout is one for
    all rows, or has a column for each, (..., 1).
    """
    has_unary, has_gaps = index_code != "raw32", index_code == "rice"
    if (loops := kernels.index_loops(indices)) is not None:
        rows = indices.view(-1, indices.shape[-1])
        count = torch.tensor(indices.shape[-1]) if is_valid is None else is_valid.sum(-1)
        sizes = count, layout.width, layout.field_words, layout.is_bitmap
        columns = (size.expand(len(rows)) if size.dim() == 0 else size.flatten() for size in sizes)
        packed: Tensor = loops.pack_indices(rows, *columns, has_unary, has_gaps, size)
        return packed.view(*indices.shape[:-1], size)
    place = torch.arange(indices.shape[-1], device=indices.device)
    numbers = indices
    if has_gaps:
        before = indices.new_full((*indices.shape[:-1], 1), -1)
        numbers = indices.diff(dim=-1, prepend=before) - 1
    fields, high = numbers & ((1 << layout.width) - 1), numbers >> layout.width
    ones = torch.ones_like(indices)
    if is_valid is not None:
        fields, ones = fields * is_valid, ones * is_valid
    # Two words more: a broken contract must not write out of bounds. The frame then says so.
    words = torch.zeros(*indices.shape[:-1], size + 2, dtype=torch.int64, device=indices.device)
    bits.add_fields_(words, (place * layout.width).expand_as(fields), fields)
    if has_unary:
        high = high.cumsum(-1) if has_gaps else high
        bits.add_fields_(words, 32 * layout.field_words + high + place * ~layout.is_bitmap, ones)
    return words[..., :size].to(torch.int32)


def unpack_indices(
    words: Tensor, start: Tensor, header: Header, numel: int, capacity: int, index_code: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Indices (..., capacity), whether they are sound (...,), and the word behind them (...,).

    Each row of words (..., w) has its own start and header, (...,). "elias-fano" includes the bitmap.
    """
    count, _, layout = header
    assert layout is not None
    middle = start + layout.field_words
    end = middle + num_words(layout.unary_bits)
    has_loop, has_gaps = index_code != "raw32" and words.dim() == 2, index_code == "rice"
    if has_loop and (loops := kernels.index_loops(words)) is not None:
        inside = _words_inside(words, middle, layout.unary_bits)
        sizes = layout.width, layout.field_words, inside, layout.is_bitmap
        indices, is_sound, bits_read = loops.unpack_indices(
            words, start, count, *sizes, has_gaps, numel, capacity
        )
        return indices, is_sound, middle + num_words(bits_read) if has_gaps else end
    place = torch.arange(capacity, device=words.device)
    is_valid = place < count.unsqueeze(-1)
    width = layout.width.unsqueeze(-1)
    field = bits.read_fields(words, start.unsqueeze(-1), width, capacity)
    if index_code == "raw32":
        return field, are_in_order(field, numel, is_valid), end
    position, num_ones = _find_ones(words, middle, layout.unary_bits, capacity, numel)
    high = position - place * ~layout.is_bitmap.unsqueeze(-1)
    if has_gaps:
        field = (field * is_valid).cumsum(-1) + place
        last = torch.nn.functional.pad(position + 1, (1, 0)).gather(-1, count.unsqueeze(-1)).squeeze(-1)
        end = middle + num_words(last)
    indices = (high << width) + field
    return indices, are_in_order(indices, numel, is_valid) & (num_ones == count), end


def _words_inside(words: Tensor, start: Tensor, num_bits: Tensor) -> Tensor:
    """How many words so many bits take, as far as the row goes, (...,)."""
    return num_words(num_bits).minimum(words.shape[-1] - start).clamp(min=0)


def _find_ones(
    words: Tensor, start: Tensor, num_bits: Tensor, capacity: int, numel: int
) -> tuple[Tensor, Tensor]:
    """Where the ones of the unary bits stand, (..., capacity), and how many there are, (...,)."""
    num = num_words(max_unary_bits(capacity, numel))
    is_behind = torch.arange(num, device=words.device) >= _words_inside(words, start, num_bits).unsqueeze(-1)
    section = bits.take_words(words, start.unsqueeze(-1), num).masked_fill_(is_behind, 0)
    ones = bits.unpack(section, 1)
    slot = ones.cumsum(-1)
    num_ones = slot[..., -1].clone()
    slot.masked_fill_(ones == 0, 0).clamp_(max=capacity + 1)  # zeros go to slot 0, ones too many to the last
    position = torch.zeros(*slot.shape[:-1], capacity + 2, dtype=torch.int64, device=words.device)
    position.scatter_(-1, slot, torch.arange(32 * num, device=words.device).expand(slot.shape))
    return position[..., 1:-1], num_ones


def max_unary_bits(capacity: int, numel: int) -> int:
    """A bound on the unary bits of any code with up to `capacity` indices.

    elias-fano and rice take fewer than 3 k bits, or k + 2^8 where the width is at its cap of 32; the bitmap
    takes J, and is used only where J is below 4 k or a few words.
    """
    may_be_bitmap = numel <= 4 * capacity + 512
    return max(3 * capacity, numel * may_be_bitmap) + 512


def are_in_order(indices: Tensor, numel: int, is_valid: Tensor | None = None) -> Tensor:
    """Whether indices (..., m) that are not padding ascend without repeating, from 0 to below J: (...,)."""
    is_rising = indices.diff(dim=-1) > 0
    is_inside = (indices >= 0) & (indices < numel)
    if is_valid is not None:
        is_rising, is_inside = is_rising | ~is_valid[..., 1:], is_inside | ~is_valid
    return is_rising.all(-1) & is_inside.all(-1)


@lru_cache(maxsize=1024)
def layout_of_count(count: int, numel: int, index_code: str) -> tuple[IndexLayout, int]:
    """The layout of so many indices, and the words they take; not for "rice"."""
    layout = index_layout(torch.tensor(count), numel, index_code)
    return layout, int(layout.field_words + num_words(layout.unary_bits))
