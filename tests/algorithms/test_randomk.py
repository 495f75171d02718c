import pytest
import torch

from regtopk.algorithms import RandomK
from regtopk.core.codes import quantise
from regtopk.core.random import random_subset
from regtopk.simulate import Cluster


def test_randomk_by_hand() -> None:
    drawn = [int(random_subset(3, 1, 5, step)) for step in (0, 1)]
    assert drawn[0] != drawn[1]  # seed 5 is one where they differ
    cluster = Cluster(RandomK(k=1, seed=5), num_workers=2)
    first = cluster.step(torch.tensor([[6.0, 4.0, 1.0], [-4.0, 4.0, 2.0]]))  # mean (1, 4, 1.5)
    second = cluster.step(torch.tensor([[1.0, 0.0, 3.0], [1.0, 2.0, 3.0]]))  # mean (1, 1, 3)
    assert first.tolist() == [value if entry == drawn[0] else 0 for entry, value in enumerate([1, 4, 1.5])]
    # what was not drawn in the first step has been carried
    assert second.tolist() == [value if entry == drawn[1] else 0 for entry, value in enumerate([2, 5, 4.5])]


@pytest.mark.parametrize("code", ["4bit", "2bit"])
def test_low_bit_values_travel_without_indices(code: str) -> None:
    cluster = Cluster(RandomK(k=300, value_code=code), num_workers=2)
    grads = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    aggregate = cluster.step(grads)
    # each worker's 300 values, in blocks of 128, as the code has them; what it loses is carried
    drawn = random_subset(1000, 300, 0, 0)
    sent = quantise(grads[:, drawn], code)
    assert torch.equal(aggregate[drawn], 0.5 * sent[0] + 0.5 * sent[1])
    assert cluster.state is not None
    residual = cluster.state.state_dict()["residual"]
    assert torch.equal(residual[:, drawn], grads[:, drawn] - sent)
    # to the owner of the first block and to that of the other two: frames, two scales a block, values
    bits = int(code[0])
    sizes = [32 + 8 * 1 + 4 * (128 * bits // 32), 32 + 8 * 2 + 4 * (-(-172 * bits // 32))]
    assert cluster.last_step.payload_bytes.tolist() == [sum(sizes)] * 2
