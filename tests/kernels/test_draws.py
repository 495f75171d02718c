"""The draw on a GPU is the draw on a CPU, entry by entry; without a GPU in Triton's interpreter."""

import pytest
import torch

from regtopk.core.random import _NUM_ROUNDS, mix, random_sequence
from regtopk.kernels.triton_random import draw

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("numel", "k"), [(1, 1), (2, 2), (5, 5), (1000, 700), (1025, 1025), (2**24 - 3, 999), (2**40 + 1, 300)]
)
@pytest.mark.parametrize(("seed", "step"), [(0, 0), (7, 9), (-3, 123_456_789)])
def test_the_same_entries_in_the_same_order(numel: int, k: int, seed: int, step: int) -> None:
    bits = max(1, (numel - 1).bit_length())
    drawn = draw(numel, k, bits, mix(seed, step), _NUM_ROUNDS, DEVICE)
    assert drawn.tolist() == random_sequence(numel, k, seed, step).tolist()
