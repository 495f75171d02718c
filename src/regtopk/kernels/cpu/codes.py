"""Index codes on the CPU, both ways: one loop where torch needs dozens of operations on 64-bit integers."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from regtopk.kernels.cpu.compiled import Array, compiled
from regtopk.kernels.cpu.threads import side_by_side


def pack_indices(
    indices: Tensor, count: Tensor, width: Tensor, field_words: Tensor, is_bitmap: Tensor,
    has_unary: bool, has_gaps: bool, size: int,
) -> Tensor:  # fmt: skip
    """The words (rows, size) int32 of indices (rows, k) int64 up to each row's count, followed by zeros."""
    words = np.zeros((indices.shape[0], size + 2), np.uint32)  # two more: as in `regtopk.wire.indices`
    columns = [column.tolist() for column in (count, width, field_words, is_bitmap)]
    rows = zip(indices.numpy(), *columns, words, strict=True)
    side_by_side(_pack_row, [(*row, has_unary, has_gaps) for row in rows])
    return torch.from_numpy(words.view(np.int32)[:, :size])


@compiled
def _pack_row(
    indices: Array, count: int, width: int, field_words: int, is_bitmap: bool, words: Array,
    has_unary: bool, has_gaps: bool,
) -> None:  # fmt: skip
    last, mask = words.size - 2, (1 << width) - 1
    before: Any = -1
    high: Any = 0
    for i in range(count):
        index: Any = indices[i]
        number = index - before - 1 if has_gaps else index
        first: Any = i * width
        field = np.uint64(number & mask) << np.uint64(first & 31)
        word = min(first >> 5, last)
        words[word] |= np.uint32(field & np.uint64(0xFFFFFFFF))
        words[word + 1] |= np.uint32(field >> np.uint64(32))
        if has_unary:
            high = (high if has_gaps else 0) + (number >> width)
            one: Any = 32 * field_words + high + (0 if is_bitmap else i)
            words[max(0, min(one >> 5, last))] |= np.uint32(1 << (one & 31))
        before = index


def unpack_indices(
    words: Tensor, start: Tensor, count: Tensor, width: Tensor, field_words: Tensor, unary_words: Tensor,
    is_bitmap: Tensor, has_gaps: bool, numel: int, capacity: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Indices (rows, capacity), arbitrary past the count; are they sound; and how many unary bits they took.

    Of each row of words, (rows, w) int32: the word its fields start at, which the unary bits follow, how many
    indices there are, the bits of a field, and the words of the fields and of the unary bits, all inside.
    Of rice, which has gaps, the unary bits may be fewer than these words hold.
    """
    indices = np.empty((count.numel(), capacity), np.int64)
    columns = [column.tolist() for column in (start, count, width, field_words, unary_words, is_bitmap)]
    rows = zip(words.numpy().view(np.uint32), *columns, indices, strict=True)
    found = torch.tensor(side_by_side(_unpack_row, [(*row, has_gaps, numel) for row in rows]))
    return torch.from_numpy(indices), found[:, 0] == 1, found[:, 1]


@compiled
def _unpack_row(
    words: Array, start: int, count: int, width: int, field_words: int, unary_words: int, is_bitmap: bool,
    indices: Array, has_gaps: bool, numel: int,
) -> tuple[int, int]:  # fmt: skip
    last, mask = words.size - 1, np.uint64((1 << width) - 1)
    before: Any = -1
    is_sound: Any = True
    num = num_bits = total = 0
    for w in range(unary_words):
        word = words[start + field_words + w]
        for bit in range(32 if word else 0):
            if (word >> np.uint32(bit)) & np.uint32(1) == 0:
                continue
            if num < count:
                first: Any = num * width
                low = np.uint64(words[min(start + (first >> 5), last)])
                high = np.uint64(words[min(start + (first >> 5) + 1, last)]) << np.uint64(32)
                field: Any = np.int64(((high | low) >> np.uint64(first & 31)) & mask)
                if has_gaps:
                    total += field
                    field = total + num
                index = ((32 * w + bit - (0 if is_bitmap else num)) << width) + field
                is_sound = is_sound and before < index < numel
                indices[num], before, num_bits = index, index, 32 * w + bit + 1
            num += 1
    return int(is_sound and num == count), num_bits
