"""Draws on a GPU, without the host."""

import torch
from torch import Tensor

from regtopk.kernels.cuda.programs.random import round_rows, walk

_BLOCK = 256
_WORDS = 256  # of 64 random bits that one program draws for rounding


def draw(numel: int, k: int, bits: int, state: int, num_rounds: int, device: torch.device) -> Tensor:
    """k distinct entries of 0..J-1, (k,) int64: see `core.random.random_sequence`; its mix is the state."""
    drawn = torch.empty(k, dtype=torch.int64, device=device)
    with torch.cuda.device_of(drawn):
        walk[(-(-k // _BLOCK),)](drawn, numel, k, state, bits, num_rounds, BLOCK=_BLOCK)
    return drawn


def round_at_random(vector: Tensor, index: Tensor, state: int) -> Tensor:
    """A vector (..., J), one piece of memory, in bfloat16: see `core.precision.round_at_random`."""
    rounded = torch.empty_like(vector, dtype=torch.bfloat16)
    *batch, numel = vector.shape
    workers = index.expand(*batch, 1).contiguous()
    grid = -(-numel // (4 * _WORDS)), workers.numel()
    with torch.cuda.device_of(rounded):
        round_rows[grid](rounded, vector, workers, numel, state, WORDS=_WORDS)
    return rounded
