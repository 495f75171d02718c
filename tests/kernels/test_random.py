"""Draws on a GPU are those on a CPU, entry by entry; without a GPU in Triton's interpreter."""

import pytest
import torch

from regtopk.core import precision
from regtopk.core.random import _NUM_ROUNDS, mix, random_sequence, signed
from regtopk.kernels.cuda import random as cuda_random

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("numel", "k", "seed", "step"),
    [(1, 1, 0, 0), (5, 5, 7, 9), (300, 300, 0, 0), (300, 300, -3, 123_456_789), (2**40 + 1, 100, 7, 9)],
)
def test_the_same_entries_in_the_same_order(numel: int, k: int, seed: int, step: int) -> None:
    bits = max(1, (numel - 1).bit_length())
    drawn = cuda_random.draw(numel, k, bits, signed(mix(seed, step)), _NUM_ROUNDS, DEVICE)
    assert drawn.tolist() == random_sequence(numel, k, seed, step).tolist()


@pytest.mark.parametrize(
    ("shape", "index"), [((1,), 0), ((4099,), 3), ((2, 1, 1026), [[5]]), ((3, 1023), [[0], [1], [2]])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_rounding(shape: tuple[int, ...], index: int | list[list[int]], dtype: torch.dtype) -> None:
    vector = torch.randn(shape, dtype=dtype) * torch.logspace(-30, 30, shape[-1], dtype=dtype)
    workers = torch.tensor(index)
    for step in (0, 1, 123_456_789):  # states of both signs
        expected = precision.round_at_random(vector, workers, step)
        state = signed(mix(precision._SEED, step))
        rounded = cuda_random.round_at_random(vector.to(DEVICE), workers.to(DEVICE), state)
        assert rounded.dtype == torch.bfloat16 and torch.equal(rounded.cpu(), expected)
