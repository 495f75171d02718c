"""What every algorithm of the table must do, and what each promises with its options."""

import io

import pytest
import torch
from torch import Tensor

from regtopk.algorithms import Dense, TopK
from regtopk.core.algorithm import Promise
from regtopk.core.requests import SparseSum
from regtopk.core.state import State
from regtopk.core.worker import Layout
from regtopk.errors import ArgumentError, GradientError
from regtopk.simulate import Cluster
from tests.algorithms.cases import (
    CASES,
    LAYOUT,
    WEIGHTS,
    Case,
    J,
    K,
    N,
    assert_same,
    cases_that_promise,
    random_grads,
    saved_tensors,
    with_codes,
    with_codes_and_dtypes,
)
from tests.algorithms.lockstep import LockStep

all_cases = pytest.mark.parametrize("case", CASES, ids=str)


def coded_and_typed(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("case", "code", "dtype"), with_codes_and_dtypes(cases), ids=str)


def that_promise(promise: Promise) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases_that_promise(promise), ids=str)


@coded_and_typed(cases_that_promise("conserves"))
def test_sent_plus_residual_is_what_was_accumulated(case: Case, code: str, dtype: torch.dtype) -> None:
    """And the aggregate is the weighted sum of what was sent, in rank order from zero."""
    ranks = LockStep(case.make(value_code=code), WEIGHTS, LAYOUT, dtype)
    for grads in random_grads(2, dtype=dtype):  # the second has something to carry
        accumulated = torch.stack([_residual(state, J) for state in ranks.states]) + grads
        alone, aggregates = ranks.step_alone_and_together(grads)
        sent = torch.stack(alone)
        kept = torch.stack([_residual(state, J) for state in ranks.states])
        lost = (sent + kept - accumulated).abs()
        largest = torch.stack([sent, kept, accumulated]).abs().amax(0)
        assert bool((lost <= (0 if case.sends_exactly(code) else _ulp(largest))).all())
        expected = torch.zeros(J, dtype=ranks.dtype)
        for weight, row in zip(torch.tensor(WEIGHTS, dtype=ranks.dtype), sent, strict=True):
            expected += weight * row
        for aggregate in aggregates:
            assert torch.equal(aggregate, expected)


@coded_and_typed(cases_that_promise("conserves_sum"))
def test_nothing_is_lost_together(case: Case, code: str, dtype: torch.dtype) -> None:
    """aggregate + sum_n w_n residual + what owners owe = the same before + sum_n w_n grad, to rounding.

    An entry is rounded when it is accumulated, coded, paid for, owed and added to the aggregate. Where every
    worker conserves, the test above says it of each of them and of their sum.
    """
    ranks = LockStep(case.make(value_code=code), WEIGHTS, LAYOUT, dtype)
    weights = torch.tensor(WEIGHTS, dtype=ranks.dtype).double()
    for grads in random_grads(3, dtype=dtype):
        before, owed_before = _kept(ranks.states)
        (aggregate, *_), _ = ranks.step(grads)
        after, owed = _kept(ranks.states)
        lost = aggregate.double() + weights @ after.double() - weights @ (before.double() + grads.double())
        lost += owed.double() - owed_before.double()
        largest = (
            torch.stack([*before, *after, *grads.to(before), aggregate, owed, owed_before]).abs().amax(0)
        )
        assert bool((lost.abs() <= (3 * N + 3) * _ulp(largest)).all())


@coded_and_typed(CASES)
def test_a_batch_equals_single_workers(case: Case, code: str, dtype: torch.dtype) -> None:
    ranks = LockStep(case.make(value_code=code), WEIGHTS, LAYOUT, dtype)
    cluster = case.cluster(value_code=code)
    num_steps = 3 if code == "float32" and dtype == torch.float32 else 2  # the second has something to carry
    for grads in random_grads(num_steps, dtype=dtype):
        aggregates, _ = ranks.step(grads)
        expected = cluster.step(grads)
        assert expected.dtype == dtype
        for aggregate in aggregates:
            assert torch.equal(aggregate.to(dtype), expected)
    assert_same_states(cluster, ranks)


def assert_same_states(cluster: Cluster, ranks: LockStep) -> None:
    assert cluster.state is not None
    for name, rule in type(cluster.state).rules().items():
        batch, singles = getattr(cluster.state, name), [getattr(state, name) for state in ranks.states]
        assert batch.dtype in (torch.int64, ranks.dtype)
        for rank, single in enumerate(singles):
            assert torch.equal(single, batch if rule == "shared" else batch[rank]), name


@all_cases
def test_a_long_batch_equals_single_workers(case: Case) -> None:
    """torch adds long rows of a batch in another order than one row alone."""
    layout = Layout.of_shapes([("weight", (201, 199), "linear"), ("bias", (201,), "bias")])
    algorithm = case.make(density=None if "k" in case.options else 0.45)
    ranks = LockStep(algorithm, WEIGHTS, layout, torch.float32)
    cluster = Cluster(algorithm, num_workers=N, weights=WEIGHTS, layout=layout)
    for grads in random_grads(2, N, layout.numel):
        aggregates, _ = ranks.step(grads)
        assert torch.equal(aggregates[0], cluster.step(grads))
    assert_same_states(cluster, ranks)


@that_promise("replicates")
def test_replicas_equal_separate_clusters(case: Case) -> None:
    num_replicas = 3
    together = case.cluster()
    apart = [case.cluster() for _ in range(num_replicas)]
    for grads in random_grads(4, num_replicas, N, J):
        aggregate = together.step(grads)
        assert aggregate.shape == (num_replicas, J)
        for replica, cluster in enumerate(apart):
            assert torch.equal(cluster.step(grads[replica]), aggregate[replica])
    for replica, cluster in enumerate(apart):
        of_replica = {name: t if t.dim() == 0 else t[replica] for name, t in saved_tensors(together).items()}
        assert_same(saved_tensors(cluster), of_replica)


@that_promise("one_sum")
def test_one_sum_of_known_length_is_all_that_is_asked_for(case: Case) -> None:
    ranks = LockStep(case.make(), WEIGHTS, Layout.anonymous(J), torch.float32)
    for grads in random_grads(3):
        (requests,) = ranks.step(grads)[1]
        for request in requests:
            assert type(request) is SparseSum and request.sparse.count is None
    assert "shared" not in type(ranks.states[0]).rules().values()


@that_promise("exact_k")
@pytest.mark.parametrize(("code", "k"), [("float32", 1), ("float32", K), ("2bit", K), ("float32", J)])
def test_exactly_k_are_sent(case: Case, code: str, k: int) -> None:
    cluster = case.cluster(k=k, value_code=code)
    ties = [torch.zeros(N, J), torch.ones(N, J)]
    for grads in random_grads(3) + ties:
        cluster.step(grads)
        assert cluster.last_step.num_entries.tolist() == [k] * N


@that_promise("exact_k")
def test_k_follows_a_density_schedule(case: Case) -> None:
    densities = [1.0, 0.5, 0.01, 0.3]
    cluster = case.cluster(density=lambda step: densities[step])
    for grads, k in zip(random_grads(4), [150, 75, 2, 45], strict=True):  # max(1, round(density · 150))
        cluster.step(grads)
        assert cluster.last_step.num_entries.tolist() == [k] * N


@coded_and_typed(cases_that_promise("dense_at_full_density"))
def test_full_density_is_dense(case: Case, code: str, dtype: torch.dtype) -> None:
    all_entries = {"density": 1.0} if dtype == torch.float32 else {"k": J}
    cluster = case.cluster(value_code=code, **all_entries)
    dense = Cluster(Dense(value_code=code), num_workers=N, weights=WEIGHTS)
    for grads in random_grads(4, dtype=dtype):
        assert torch.equal(cluster.step(grads), dense.step(grads))


@that_promise("shared_support")
def test_all_workers_send_the_same_entries(case: Case) -> None:
    cluster, own_supports = case.cluster(), Cluster(TopK(k=K), num_workers=N)
    for grads in random_grads(3):
        assert int((cluster.step(grads) != 0).sum()) <= K
        assert int((own_supports.step(grads) != 0).sum()) > K


@that_promise("unbiased")
def test_the_mean_aggregate_is_the_mean_gradient(case: Case) -> None:
    """|mean - true| <= 5.5 standard errors in all J entries and in their sum, each times its sign.

    Once in 170,000 a false alarm (151 · 3.8e-8): entries are of similar size and half of them are sent, so a
    mean of 400 draws is as good as normal. In the sum of all, a factor of 1.05 already shows.
    """
    (grads,) = (grads.sign() * (1 + grads.abs() % 1) for grads in random_grads(1))
    draws = torch.stack([case.cluster(seed=seed, k=J // 2).step(grads).double() for seed in range(400)])
    true = (torch.tensor(WEIGHTS, dtype=torch.float64)[:, None] * grads.double()).sum(0)
    rounding = N * torch.finfo(torch.float32).eps * grads.abs().amax(0)
    draws, true = (torch.cat([x, (x * true.sign()).sum(-1, keepdim=True)], dim=-1) for x in (draws, true))
    rounding = torch.cat([rounding, rounding.sum(-1, keepdim=True)])
    assert bool(((draws.mean(0) - true).abs() <= 5.5 * draws.std(0) / 400**0.5 + rounding).all())


@pytest.mark.parametrize(("case", "code"), with_codes(CASES), ids=str)
def test_zero_gradients_stay_finite(case: Case, code: str) -> None:
    cluster = case.cluster(value_code=code)
    zero, (some,) = torch.zeros(N, J), random_grads(1)
    only_first = some * torch.tensor([[1], [0], [0], [0]])
    assert not bool(cluster.step(zero).any())
    for grads in (zero, some, zero, only_first, -only_first, zero):
        assert bool(cluster.step(grads).isfinite().all())
    assert all(bool(tensor.isfinite().all()) for tensor in saved_tensors(cluster).values())


@all_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # the residual's, and another
def test_memory_of_the_caller_is_neither_changed_nor_kept(case: Case, dtype: torch.dtype) -> None:
    cluster, control = case.cluster(), case.cluster()
    buffer = torch.empty(N, J, dtype=dtype)
    for grads in random_grads(4, dtype=dtype):
        aggregate = cluster.step(buffer.copy_(grads))
        assert torch.equal(buffer, grads)
        assert torch.equal(aggregate, control.step(grads.clone()))
        buffer.fill_(torch.nan)
        aggregate.fill_(torch.nan)


@all_cases
def test_layout_and_autograd_of_the_gradients_do_not_matter(case: Case) -> None:
    cluster, control = case.cluster(), case.cluster()
    for grads in random_grads(3):
        transposed = grads.t().contiguous().t().requires_grad_()
        assert torch.equal(cluster.step(transposed), control.step(grads))
    assert_same(saved_tensors(cluster), saved_tensors(control))
    assert not any(tensor.requires_grad for tensor in saved_tensors(cluster).values())


@all_cases
def test_a_saved_state_goes_on_as_if_nothing_happened(case: Case) -> None:
    whole, first, second = (case.cluster(value_code="4bit") for _ in range(3))
    grads = random_grads(6)
    for grad in grads[:3]:
        whole.step(grad)
        first.step(grad)
    saved, file = first.state_dict(), io.BytesIO()
    first.step(grads[0])  # what was saved is a copy: going on does not change it
    torch.save(saved, file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    for grad in grads[3:]:
        assert torch.equal(second.step(grad), whole.step(grad))
    assert_same(saved_tensors(second), saved_tensors(whole))


@all_cases
def test_a_worker_of_weight_zero_sends_nothing_and_keeps_its_state(case: Case) -> None:
    weights = [0.5, 0.0, 0.5, 0.0]
    before = case.cluster()
    for grads in random_grads(3):
        before.step(grads)
    saved = before.state_dict()
    saved["weights"] = torch.tensor(weights, dtype=torch.float64)
    saved["weight"] = torch.tensor(weights).unsqueeze(-1)
    one, other = case.cluster(weights), case.cluster(weights)
    if "owed" in saved["state"]:  # others own the entries now
        saved["state"]["owed"] = torch.zeros(N, J // 2)
    for cluster in (one, other):
        cluster.load_state_dict(saved)
    for grads in random_grads(3, seed=1):
        changed = grads.clone()
        changed[1], changed[3] = 1e30, 0.0
        aggregate = one.step(grads)
        assert bool(aggregate.isfinite().all())
        assert torch.equal(aggregate, other.step(changed))
        assert one.last_step.payload_bytes[[1, 3]].tolist() == [0, 0]
        assert one.last_step.num_entries[[1, 3]].tolist() == [0, 0]
        assert bool((one.last_step.payload_bytes[[0, 2]] > 0).all())
    assert before.state is not None and one.state is not None
    for name, rule in type(before.state).rules().items():
        if rule not in ("shared", "owned"):
            assert torch.equal(getattr(one.state, name)[[1, 3]], getattr(before.state, name)[[1, 3]]), name
    assert_same(saved_tensors(one), saved_tensors(other))


@all_cases
def test_refused_gradients_change_nothing(case: Case) -> None:
    cluster, control = case.cluster(), case.cluster()
    good = random_grads(4)
    for grads in good[:2]:
        cluster.step(grads)
        control.step(grads)
    bad = [good[2].clone() for _ in range(3)]
    bad[0][2, 5], bad[1][2, 0], bad[2][2, J - 1] = torch.nan, torch.inf, -torch.inf
    for grads in bad:
        with pytest.raises(GradientError, match="grads of worker 2 must be finite, got NaN or inf"):
            cluster.step(grads)
    for grads in (good[2][:, 1:], good[2][1:], good[2].long(), good[2].double(), good[2][None]):
        with pytest.raises(GradientError, match="grads must"):
            cluster.step(grads)
    assert_same(saved_tensors(cluster), saved_tensors(control))
    for grads in good[2:]:
        assert torch.equal(cluster.step(grads), control.step(grads))


@that_promise("exact_k")
def test_a_refused_k_or_density_changes_nothing(case: Case) -> None:
    if "returned" not in case.options:  # which goes with a density
        cluster = Cluster(case.make(k=K), num_workers=N)
        with pytest.raises(ArgumentError, match=f"k must be at most J = 4, got {K}"):
            cluster.step(torch.ones(N, 4))
        cluster.step(torch.ones(N, K))  # the refused step has not fixed J
    densities = [0.5, 0.5, 1.5]
    scheduled = case.cluster(density=lambda step: densities[step])
    for grads in random_grads(2):
        scheduled.step(grads)
    before = saved_tensors(scheduled)
    with pytest.raises(ArgumentError, match=r"density must be in \(0, 1\], got 1.5"):
        scheduled.step(random_grads(3)[2])
    assert_same(before, saved_tensors(scheduled))


# One variant of each algorithm: the law of a single step, coded or not, is tested on all of them above.
EXACT = [case for case in cases_that_promise("conserves") if case.is_first and case.sends_exactly("float32")]


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_hundreds_of_steps_lose_nothing(case: Case) -> None:
    """Small whole gradients and weights that are powers of two: every sum is exact, so is the balance."""
    weights = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    cluster = case.cluster(weights.tolist())
    num_steps = 300 if case.name in ("topk", "regtopk") else 100
    generator = torch.Generator().manual_seed(0)
    all_grads = torch.randint(-3, 4, (num_steps, N, J), generator=generator).float()
    applied = torch.zeros(J).double()
    for grads in all_grads:
        applied += cluster.step(grads)
    kept = _residual(cluster.state, N, J).double()
    assert torch.equal(applied + weights @ kept, weights @ all_grads.double().sum(0))


def _residual(state: State | None, *shape: int) -> Tensor:
    """A copy of the residual; zero where an algorithm keeps none."""
    residual: Tensor | None = getattr(state, "residual", None)
    return torch.zeros(shape) if residual is None else residual.clone()


def _kept(states: list[State]) -> tuple[Tensor, Tensor]:
    """The residuals, (N, J), and what the owners owe, (J,): entry j is number j // N of owner j mod N."""
    residuals = torch.stack([_residual(state, J) for state in states])
    owed = [state.state_dict().get("owed", torch.zeros(J)) for state in states]
    return residuals, torch.stack(owed, dim=-1).flatten()[:J].to(residuals)


def _ulp(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, torch.inf)) - x
