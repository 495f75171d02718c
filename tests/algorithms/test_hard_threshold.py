import pytest
import torch

from regtopk.algorithms import HardThreshold
from regtopk.errors import ArgumentError
from regtopk.simulate import Cluster


def test_the_threshold_of_k_by_hand() -> None:
    # k = 4: lambda = 1 / (2 · 2) = 0.25.     e = (0, -0.125, 0, 0, 0)
    cluster = Cluster(HardThreshold(k=4), num_workers=1)
    grads = torch.tensor([[0.25, -0.125, 0.5, 0.0, -0.375]])
    assert cluster.step(grads).tolist() == [0.25, 0.0, 0.5, 0.0, -0.375]
    assert cluster.step(torch.tensor([[0.0, -0.125, 0.125, 0.0, 0.0]])).tolist() == [0, -0.25, 0, 0, 0]
    assert cluster.last_step.num_entries.tolist() == [1]


def test_a_given_threshold_and_workers_that_send_different_numbers() -> None:
    cluster = Cluster(HardThreshold(threshold=2.0), num_workers=2)
    assert cluster.step(torch.tensor([[2.0, -3.0, 1.0], [1.0, 1.0, 1.0]])).tolist() == [1.0, -1.5, 0.0]
    assert cluster.last_step.num_entries.tolist() == [2, 0]
    assert cluster.step(torch.ones(2, 3)).tolist() == [1.0, 1.0, 2.0]


def test_what_is_over_the_most_waits_in_the_residual() -> None:
    cluster = Cluster(HardThreshold(threshold=1.0, max_density=0.5), num_workers=1)
    assert cluster.step(torch.tensor([[2.0, 3.0, 4.0, 5.0]])).tolist() == [2.0, 3.0, 0.0, 0.0]
    assert cluster.step(torch.zeros(1, 4)).tolist() == [0.0, 0.0, 4.0, 5.0]


@pytest.mark.parametrize("threshold", [0, -1.0, float("nan"), float("inf"), "1"])
def test_a_threshold_must_be_positive(threshold: object) -> None:
    with pytest.raises(ArgumentError, match=f"threshold must be None or finite and > 0, got {threshold!r}"):
        HardThreshold(threshold=threshold)  # type: ignore[arg-type]


def test_bad_options() -> None:
    with pytest.raises(ArgumentError, match=r"give threshold alone, .* got threshold=1.0, density=None, k=3"):
        HardThreshold(threshold=1.0, k=3)
    with pytest.raises(ArgumentError, match="give exactly one of density and k"):
        HardThreshold()
    with pytest.raises(ArgumentError, match="value_code must be one of"):
        HardThreshold(threshold=1.0, value_code="3bit")
    with pytest.raises(ArgumentError, match=r"max_density must be in \(0, 1\], got 2"):
        HardThreshold(threshold=1.0, max_density=2)
