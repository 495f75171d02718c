import math

import pytest
import torch
from torch import Tensor

from regtopk.algorithms import SIDCo
from regtopk.core.requests import SparseSum
from regtopk.core.sparse import SparseGradient
from regtopk.core.worker import Layout, Worker
from regtopk.simulate import Cluster
from tests.algorithms.cases import normal, state_of

SIXTEEN = torch.tensor([1.0, -1.0] * 6 + [4.0, -6.0, 8.0, -12.0])


def sent_by(algorithm: SIDCo, grad: Tensor, num_stages: int = 1) -> SparseGradient:
    worker = Worker(torch.tensor(1.0), torch.tensor(0), 1, 0, Layout.anonymous(grad.numel()))
    state = algorithm.init(worker)
    state.num_stages += num_stages - 1
    request = next(algorithm.exchange(grad, state, worker))
    assert isinstance(request, SparseSum)
    return request.sparse


@pytest.mark.parametrize(
    ("num_stages", "sent"),
    [
        (1, [14, 15]),  # mean |a| = 42 / 16 = 2.625, d = 1 / 16: eta = 2.625 ln 16 = 7.28
        # eta_1 = 2.625 ln 4 = 3.64 leaves 4, 6, 8, 12: excess over 4 is 0, 2, 4, 8, of mean 3.5
        # d_2 = (1 / 16) / (1 / 4) = 1 / 4: eta_2 = 4 + 3.5 ln 4 = 8.85
        (2, [15]),
    ],
)
def test_stages_by_hand(num_stages: int, sent: list[int]) -> None:
    found = sent_by(SIDCo(k=1), SIXTEEN, num_stages)
    assert found.indices.tolist()[: int(found.counts)] == sent
    assert torch.equal(found.values, SIXTEEN[found.indices])


def test_the_pareto_fit_by_hand() -> None:
    # x = 1, 1, 1, 5: mean 2, variance 3, mean^2 / variance = 4 / 3; c = 1 / 6, alpha = 7 / 3
    # d = 1 / 2: eta = 14 (1 - 2^(-1/6)) = 1.53 where the exponential has 2 ln 2 = 1.39
    algorithm, x = SIDCo(k=2, fit="pareto"), torch.tensor([[1.0, 1.0, 1.0, 5.0]])
    eta = float(algorithm.threshold(x, torch.tensor([[1]]), 0.5))
    assert eta == pytest.approx(14 * (1 - 2 ** (-1 / 6)), rel=1e-6)
    assert float(SIDCo(k=2).threshold(x, torch.tensor([[1]]), 0.5)) == pytest.approx(2 * math.log(2))


def test_the_gamma_fit_by_hand() -> None:
    # x = 1, 1, 1, 5: s = ln 2 - ln(5) / 4 = 0.29079; alpha = (2.70921 + sqrt(7.33983 + 6.97890)) / 3.48945
    # = 1.86081, beta = 1.07480; d = 0.2: eta = -beta (ln 0.2 + ln Gamma(alpha)) = 1.78615
    x = torch.tensor([[1.0, 1.0, 1.0, 5.0]])
    eta = float(SIDCo(k=1, fit="gamma").threshold(x, torch.tensor([[1]]), 0.2))
    assert eta == pytest.approx(1.78615, abs=1e-5)


def heavy(size: int) -> Tensor:
    """Generalised Pareto with shape 0.1, by inversion of evenly spaced probabilities."""
    probability = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    return (10 * (probability**-0.1 - 1)).float()


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_a_fit_finds_what_it_should_on_its_own_distribution(density: float, num_stages: int) -> None:
    size = 100_000
    exponential = -((torch.arange(size, dtype=torch.float64) + 0.5) / size).log().float()
    for fit, x in (("exponential", exponential), ("pareto", heavy(size))):
        eta = SIDCo(density=density, fit=fit).threshold(x, torch.tensor([num_stages]), density)  # type: ignore[arg-type]
        assert int((x >= eta).sum()) == pytest.approx(density * size, rel=0.06)


@pytest.mark.parametrize(("fit", "k"), [("exponential", 20), ("pareto", 200)])
def test_the_number_of_stages_settles_where_about_k_are_found(fit: str, k: int) -> None:
    """Gaussian gradients: one exponential stage finds 1 in 200 of what it should, one Pareto 1.6 times it."""
    cluster = Cluster(SIDCo(k=k, fit=fit), num_workers=2)  # type: ignore[arg-type]
    num_sent = []
    for grads in normal(60, 2, 20_000):
        cluster.step(grads)
        num_sent.append(cluster.last_step.num_entries)
    num_stages = state_of(cluster)["num_stages"]
    assert num_stages.shape == (2, 1) and bool((num_stages > 1).all())
    late = torch.stack(num_sent[30:]).double().mean(0)
    assert bool(((late > 0.8 * k) & (late < 1.2 * k)).all())


def test_of_more_than_twice_k_the_largest_are_sent_and_the_others_wait() -> None:
    grad = torch.cat([torch.tensor([3.0, -2.0, 2.5, 3.0, 3.0, -5.0]), torch.zeros(94)])
    cluster = Cluster(SIDCo(k=2), num_workers=1)  # eta = 0.185 ln 50 = 0.72: all six reach it
    assert cluster.step(grad[None])[:6].tolist() == [3.0, 0.0, 0.0, 3.0, 3.0, -5.0]
    assert cluster.step(torch.zeros(1, 100))[:6].tolist() == [0.0, -2.0, 2.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("numel", [10_000, 100_000])  # rows that are short to the kernels, and long ones
def test_a_first_step_that_finds_too_many_sends_the_largest(numel: int) -> None:
    """Tails heavier than the fit's: several times 2 k reach the threshold, all over the vector."""
    k, generator = numel // 1000, torch.Generator().manual_seed(0)
    grads = torch.randn(3, numel, generator=generator)
    grads[:2] /= torch.rand(2, numel, generator=generator).sqrt()  # |g| > x in about 1 / x^2 of them
    num_found = (grads.abs() >= grads.abs().mean(-1, keepdim=True) * math.log(1000)).sum(-1)
    assert bool((num_found[:2] > 4 * k).all()) and int(num_found[2]) < k  # the last row stays within 2 k
    batch = Worker(torch.ones(3, 1) / 3, torch.arange(3)[:, None], 3, 0, Layout.anonymous(numel), (3,))
    state = SIDCo(k=k).init(batch)
    request = next(SIDCo(k=k).exchange(grads, state, batch))
    assert isinstance(request, SparseSum)
    sent = request.sparse
    assert sent.counts.tolist() == [2 * k, 2 * k, max(1, int(num_found[2]))]
    for grad, indices, count in zip(grads, sent.indices, sent.counts.tolist(), strict=True):
        support = indices[:count].tolist()
        assert support == grad.abs().topk(count).indices.sort().values.tolist()
        assert count < k or support[0] < numel / 2 < support[-1]
    assert torch.equal(state.residual.scatter_add(-1, *sent.without_padding()), grads)


def test_a_damaged_number_of_stages_ends() -> None:
    most = sent_by(SIDCo(k=1), SIXTEEN, num_stages=SIXTEEN.numel().bit_length())
    damaged = sent_by(SIDCo(k=1), SIXTEEN, num_stages=2**62)
    assert torch.equal(damaged.indices, most.indices) and torch.equal(damaged.values, most.values)
