"""Reading index codes on a GPU: three launches where torch needs dozens of operations on 64-bit integers.

`regtopk.wire.indices` says what the code is, and its own tensor operations are the oracle of these programs.
"""

import torch
from torch import Tensor

from regtopk.kernels import triton_codes
from regtopk.kernels.triton_launch import launch

_BITS = 1 << 11  # unary bits that one program reads
_BLOCK = 1 << 10  # indices that one program looks at


def unpack_elias_fano(
    words: Tensor, start: Tensor, count: Tensor, width: Tensor, field_words: Tensor, unary_words: Tensor,
    is_bitmap: Tensor, numel: int, capacity: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `cpu_codes.unpack_elias_fano`."""
    num_rows, row_words = words.shape
    num_parts = max(1, -(-32 * row_words // _BITS))  # more than there are: how many, only the device knows
    indices = torch.empty(num_rows, capacity, dtype=torch.int64, device=words.device)
    num_ones = torch.empty(num_rows, num_parts, dtype=torch.int64, device=words.device)
    num_bad = torch.zeros(num_rows, dtype=torch.int32, device=words.device)
    own = {
        "words": words, "start": start, "count": count, "width": width, "field_words": field_words,
        "unary_words": unary_words, "is_bitmap": is_bitmap.view(torch.uint8), "num_ones": num_ones,
        "indices": indices, "num_bad": num_bad, "numel": numel, "capacity": capacity,
        "row_words": row_words, "BITS": _BITS, "BLOCK": _BLOCK,
    }  # fmt: skip
    with torch.cuda.device_of(words):
        launch(triton_codes.count_ones, (num_parts, num_rows), own)
        stops = num_ones.cumsum(-1)
        launch(triton_codes.write_indices, (num_parts, num_rows), own | {"stops": stops})
        launch(triton_codes.check_order, (max(1, -(-capacity // _BLOCK)), num_rows), own)
    return indices, (num_bad == 0) & (stops[:, -1] == count)
