"""Ranks and the simulator, fed the same gradients, must agree bit for bit, and count the same bytes."""

from dataclasses import dataclass, field
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
from tests.algorithms.cases import CASES, LAYOUT, Case, random_grads
from tests.distributed.conversations import CodedSums, ManyRounds, RunningSum, Threshold
from tests.distributed.ranks import Ranks

NUM_STEPS = 3  # the second is of zeros
MORE_STEPS = 6  # every rank is a Broadcast's source once, and some algorithms decide something every 5 steps
WEIGHTS = {
    2: {"equal": None, "unequal": [0.7, 0.3], "one of zero": [0.0, 1.0]},
    4: {"equal": None, "unequal": [0.4, 0.3, 0.2, 0.1], "one of zero": [0.0, 0.5, 0.3, 0.2]},
}
ON_RANKS = [case for case in CASES if case.name != "global-topk"]  # the oracle: a cluster refuses it
FIRST_VARIANTS = [case for case in ON_RANKS if case.is_first]
# Of these, every kind of request, several in a step, a state that is shared, and one that listens.
KINDS = "topk regtopk dgc ef21 consensus dense powersgd sketch gtopk adaptive demo"
OF_EACH_KIND = [case for case in FIRST_VARIANTS if case.name in KINDS.split()]
# Options that change what is asked of a cluster. Others change what a worker computes, as the contract tests.
ASKED_BY = {"algorithm", "impute", "returned", "sketch_code", "sum_code"}
OTHER_VARIANTS = [case for case in ON_RANKS if not case.is_first and ASKED_BY & case.options.keys()]


class Net(nn.Module):
    """Parameters of the kinds and sizes that the contract's layout has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 5, 5, bias=False)
        self.linear = nn.Linear(10, 4, bias=False)
        self.norm = nn.LayerNorm(10, bias=False)


class Wide(nn.Module):
    """1499 entries: twelve blocks of a code, the last not full, and owners that have one entry less."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Parameter(torch.zeros(s)) for s in ((30, 40), (40,), (7, 37)))


@dataclass
class Run:
    layout: Layout
    aggregates: list[Tensor] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def grads_of(num_steps: int, num_ranks: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """(T, N, 1499), entries of very different size, and one step of zeros."""
    generator = torch.Generator().manual_seed(3)
    grads = torch.randn(num_steps, 4, 1499, generator=generator) * torch.logspace(-2, 2, 1499)
    grads[num_steps - 2] = 0
    return grads[:, :num_ranks].to(dtype)


def report(step: int) -> dict[str, float]:
    """A loss that falls, and a time that changes."""
    return {"loss": 1 / (1 + step), "time_s": 0.1 + 0.01 * (step % 3)}


def on_rank(algorithm: Algorithm[Any], net: nn.Module, grads: Any, weights: Any, options: Any) -> Run:
    rank = dist.get_rank()
    weight = None if weights is None else weights[rank]
    exchange = regtopk.Exchange(net, algorithm, weight=weight, **options)
    run = Run(exchange._steps.buckets.all[0].layout)
    for step, vectors in enumerate(grads):
        parts = vectors[rank].split([p.numel() for p in net.parameters()])
        for p, part in zip(net.parameters(), parts, strict=True):
            p.grad = part.reshape(p.shape).clone()
        exchange.report(**report(step))
        exchange.step()
        run.aggregates.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
        run.counts.append([int(getattr(exchange.last_step, name)) for name in NAMES])
        if "residual_dtype" in options:  # it goes on in another
            saved = exchange.state_dict()
            exchange = regtopk.Exchange(net, algorithm, weight=weight, **options)
            exchange.load_state_dict(saved)
    (bucket,) = exchange._steps.buckets.all
    run.state = bucket.state.state_dict()
    return run


def compare(
    ranks: Ranks,
    algorithm: Algorithm[Any],
    grads: Any = None,
    *,
    net: nn.Module | None = None,
    weights: str = "unequal",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> None:
    num_ranks, options = ranks.num_ranks, {"collective": "all_gather", **options}
    grads = grads_of(NUM_STEPS, num_ranks, dtype) if grads is None else grads
    shares = WEIGHTS[num_ranks][weights]
    runs: list[Run] = ranks.run(on_rank, algorithm, (net or Wide()).to(dtype), grads, shares, options)
    own = {name: options[name] for name in ("index_code", "residual_dtype") if name in options}
    cluster = Cluster(algorithm, num_workers=num_ranks, weights=shares, layout=runs[0].layout, **own)
    for step, vectors in enumerate(grads):
        cluster.report(**report(step))
        expected, counts = cluster.step(vectors), cluster.last_step.state_dict()
        for rank, run in enumerate(runs):
            torch.testing.assert_close(run.aggregates[step], expected, rtol=0, atol=0)
            assert run.counts[step][3] == cluster.last_step.num_entries[rank]
            if options["collective"] != "split":  # whose bytes the simulator does not count
                assert run.counts[step] == [int(counts[name].expand(num_ranks)[rank]) for name in NAMES]
    assert cluster.state is not None
    for name, rule in type(cluster.state).rules().items():
        tensor = getattr(cluster.state, name)
        for rank, run in enumerate(runs):
            assert torch.equal(run.state[name], tensor if rule == "shared" else tensor[rank]), name


def check(ranks: Ranks, case: Case, code: str, num_steps: int = NUM_STEPS, **options: Any) -> None:
    grads = random_grads(num_steps, ranks.num_ranks, LAYOUT.numel)
    compare(ranks, case.make(value_code=code), grads, net=Net(), **options)


@pytest.mark.parametrize("case", FIRST_VARIANTS + OTHER_VARIANTS, ids=str)
def test_every_algorithm(two_ranks: Ranks, case: Case) -> None:
    check(two_ranks, case, "4bit" if "4bit" in case.codes else case.codes[0], MORE_STEPS)


@pytest.mark.parametrize("case", OF_EACH_KIND, ids=str)
def test_every_kind_of_request_split_with_an_idle_rank(four_ranks: Ranks, case: Case) -> None:
    check(four_ranks, case, case.codes[-1], collective="split", weights="one of zero")


@pytest.mark.parametrize("collective", ["all_gather", "split"])
@pytest.mark.parametrize(("num_ranks", "weights"), [(2, "equal"), (4, "unequal"), (4, "one of zero")])
def test_imputation(
    two_ranks: Ranks, four_ranks: Ranks, num_ranks: int, weights: str, collective: str
) -> None:
    ranks = {2: two_ranks, 4: four_ranks}[num_ranks]
    own: dict[str, Any] = {"weights": weights, "collective": collective}
    algorithms: list[Any] = [
        regtopk.TopK(density=0.07, impute=0.35, value_code="4bit"),
        regtopk.TopK(density=0.01, impute=0.7),  # the sum is cleared entry by entry
    ]
    if weights == "unequal":
        algorithms += [regtopk.RegTopK(density=0.3, impute=0.5), regtopk.DGC(density=0.02, impute=1.0)]
        compare(ranks, regtopk.TopK(density=0.02, impute=0.5), dtype=torch.float64, **own)
    for algorithm in algorithms:
        compare(ranks, algorithm, **own)


@pytest.mark.parametrize(
    ("collective", "weights"),
    [("all_gather", "equal"), ("all_gather", "one of zero"), *(("split", weights) for weights in WEIGHTS[4])],
)
def test_any_weights(four_ranks: Ranks, weights: str, collective: str) -> None:
    flagship = regtopk.RegTopK(density=0.02, value_code="4bit" if weights == "unequal" else "float32")
    compare(four_ranks, ManyRounds(k=20), grads_of(4), weights=weights, collective=collective)
    algorithms: list[Any] = [flagship, Threshold(threshold=30.0)]
    if weights == "equal":
        algorithms.append(Threshold(threshold=1e9))  # nobody sends
    for algorithm in algorithms:
        compare(four_ranks, algorithm, weights=weights, collective=collective)


@pytest.mark.parametrize("index_code", ["rice", "raw32"])
@pytest.mark.parametrize("collective", ["all_gather", "split"])
def test_index_codes_change_bytes_only(four_ranks: Ranks, index_code: str, collective: str) -> None:
    signs: list[Any] = [regtopk.TopK(density=0.2, value_code="sign", returned=part) for part in (0.3, 1.0)]
    for algorithm in (regtopk.RegTopK(density=0.05, value_code="4bit"), ManyRounds(k=20), *signs):
        compare(four_ranks, algorithm, index_code=index_code, collective=collective)


def test_an_algorithm_may_keep_what_it_received_and_returned(four_ranks: Ranks) -> None:
    compare(four_ranks, RunningSum(), grads_of(MORE_STEPS))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(four_ranks: Ranks, dtype: torch.dtype) -> None:
    for collective in ("all_gather", "split"):
        compare(four_ranks, regtopk.RegTopK(k=50), collective=collective, dtype=dtype)
    compare(four_ranks, regtopk.Dense(), dtype=dtype)


CODES = [("float32", "float16", "unequal"), ("int8", "2bit", "unequal")]
CODES += [("4bit", "4bit", weights) for weights in WEIGHTS[4]]


@pytest.mark.parametrize(("code", "sum_code", "weights"), CODES)
def test_coded_sums_and_their_loss(four_ranks: Ranks, code: str, sum_code: str, weights: str) -> None:
    compare(four_ranks, CodedSums(code=code, sum_code=sum_code), weights=weights)
