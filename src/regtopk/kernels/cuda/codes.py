"""Writing and reading messages on a GPU: a handful of launches where torch needs hundreds."""

from collections.abc import Mapping

import torch
from torch import Tensor

from regtopk.kernels.cuda.launch import launch
from regtopk.kernels.cuda.programs import codes as programs

_BITS = 1 << 11  # unary bits that one program reads
_BLOCK = 1 << 10  # entries that one program looks at
_SUMMED = 1 << 12  # words that one program adds to a checksum

Frame = Mapping[str, int]  # the numbers of the format: codes, versions, statuses


def write_messages(
    indices: Tensor, values: Tensor, value_words: Tensor, sizes: tuple[bool, int, int, int], frame: Frame
) -> Tensor:
    """Messages, (rows, w) int32, whose frames say so if indices do not ascend, or values are not finite.

    What is sent, (rows, k), and its words, (rows, v) int32, are contiguous. The sizes say whether the unary
    bits are a bitmap, the bits of a field, and the words of the fields and of the unary bits. The frame has
    the format's numbers, with those of this message: "KINDS", "numel".
    """
    is_bitmap, width, num_field_words, num_unary_words = sizes
    (num_rows, k), num_value_words = indices.shape, value_words.shape[-1]
    num_words = int(programs.HEADER.value) + num_value_words + num_field_words + num_unary_words
    # A row starts at an even word, because a checksum takes two. Flags are behind the words.
    words = torch.zeros(num_rows, (num_words + 3) // 2 * 2, dtype=torch.int32, device=indices.device)
    own = {
        "words": words, "indices": indices, "values": values, "value_words": value_words,
        "k": k, "num_value_words": num_value_words, "width": width,
        "num_field_words": num_field_words, "num_unary_words": num_unary_words, "num_words": num_words,
        "row_words": words.shape[1], "IS_BITMAP": is_bitmap, **frame,
    }  # fmt: skip
    with torch.cuda.device_of(words):
        num_blocks = max(1, -(-max(k, num_value_words) // _BLOCK))
        launch(programs.write_body, (num_blocks, num_rows), own | {"BLOCK": _BLOCK})
        launch(programs.seal, (-(-num_words // _SUMMED), num_rows), own | {"BLOCK": _SUMMED})
    return words[:, :num_words]


def read_frames(words: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
    """What frames say, (7, rows) int64, by the numbers in `programs.codes`, and if a float is not finite.

    Words, (rows, w) int32, are contiguous. The frame has the format's numbers, those of the values' code,
    "numel", and in "most" how many entries a message may hold.
    """
    num_rows, row_words = words.shape
    sums, are_bad = torch.zeros(2, num_rows, dtype=torch.int64, device=words.device)
    facts = torch.empty(programs.NUM_FACTS, num_rows, dtype=torch.int64, device=words.device)
    own = {"words": words, "sums": sums, "are_bad": are_bad, "facts": facts, "row_words": row_words, **frame}
    with torch.cuda.device_of(words):
        launch(programs.sum_words, (-(-row_words // _SUMMED), num_rows), own | {"BLOCK": _SUMMED})
        launch(programs.read_frames, (1, num_rows), own)
    return facts, are_bad


def read_entries(
    words: Tensor, facts: Tensor, are_bad: Tensor, values: Tensor | None, frame: Frame
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Indices and values, (rows, capacity), counts and statuses, (rows,), by what `read_frames` found.

    `are_bad` is not zero where a value is not finite. Values are None if they are float32, and read here.
    """
    (num_rows, row_words), capacity, device = words.shape, frame["capacity"], words.device
    num_parts = max(1, -(-32 * row_words // _BITS))  # more than there are: how many, only the device knows
    if values is None:
        values = torch.empty(num_rows, capacity, dtype=torch.float32, device=device)
    indices = torch.empty(num_rows, capacity, dtype=torch.int64, device=device)
    num_ones = torch.empty(num_rows, num_parts, dtype=torch.int64, device=device)
    are_bad_indices = torch.zeros(num_rows, dtype=torch.int64, device=device)
    counts, statuses = torch.empty(2, num_rows, dtype=torch.int64, device=device)
    own = {
        "words": words, "facts": facts, "num_ones": num_ones, "num_parts": num_parts, "indices": indices,
        "values": values, "are_bad_indices": are_bad_indices, "are_bad_values": are_bad, "counts": counts,
        "statuses": statuses, "row_words": row_words, "BITS": _BITS, "BLOCK": _BLOCK, **frame,
    }  # fmt: skip
    grid = max(1, -(-capacity // _BLOCK)), num_rows
    with torch.cuda.device_of(words):
        launch(programs.count_ones, (num_parts, num_rows), own)
        own["stops"] = num_ones.cumsum(-1)
        launch(programs.write_indices, (num_parts, num_rows), own)
        launch(programs.check_order, grid, own)
        launch(programs.finish, grid, own)
    return indices, values, counts, statuses
