"""DeMo and SparseLoCo, whose largest are those of tiles: by hand, and as the papers have them."""

import math

import pytest
import torch
from torch import Tensor

from regtopk import SparseLoCo
from regtopk.algorithms import DeMo
from regtopk.core.worker import Layout
from regtopk.simulate import Cluster
from tests.algorithms.cases import normal, residual_of, state_of

PAIR = Layout.of_shapes([("pair", (2,), "bias")])


def test_signs_of_a_pair_by_hand() -> None:
    """C = r [[1, 1], [1, -1]], r = sqrt(1/2). One of two coefficients is sent, and decay is 1/2.

    Step 1: g_1 = (3, 1) -> r (4, 2) sends 4 r of the first; g_2 = (-1, 5) -> r (4, -6) sends -6 r of the
    second. Each has one sender, so Q = r (4, -6), and x = (4 - 6, 4 + 6) / 2. M_1 = r (0, 2), M_2 = r (4, 0).
    Step 2: g = 0, so M_1 = r (0, 1) and M_2 = r (2, 0), all of it sent: Q = r (2, 1), x = (3/2, 1/2).
    """
    grads = torch.tensor([[3.0, 1.0], [-1.0, 5.0]])
    signs = Cluster(DeMo(k=1, decay=0.5), num_workers=2, layout=PAIR)
    assert signs.step(grads).tolist() == [-1.0, 1.0]
    assert signs.step(torch.zeros(2, 2)).tolist() == [1.0, 1.0]
    assert signs.step(torch.zeros(2, 2)).tolist() == [0.0, 0.0]


def cosines(n: int) -> Tensor:
    u, i = torch.arange(n).double()[:, None], torch.arange(n).double()
    return torch.cos(math.pi * (2 * i + 1) * u / (2 * n)) * torch.where(u > 0, 2 / n, 1 / n).sqrt()


def test_the_papers_loop() -> None:
    """Momentum in place of its coefficients, and DCT^-1 of what is sent taken out of it, in float64.

    A matrix of 2 x 3 tiles of 4 x 5, 3 of 20 coefficients of each, and a vector of 2 runs of 5, 1 of 5.
    """
    layout = Layout.of_shapes([("matrix", (8, 15), "linear"), ("bias", (10,), "bias")])
    matrix, bias = torch.arange(120).view(8, 15), torch.arange(120, 130).view(1, 10)
    tiles = [(tile, 3) for rows in matrix.split(4) for tile in rows.split(5, dim=1)]
    tiles += [(run, 1) for run in bias.split(5, dim=1)]
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    algorithm = DeMo(density=0.15, decay=0.9, tile=5, sign=False)
    cluster = Cluster(algorithm, num_workers=3, weights=weights, layout=layout)
    momentum = torch.zeros(3, layout.numel, dtype=torch.float64)
    for grads in normal(30, 3, layout.numel):
        momentum = 0.9 * momentum + grads
        expected = torch.zeros(layout.numel, dtype=torch.float64)
        for tile, k in tiles:
            left, right = cosines(tile.shape[0]), cosines(tile.shape[1])
            total, weight_of_senders = torch.zeros(2, *tile.shape, dtype=torch.float64)
            for weight, own in zip(weights, momentum, strict=True):
                coefficients = left @ own[tile] @ right.t()
                is_sent = coefficients.abs() >= coefficients.abs().flatten().topk(k).values[-1]
                own[tile] -= left.t() @ (coefficients * is_sent) @ right
                total += weight * coefficients * is_sent
                weight_of_senders += weight * is_sent
            mean = total / weight_of_senders.where(weight_of_senders > 0, 1.0)
            expected[tile] = left.t() @ mean @ right
        torch.testing.assert_close(cluster.step(grads).double(), expected, rtol=1e-4, atol=1e-5)
        assert cluster.last_step.num_entries.tolist() == [6 * 3 + 2 * 1] * 3


@pytest.mark.parametrize("code", ["float16", "4bit", "2bit"])
def test_what_a_code_loses_stays_in_the_momentum(code: str) -> None:
    """Without decay, DCT^-1(sent + kept) is the sum of the gradients; coefficients keep the norm."""
    layout = Layout.of_shapes([("matrix", (30, 40), "linear"), ("bias", (30,), "bias")])
    coded = Cluster(DeMo(density=0.1, decay=1.0, sign=False, value_code=code), num_workers=1, layout=layout)
    given, applied = torch.zeros(layout.numel), torch.zeros(layout.numel)
    for grads in normal(20, 1, layout.numel):
        given += grads[0]
        applied += coded.step(grads)
    kept = state_of(coded)["momentum"]
    assert float(kept.norm()) > 0.1 * float(given.norm())
    torch.testing.assert_close(kept.norm(), (given - applied).norm(), rtol=1e-5, atol=0)


MATRIX, VECTOR = (128, 64), (128,)
LAYOUT = Layout.of_shapes([("matrix", MATRIX, "linear"), ("bias", VECTOR, "bias")])
NUM_WORKERS, K = 3, 128


def as_the_authors(update: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """What one worker sends of one parameter, dense, and its residual: tiles of 64 x 64, runs of 64."""
    a = 0.95 * residual + update
    tiles = (
        a.unsqueeze(0).split(64, dim=1)
        if a.dim() == 1
        else [tile for rows in a.split(64, dim=0) for tile in rows.split(64, dim=1)]
    )
    for tile in tiles:
        k = max(1, round(tile.numel() * K / 4096))
        smallest = tile.abs().flatten().sort(descending=True).values[k - 1]
        tile[tile.abs() < smallest] = 0  # a view: what stays in `a` is sent
    return a, 0.95 * residual + update - a


def test_the_mean_over_senders_of_the_largest_of_each_tile() -> None:
    """The code's equations in plain loops over the parameters, values uncoded; weights are equal."""
    algorithm = SparseLoCo(density=K / 4096, value_code="float32")
    cluster = Cluster(algorithm, num_workers=NUM_WORKERS, layout=LAYOUT)
    residuals = [[torch.zeros(MATRIX), torch.zeros(VECTOR)] for _ in range(NUM_WORKERS)]
    for updates in normal(LAYOUT.numel) + normal(4, NUM_WORKERS, LAYOUT.numel, seed=1):  # alike in part
        sent = torch.zeros(NUM_WORKERS, LAYOUT.numel)
        for n, update in enumerate(updates):
            parts = [update[:8192].view(MATRIX), update[8192:]]
            found = [as_the_authors(*both) for both in zip(parts, residuals[n], strict=True)]
            residuals[n] = [residual for _, residual in found]
            sent[n] = torch.cat([part.flatten() for part, _ in found])
        num_senders = (sent != 0).sum(0)
        assert set(num_senders.tolist()) == {0, 1, 2, 3}
        expected = sent.sum(0) / num_senders.clamp(min=1)
        # a sum of three and a division, against thirds added up and divided by their weights
        torch.testing.assert_close(cluster.step(updates), expected, rtol=4 * 2**-24 * 3, atol=0)
        assert cluster.last_step.num_entries.tolist() == [2 * K + 2 * 2] * NUM_WORKERS
        kept = torch.stack([torch.cat([part.flatten() for part in parts]) for parts in residuals])
        torch.testing.assert_close(residual_of(cluster), kept, rtol=0, atol=2**-22)
