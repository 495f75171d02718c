import pytest
import torch

from regtopk.algorithms import Dryden
from regtopk.errors import ArgumentError
from regtopk.simulate import Cluster


def test_dryden_by_hand() -> None:
    cluster = Cluster(Dryden(density=0.5), num_workers=1)
    # half of 4 positives: 8, 4, of mean 6; half of 2 negatives: -6
    aggregate = cluster.step(torch.tensor([[8.0, 4.0, 1.0, 0.5, -6.0, -3.0, 0.0, 0.0]]))
    assert aggregate.tolist() == [6.0, 6.0, 0.0, 0.0, -6.0, 0.0, 0.0, 0.0]
    # a = (2, -2, 1, 0.5, 0, -3, 0, 0): 1.5 of 3 positives rounds to 2: 2, 1, of mean 1.5; of 2 negatives -3
    aggregate = cluster.step(torch.zeros(1, 8))
    assert aggregate.tolist() == [1.5, 0.0, 1.5, 0.0, 0.0, -3.0, 0.0, 0.0]
    assert cluster.state is not None
    residual = cluster.state.state_dict()["residual"]
    assert residual.tolist() == [[0.5, -2.0, -0.5, 0.5, 0.0, 0.0, 0.0, 0.0]]


def test_each_worker_has_its_own_means_and_signs() -> None:
    cluster = Cluster(Dryden(k=2), num_workers=2)
    # worker 0: 1 of 2 positives, 1 of 2 negatives; worker 1: 2 of 4 positives, of mean 3; it has no negatives
    aggregate = cluster.step(torch.tensor([[4.0, 1.0, -1.0, -2.0], [1.0, 2.0, 1.0, 4.0]]))
    assert cluster.last_step.num_entries.tolist() == [2, 2]
    assert aggregate.tolist() == [2.0, 1.5, 0.0, 0.5]


def test_at_least_one_of_either_sign_is_sent() -> None:
    grads = torch.cat([torch.ones(99), -torch.ones(1)])[None]
    cluster = Cluster(Dryden(density=0.02), num_workers=1)
    assert float(cluster.step(grads)[99]) == -1.0
    assert cluster.last_step.num_entries.tolist() == [3]


def test_values_are_not_coded_otherwise() -> None:
    with pytest.raises(TypeError, match="value_code"):
        Dryden(k=1, value_code="float32")  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match="give exactly one of density and k"):
        Dryden()
