"""The cases that a calibration times, each on points of one or two lines.

A case runs the library's own algorithms, driver and codes for one rank of a cluster whose other ranks are
copies of it (`echo`), so nothing travels.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from statistics import median

import torch
from torch import Tensor

from regtopk.core.algorithm import converse
from regtopk.core.codes import is_lossless, quantise
from regtopk.core.requests import DenseSum, Gather, Request, SparseSum
from regtopk.core.sparse import SparseGradient
from regtopk.core.worker import Layout, Worker
from regtopk.distributed import driver, layout
from regtopk.plan.asked import make_algorithm
from regtopk.plan.bench import Bench, typical
from regtopk.plan.costs import Units
from regtopk.plan.echo import echo_rank
from regtopk.plan.methods import CODES, MIDDLE_NUMEL, numel_units
from regtopk.plan.moves import answer

MESSAGES = {"gather": (*CODES, "sign", "none"), "split": (*CODES, "sign"), "dense": CODES}
SMALL_NUMEL, LARGE_NUMEL = 2**20, 2**24
SLOW_S = 0.3  # what would take longer on a larger vector is not timed on it
_MATRIX = 512  # all sizes are powers of two: copies answer only where the ranks' regions are equal
_NUM_REPEATS = 7

Point = tuple[str, Units, float]  # a line's name, units of work, and the seconds they took


def algorithm_points(name: str, bench: Bench) -> Iterator[Point]:
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
        seconds, count = _time_algorithm(name, density, numel, bench)
        yield f"select {name}", {"calls": 1, "entries": count, **numel_units(numel)}, seconds
        before = numel


def _time_algorithm(name: str, density: float, numel: int, bench: Bench) -> tuple[float, int]:
    matrices = [(str(n), (_MATRIX, _MATRIX), "linear") for n in range(numel // _MATRIX**2)]
    algorithm, device = make_algorithm(name, density=density), bench.device
    weight = torch.tensor(0.5, device=device)
    worker = Worker(weight, torch.tensor(0, device=device), 2, 1, Layout.of_shapes(matrices))
    rank = echo_rank(2, now=bench.now)
    state = algorithm.init(worker)
    grad = torch.randn(numel, device=device)

    def step() -> float:
        rank.begin(device)
        with rank.timer.phase("select_s"):
            converse(algorithm.exchange(grad, state, worker), partial(driver.answer, rank))
        return rank.timer.seconds()["select_s"]

    seconds = typical(step)
    return seconds, rank.record.num_entries


def message_points(kind: str, code: str, bench: Bench) -> Iterator[Point]:
    """Encoding one's own messages of a kind and decoding everybody's.

    Args:
        kind: "gather", "split" or "dense".
        code: of the values; "none" for sets of indices, which are gathered.
        bench: which times it.
    """
    sizes = ((SMALL_NUMEL, 2**10), (MIDDLE_NUMEL, 2**13), (MIDDLE_NUMEL, 2**17))
    for num_workers, (numel, count) in product((2, 8), sizes):
        rank = echo_rank(num_workers, "split" if kind == "split" else "all_gather", bench.now)
        request = _request(kind, code, numel, count, bench.device)
        times: list[dict[str, float]] = []
        for _ in range(_NUM_REPEATS + 1):
            rank.begin(bench.device)
            total = driver.answer(rank, request)
            rank.spare = total if kind == "gather" and code != "none" else None  # as an exchange does
            times.append(rank.timer.seconds())
        answered = answer(request, num_workers, is_ragged=False, is_split=kind == "split")
        for phase, work in zip(("encode_s", "decode_s"), answered.work, strict=True):
            units = dict(work.units)
            if kind == "split":  # copies choose the same entries, so that the sum has no more than each
                units["entries"] = 2 * count if phase == "decode_s" else count + count / num_workers
            yield work.line, units, median(spent[phase] for spent in times[1:])


def _request(kind: str, code: str, numel: int, count: int, device: torch.device) -> Request:
    indices = torch.arange(count, device=device) * (numel // count)
    if code == "none":
        return Gather(indices, numel=numel)
    values, weight = quantise(torch.randn(count, device=device), code), torch.tensor(0.5, device=device)
    if kind == "dense":
        return DenseSum(values, weight, code)
    return SparseSum(SparseGradient(indices, values, numel, code=code), weight)


def code_points(code: str, bench: Bench) -> Iterator[Point]:
    """Rounding values to a code, and returning what it lost to the residual."""
    for count in (2**12, 2**17):
        device = bench.device
        values, residual = torch.randn(count, device=device), torch.zeros(MIDDLE_NUMEL, device=device)
        indices = torch.arange(count, device=device) * (MIDDLE_NUMEL // count)

        def round_off(values: Tensor = values, residual: Tensor = residual, at: Tensor = indices) -> None:
            residual.scatter_add_(-1, at, values - quantise(values, code))

        seconds = 0.0 if is_lossless(code) else bench.typical(round_off)
        yield f"quantise {code}", {"calls": 1, "entries": count}, seconds


def exchange_points(bench: Bench) -> Iterator[Point]:
    """What an exchange does with the whole vector: copy it in, look for NaN, copy the aggregate out."""
    device = bench.device
    flat = torch.zeros(MIDDLE_NUMEL, device=device)
    grads = [torch.randn(_MATRIX, _MATRIX, device=device) for _ in range(MIDDLE_NUMEL // _MATRIX**2)]

    def prepare_and_write_back() -> None:
        layout.copy_to_flat_(flat, grads)
        torch.isfinite(torch.stack(torch.aminmax(flat))).all()
        layout.copy_from_flat_(grads, flat)

    yield "exchange", {"numel": MIDDLE_NUMEL}, bench.typical(prepare_and_write_back)


def peer_points(bench: Bench) -> Iterator[Point]:
    """Top-k as other libraries do it: torch.topk, and an index_add_ of what all of two workers sent."""
    numel = MIDDLE_NUMEL  # a bucket's size; its work grows faster than small vectors suggest
    device = bench.device
    for k in (2**12, 2**18):
        residual, grad = torch.zeros(numel, device=device), torch.randn(numel, device=device)

        def step(residual: Tensor = residual, grad: Tensor = grad, k: int = k) -> None:
            chosen = residual.add_(grad).abs().topk(k, sorted=False).indices
            values = residual[chosen]
            residual[chosen] = 0
            indices = chosen.to(torch.int32).repeat(2)
            torch.zeros_like(grad).index_add_(0, indices.long(), values.repeat(2).div_(2))

        yield "peer-topk", {"numel": numel, "entries": 2 * k}, bench.typical(step)
