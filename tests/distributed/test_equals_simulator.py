"""Ranks and the simulator, fed the same gradients, must agree bit for bit, and count the same bytes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import regtopk
from regtopk.core.algorithm import Algorithm
from regtopk.core.traffic import NAMES
from regtopk.core.worker import Layout
from regtopk.simulate import Cluster
from tests.distributed.conversations import CodedSums, ManyRounds, RunningSum, Threshold
from tests.distributed.ranks import Ranks

NUM_STEPS = 6  # every rank is a Broadcast's source once, and one step is of zeros
SHAPES = {"one": (30, 40), "two": (40,), "three": (10, 26)}
J = 1500  # twelve blocks of a code, the last not full
WEIGHTS = {"equal": None, "unequal": [0.4, 0.3, 0.2, 0.1], "one of zero": [0.5, 0.0, 0.2, 0.3]}
WEIGHTS_OF_TWO = {"equal": None, "unequal": [0.7, 0.3], "one of zero": [0.0, 1.0]}


Result = tuple[Tensor, Tensor, dict[str, Tensor]]  # aggregates, residual, and counts of every step


def grads_of(num_steps: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(T, 4, J), entries of very different size, and one step of zeros."""
    generator = torch.Generator().manual_seed(3)
    grads = torch.randn(num_steps, 4, J, generator=generator) * torch.logspace(-2, 2, J)
    grads[min(7, num_steps - 2)] = 0
    return grads.to(dtype)


def layout() -> Layout:
    return Layout.of_shapes((name, shape, "other") for name, shape in SHAPES.items())


def simulated(algorithm: Algorithm[Any], grads: Tensor, weights: Any, index_code: str) -> list[Result]:
    """Every worker's result."""
    num_workers = grads.shape[1]
    cluster = Cluster(
        algorithm, num_workers=num_workers, weights=weights, index_code=index_code, layout=layout()
    )
    aggregates, counts = [], []
    for step in grads:
        aggregates.append(cluster.step(step).clone())
        counts.append(torch.stack([cluster.last_step.state_dict()[name] for name in NAMES]))
    assert cluster.state is not None
    state = cluster.state.state_dict()
    residual = state.get("residual", torch.zeros(num_workers, 1))
    by_worker = torch.stack(counts).unbind(-1)
    return [
        (torch.stack(aggregates), residual[n], dict(zip(NAMES, by_worker[n].unbind(-1), strict=True)))
        for n in range(num_workers)
    ]


def on_rank(algorithm: Algorithm[Any], grads: Tensor, weights: Any, options: dict[str, Any]) -> Result:
    """This rank's result."""
    rank = dist.get_rank()
    parameters = {name: nn.Parameter(torch.zeros(shape, dtype=grads.dtype)) for name, shape in SHAPES.items()}
    weight = None if weights is None else weights[rank]
    exchange = regtopk.Exchange(parameters.items(), algorithm, weight=weight, **options)
    aggregates, counts = [], []
    for step in grads:
        parts = step[rank].split([p.numel() for p in parameters.values()])
        for p, part in zip(parameters.values(), parts, strict=True):
            p.grad = part.view_as(p).clone()
        exchange.step()
        aggregates.append(torch.cat([p.grad.flatten() for p in parameters.values() if p.grad is not None]))
        counts.append(torch.tensor([int(getattr(exchange.last_step, name)) for name in NAMES]))
    (bucket,) = exchange._steps.buckets.all
    residual = bucket.state.state_dict().get("residual", torch.zeros(1))
    return torch.stack(aggregates), residual, dict(zip(NAMES, torch.stack(counts).unbind(-1), strict=True))


def compare(
    ranks: Ranks,
    algorithm: Algorithm[Any],
    *,
    weights: str = "unequal",
    index_code: str = "elias-fano",
    collective: str = "all_gather",
    num_steps: int = NUM_STEPS,
    dtype: torch.dtype = torch.float32,
) -> None:
    grads = grads_of(num_steps, dtype)[:, : ranks.num_ranks]
    own_weights = {2: WEIGHTS_OF_TWO, 4: WEIGHTS}[ranks.num_ranks][weights]
    expected = simulated(algorithm, grads, own_weights, index_code)
    options = {"index_code": index_code, "collective": collective}
    found = ranks.run(on_rank, algorithm, grads, own_weights, options)
    for (aggregates, residual, counts), want in zip(found, expected, strict=True):
        torch.testing.assert_close(aggregates, want[0], rtol=0, atol=0)
        torch.testing.assert_close(residual, want[1], rtol=0, atol=0)
        if collective == "all_gather":
            torch.testing.assert_close(counts, want[2], rtol=0, atol=0)


FLAGSHIPS: list[Any] = [
    regtopk.RegTopK(density=0.07),
    regtopk.RegTopK(density=0.07, value_code="4bit"),
    regtopk.TopK(density=0.07, value_code="4bit"),
    regtopk.RandomK(density=0.07),
]


@pytest.mark.parametrize("algorithm", FLAGSHIPS, ids=lambda a: f"{a.name}-{a.value_code}")
def test_twenty_steps_bit_for_bit(four_ranks: Ranks, algorithm: Any) -> None:
    compare(four_ranks, algorithm, num_steps=20)


@pytest.mark.parametrize("algorithm", [FLAGSHIPS[0], FLAGSHIPS[2]], ids=lambda a: f"{a.name}-{a.value_code}")
def test_split_by_region_bit_for_bit(four_ranks: Ranks, algorithm: Any) -> None:
    compare(four_ranks, algorithm, collective="split", num_steps=10)


@pytest.mark.parametrize("collective", ["all_gather", "split"])
@pytest.mark.parametrize(("num_ranks", "weights"), [(2, "equal"), (4, "unequal"), (4, "one of zero")])
def test_imputation(
    two_ranks: Ranks, four_ranks: Ranks, num_ranks: int, weights: str, collective: str
) -> None:
    ranks = {2: two_ranks, 4: four_ranks}[num_ranks]
    algorithms: list[Any] = [
        regtopk.TopK(density=0.07, impute=0.35, value_code="4bit"),
        regtopk.TopK(density=0.01, impute=0.7),  # the sum is cleared entry by entry
    ]
    if weights == "unequal":
        algorithms += [
            regtopk.RegTopK(density=0.3, impute=0.5),
            regtopk.DGC(density=0.02, impute=1.0),
        ]
        own: dict[str, Any] = {"weights": weights, "collective": collective, "dtype": torch.float64}
        compare(ranks, regtopk.TopK(density=0.02, impute=0.5), num_steps=4, **own)
    for algorithm in algorithms:
        compare(ranks, algorithm, weights=weights, collective=collective, num_steps=4)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("collective", ["all_gather", "split"])
def test_any_weights(four_ranks: Ranks, weights: str, collective: str) -> None:
    compare(four_ranks, regtopk.RegTopK(density=0.02), weights=weights, collective=collective)
    compare(four_ranks, ManyRounds(k=20), weights=weights, collective=collective)


@pytest.mark.parametrize("index_code", ["rice", "raw32"])
@pytest.mark.parametrize("collective", ["all_gather", "split"])
def test_index_codes_change_bytes_only(four_ranks: Ranks, index_code: str, collective: str) -> None:
    for algorithm in (regtopk.RegTopK(density=0.05, value_code="4bit"), ManyRounds(k=20)):
        compare(four_ranks, algorithm, index_code=index_code, collective=collective)


def test_an_algorithm_may_keep_what_it_received_and_returned(four_ranks: Ranks) -> None:
    compare(four_ranks, RunningSum())


@pytest.mark.parametrize("collective", ["all_gather", "split"])
@pytest.mark.parametrize("threshold", [30.0, 1e9], ids=["some", "none at all"])
def test_messages_of_any_size(four_ranks: Ranks, threshold: float, collective: str) -> None:
    for weights in ("unequal", "one of zero"):
        compare(four_ranks, Threshold(threshold=threshold), weights=weights, collective=collective)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(four_ranks: Ranks, dtype: torch.dtype) -> None:
    for collective in ("all_gather", "split"):
        compare(four_ranks, regtopk.RegTopK(k=50), collective=collective, dtype=dtype)
    compare(four_ranks, regtopk.Dense(), dtype=dtype, num_steps=3)


@pytest.mark.parametrize(
    ("codes", "weights"),
    [
        (("float32", "float16"), "unequal"),
        (("int8", "2bit"), "unequal"),
        *((("4bit", "4bit"), weights) for weights in WEIGHTS),
    ],
    ids=str,
)
def test_coded_sums_and_their_loss(four_ranks: Ranks, codes: tuple[str, str], weights: str) -> None:
    compare(four_ranks, CodedSums(code=codes[0], sum_code=codes[1]), weights=weights)


def test_coded_sums_lose_nothing(four_ranks: Ranks) -> None:
    grads = grads_of(10)
    found = four_ranks.run(on_rank, CodedSums(), grads, WEIGHTS["unequal"], {})
    weight = torch.tensor(WEIGHTS["unequal"], dtype=torch.float64).unsqueeze(-1)
    applied = found[0][0].double().sum(0)
    kept = (weight * torch.stack([residual for _, residual, _ in found]).double()).sum(0)
    due = (weight * grads.double()).sum((0, 1))
    # float32 sums of ten steps: rounding of 2^-24 a step of numbers up to 1e3
    torch.testing.assert_close(applied + kept, due, rtol=0, atol=10 * 2**-24 * 1e3)


def test_sums_of_the_backend_are_close(four_ranks: Ranks) -> None:
    grads = grads_of(3)
    expected = simulated(regtopk.Dense(), grads, WEIGHTS["unequal"], "elias-fano")
    found = four_ranks.run(on_rank, regtopk.Dense(), grads, WEIGHTS["unequal"], {"deterministic": False})
    for rank in range(4):
        # four terms below 1e3 in another order: three roundings
        torch.testing.assert_close(found[rank][0], expected[rank][0], rtol=0, atol=3 * 2**-24 * 1e3)
