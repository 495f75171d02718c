"""Values in 4, 2 and 1 bits on a GPU: one launch each way, where torch needs hundreds."""

from typing import Any

import torch
from torch import Tensor

from regtopk.kernels.cuda.launch import launch
from regtopk.kernels.cuda.programs import blocks as programs

_BLOCKS = 8  # that one program works on
_SIZE = int(programs.SIZE.value)


def quantise(values: Tensor, bits: int, count: Tensor | None) -> Tensor:
    """The values, (..., m), as the receiver will see them: see `core.codes.quantise`."""
    coded = torch.empty_like(values, memory_format=torch.contiguous_format)
    _launch(programs.round_values, _sent(values, bits, count) | {"coded": coded})
    return coded


def pack(values: Tensor, bits: int, count: Tensor | None) -> Tensor:
    """Scales and symbols of values, (..., m), as words: see `wire.values.pack_values`."""
    size = values.shape[-1]
    num_value_words = -(-size * bits // 32)
    num_words = 2 * -(-size // _SIZE) + num_value_words
    words = torch.empty(*values.shape[:-1], num_words, dtype=torch.int32, device=values.device)
    sizes = {"words": words, "num_words": num_words, "num_value_words": num_value_words}
    _launch(programs.pack_values, _sent(values, bits, count) | sizes)
    return words


def unpack(
    words: Tensor, count: Tensor, capacity: int, bits: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Values, (..., capacity), of messages, and whether they are sound: see `wire.values.unpack_values`."""
    values = torch.empty(*count.shape, capacity, dtype=dtype, device=words.device)
    are_bad = torch.zeros_like(count, memory_format=torch.contiguous_format)
    own = {
        "words": words.contiguous(), "values": values, "counts": count.contiguous(), "are_bad": are_bad,
        "capacity": capacity, "row_words": words.shape[-1], "BITS": bits,
    }  # fmt: skip
    _launch(programs.unpack_values, own)
    return values, are_bad == 0


def _sent(values: Tensor, bits: int, count: Tensor | None) -> dict[str, Any]:
    rows = values.contiguous()
    counts = rows if count is None else count.expand(values.shape[:-1]).contiguous()
    return {
        "values": rows,
        "counts": counts,
        "k": rows.shape[-1],
        "BITS": bits,
        "HAS_COUNTS": count is not None,
    }


def _launch(program: Any, own: dict[str, Any]) -> None:
    values = own["values"]
    num_parts = -(-values.shape[-1] // (_SIZE * _BLOCKS))
    grid = values.numel() // values.shape[-1] * num_parts, 1
    with torch.cuda.device_of(values):
        launch(program, grid, own | {"num_parts": num_parts, "BLOCKS": _BLOCKS})
