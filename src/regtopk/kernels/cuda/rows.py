"""What the programs of one call on CUDA share: its rows, and the memory for what they find."""

import math
from typing import Any

import torch
from torch import Tensor

from regtopk.kernels.cuda.launch import launch
from regtopk.kernels.cuda.programs.words import words_per_row


class DeviceRows:
    """The (rows, J) tensors of a call, and the arguments of its programs by name: each step adds its own.

    `key_dtype` holds a key, which has `key_bits`, and `offset_dtype` a place in the row. If rows are aligned,
    tiles may start a few entries before one, where loads can be 16 bytes wide.
    """

    def __init__(self, residual: Tensor, grad: Tensor | None, given: tuple[Tensor, ...] = ()) -> None:
        """The programs will change the residual; `given` holds the damped entries and scores, if any."""
        rows = _as_rows(residual)
        grads = rows if grad is None else _as_rows(grad)  # a tensor that is not read
        self.batch, (self.num, self.numel) = residual.shape[:-1], rows.shape
        self.device, self.dtype = residual.device, residual.dtype
        self.key_bits = 8 * residual.itemsize - 1
        self.key_dtype = torch.int32 if self.key_bits == 31 else torch.int64
        self.offset_dtype = torch.int32 if self.numel < 2**31 else torch.int64
        self.is_aligned = _stride(rows) % 4 == _stride(grads) % 4
        num_words = words_per_row(self.key_bits)
        work = torch.zeros(self.num, num_words, dtype=torch.int64, device=self.device)
        self.arguments: dict[str, Any] = {
            "residual": rows, "residual_stride": _stride(rows), "numel": self.numel, "work": work,
            "grad": grads, "grad_stride": _stride(grads), "HAS_GRAD": grad is not None,
            "num_words": num_words, "KEY_BITS": self.key_bits, "IS_ALIGNED": self.is_aligned,
        }  # fmt: skip
        damped, scores, saved = self.empty(0, torch.int64), self.empty(0, self.dtype), rows
        if given:
            damped, scores = (_as_rows(tensor.contiguous()) for tensor in given)
            saved = self.empty(damped.shape[1], self.dtype)  # what they hold in the meantime
        self.num_damped = damped.shape[1]
        self.arguments |= {
            "damped": damped, "scores": scores, "saved": saved, "num_damped": self.num_damped,
            "num_damped_bits": self.num_damped.bit_length(), "HAS_DAMPED": self.num_damped > 0,
        }  # fmt: skip

    def num_tiles(self, tile: int) -> int:
        """How many tiles cover a row, wherever in 16 bytes it starts."""
        lead = 3 if self.is_aligned and self.arguments["residual_stride"] % 4 else 0
        return math.ceil((self.numel + lead) / tile)

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory of shape (rows, size), not initialised."""
        return torch.empty(self.num, size, dtype=dtype, device=self.device)

    def outputs(self, size: int) -> tuple[Tensor, Tensor]:
        """Memory for indices and values, which programs write to, with the residual's leading dimensions."""
        indices, values = self.empty(size, torch.int64), self.empty(size, self.dtype)
        self.arguments |= {"indices": indices, "values": values}
        return indices.view(*self.batch, size), values.view(*self.batch, size)

    def launch(
        self, program: Any, num_parts: int, num_warps: int = 4, max_registers: int | None = None, **own: Any
    ) -> None:
        """Run a program, `num_parts` times for each row; `own` are arguments that no other program takes."""
        launch(program, (num_parts, self.num), self.arguments | own, num_warps, max_registers)


def _as_rows(tensor: Tensor) -> Tensor:
    """(..., m) as (rows, m), sharing memory."""
    *batch, size = tensor.shape
    return tensor.detach().view(math.prod(batch), size)


def _stride(rows: Tensor) -> int:
    """Entries from row to row; 0 for a single row: a multiple of 16 lets loads be 16 bytes wide."""
    return rows.stride(0) if rows.shape[0] > 1 else 0
