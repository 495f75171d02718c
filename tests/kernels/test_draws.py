"""The draw on a GPU is the draw on a CPU, entry by entry; without a GPU in Triton's interpreter."""

import pytest
import torch

from regtopk.core.random import _NUM_ROUNDS, mix, random_sequence
from regtopk.kernels.triton_random import draw

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("numel", "k", "seed", "step"),
    [(1, 1, 0, 0), (5, 5, 7, 9), (300, 300, 0, 0), (300, 300, -3, 123_456_789), (2**40 + 1, 100, 7, 9)],
)
def test_the_same_entries_in_the_same_order(numel: int, k: int, seed: int, step: int) -> None:
    bits = max(1, (numel - 1).bit_length())
    drawn = draw(numel, k, bits, mix(seed, step), _NUM_ROUNDS, DEVICE)
    assert drawn.tolist() == random_sequence(numel, k, seed, step).tolist()
