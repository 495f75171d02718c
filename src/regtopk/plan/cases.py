"""The work of this library that a calibration times.

It runs the real algorithms, driver and codes for one rank of a cluster whose other ranks are copies of it, so
nothing travels.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.algorithm import converse
from regtopk.core.codes import is_lossless, quantise
from regtopk.core.requests import DenseSum, Gather, Request, SparseSum
from regtopk.core.sparse import SparseGradient
from regtopk.core.worker import Layout, Worker
from regtopk.distributed import driver, layout
from regtopk.distributed.collectives import Collectives
from regtopk.distributed.rank import Rank
from regtopk.plan.asked import make_algorithm
from regtopk.plan.bench import Bench, typical
from regtopk.plan.exchange import Work, answer
from regtopk.plan.methods import MIDDLE_NUMEL, numel_units

SMALL_NUMEL, LARGE_NUMEL = 2**20, 2**24
SLOW_S = 0.3  # an algorithm that would take longer on the next vector is not timed on it
_MATRIX = 512  # all sizes are powers of two: copies can answer only if all ranks' regions are equal

Point = tuple[Work, float]  # some work, and the seconds it took


class Echo(Collectives):
    """The collectives of rank 0 of N, whose other ranks send the same; `calls` lists each and its bytes."""

    def __init__(self, num_workers: int) -> None:
        self.rank = 0
        self.num_workers = num_workers
        self.calls: list[tuple[str, int]] = []

    def all_gather(self, tensor: Tensor) -> Tensor:
        """N copies of the tensor."""
        self.calls.append(("all_gather", tensor.nbytes))
        return tensor.repeat(self.num_workers, 1)

    def all_to_all(self, parts: Sequence[Tensor], sizes: list[int]) -> list[Tensor]:
        """N copies of the part for rank 0."""
        self.calls.append(("all_to_all", sum(part.nbytes for part in parts[1:])))
        return [parts[0]] * self.num_workers

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """N times the tensor."""
        self.calls.append(("all_reduce", tensor.nbytes))
        return tensor * self.num_workers

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor."""
        self.calls.append(("broadcast", tensor.nbytes))
        return tensor


def echo_rank(num_workers: int, *, is_split: bool = False, bench: Bench | None = None) -> Rank:
    """Rank 0 of N, whose messages the other ranks repeat, with the clock of a bench."""
    weights = torch.full((num_workers,), 1 / num_workers, dtype=torch.float64)
    now = (bench or Bench(torch.device("cpu"))).now
    return Rank(Echo(num_workers), weights, collective="split" if is_split else "all_gather", now=now)


def algorithm_points(bench: Bench, name: str) -> Iterator[Point]:
    """What an algorithm itself computes on a standard normal gradient, without its messages."""
    seconds, before = 0.0, 1
    for numel, density in (
        (SMALL_NUMEL, 1 / 1024),
        (SMALL_NUMEL, 1 / 16),
        (MIDDLE_NUMEL, 1 / 1024),
        (LARGE_NUMEL, 1 / 1024),
    ):
        if seconds * numel / before > SLOW_S:
            return
        seconds, count = _time_algorithm(bench, name, density, numel)
        yield Work(f"select {name}", {"calls": 1, "entries": count, **numel_units(numel)}), seconds
        before = numel


def _time_algorithm(bench: Bench, name: str, density: float, numel: int) -> tuple[float, int]:
    """Seconds of a step, and how many entries it sent."""
    matrices = [(str(n), (_MATRIX, _MATRIX), "linear") for n in range(numel // _MATRIX**2)]
    device = bench.device
    weight, index = torch.tensor(0.5, device=device), torch.tensor(0, device=device)
    worker = Worker(weight, index, 2, 1, Layout.of_shapes(matrices))
    algorithm, rank = make_algorithm(name, density), echo_rank(2, bench=bench)
    state = algorithm.init(worker)
    grad = torch.randn(numel, device=device)

    def step() -> dict[str, float]:
        rank.begin(device)
        with rank.timer.phase("select_s"):
            converse(algorithm.exchange(grad, state, worker), partial(driver.answer, rank))
        return {"select_s": rank.timer.seconds()["select_s"]}

    return typical(step)["select_s"], rank.record.num_entries


def message_points(bench: Bench, kind: str, code: str) -> Iterator[Point]:
    """Encoding one's own messages of a kind and decoding everybody's.

    Args:
        bench: which times it.
        kind: "gather", "split" or "dense".
        code: of the values; "none" for sets of indices, which are gathered.
    """
    sizes = ((SMALL_NUMEL, 2**10), (MIDDLE_NUMEL, 2**13), (MIDDLE_NUMEL, 2**17))
    for num_workers, (numel, count) in product((2, 8), sizes):
        is_split = kind == "split"
        rank = echo_rank(num_workers, is_split=is_split, bench=bench)
        request = _request(kind, code, numel, count, bench.device)

        def run(rank: Rank = rank, request: Request = request) -> dict[str, float]:
            rank.begin(bench.device)
            total = driver.answer(rank, request)
            rank.spare = total if kind == "gather" and code != "none" else None  # reused, as in an exchange
            return rank.timer.seconds()

        seconds = typical(run)
        encode, decode = answer(request, num_workers, is_split=is_split).work
        if is_split:  # copies choose the same entries, so that the sum has no more than each
            encode.units["entries"], decode.units["entries"] = count + count / num_workers, 2 * count
        yield encode, seconds["encode_s"]
        yield decode, seconds["decode_s"]


def _request(kind: str, code: str, numel: int, count: int, device: torch.device) -> Request:
    indices = torch.arange(count, device=device) * (numel // count)
    if code == "none":
        return Gather(indices, numel=numel)
    values, weight = quantise(torch.randn(count, device=device), code), torch.tensor(0.5, device=device)
    if kind == "dense":
        return DenseSum(values, weight, code)
    return SparseSum(SparseGradient(indices, values, numel, code=code), weight)


def code_points(bench: Bench, code: str) -> Iterator[Point]:
    """Rounding values to a code, and returning what it lost to the residual."""
    residual = torch.zeros(MIDDLE_NUMEL, device=bench.device)
    for count in (2**12, 2**17):
        values = torch.randn(count, device=bench.device)
        indices = torch.arange(count, device=bench.device) * (MIDDLE_NUMEL // count)

        def round_off(values: Tensor = values, indices: Tensor = indices) -> None:
            residual.scatter_add_(-1, indices, values - quantise(values, code))

        seconds = 0.0 if is_lossless(code) else bench.typical(round_off)
        yield Work(f"quantise {code}", {"calls": 1, "entries": count}), seconds


def exchange_points(bench: Bench) -> Iterator[Point]:
    """What an exchange does with the whole vector: copy it in, look for NaN, copy the aggregate out."""
    flat = torch.zeros(MIDDLE_NUMEL, device=bench.device)
    grads = [torch.randn(_MATRIX, _MATRIX, device=bench.device) for _ in range(MIDDLE_NUMEL // _MATRIX**2)]
    nowhere = torch.zeros(1, dtype=torch.int64, device=bench.device)
    support = kernels.Support(nowhere.unsqueeze(0), nowhere)

    def prepare_and_write_back() -> None:
        kernels.join_(flat, grads)
        layout.write_(grads, flat, support)

    yield Work("exchange", {"numel": MIDDLE_NUMEL}), bench.typical(prepare_and_write_back)
