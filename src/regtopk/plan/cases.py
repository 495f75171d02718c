"""The cases that a calibration times: each gives points of one or two lines.

A case does real work of the library (its algorithms, its driver, its codes) among echoes.
"""

from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from itertools import product
from statistics import NormalDist, median
from typing import Any

import torch
from torch import Tensor

from regtopk.algorithms import ALGORITHMS, RegTopK
from regtopk.core.algorithm import Algorithm, converse
from regtopk.core.codes import is_lossless, quantise
from regtopk.core.requests import DenseSum, Gather, Request, SparseSum
from regtopk.core.sparse import SparseGradient
from regtopk.core.worker import Layout, Worker
from regtopk.distributed import layout
from regtopk.distributed.driver import answer
from regtopk.plan.clock import Clock, typical
from regtopk.plan.costs import Units
from regtopk.plan.echo import echo_rank

CODES = ("float32", "4bit", "2bit")
MESSAGES = {"gather": (*CODES, "sign", "none"), "split": (*CODES, "sign"), "dense": CODES}
SMALL_NUMEL, MIDDLE_NUMEL, LARGE_NUMEL = 2**20, 2**22, 2**24
SLOW_S = 0.3  # what would take longer on a larger vector is not timed on it
_MATRIX = 512  # all sizes are powers of two: echoes answer only where the ranks' regions are equal
_NUM_REPEATS = 7

Point = tuple[str, Units, float]  # a line's name, units of work, and the seconds they took


def numel_units(numel: float) -> Units:
    """A vector's entries, and those beyond what the processor keeps and the system hands out again at once.

    Large vectors take longer an entry: they do not fit caches, and memory for them is new every time.
    """
    return {"numel": numel, "numel beyond": max(0, numel - MIDDLE_NUMEL)}


def planned_algorithms() -> list[str]:
    """The algorithms that a cluster can run: all but those that peek."""
    return [name for name in ALGORITHMS if name != "global-topk"]


def make_algorithm(name: str, density: float, code: str = "float32") -> Algorithm[Any]:
    """An algorithm that sends about this share of a standard normal vector."""
    known = {f.name for f in fields(ALGORITHMS[name])}
    options: dict[str, Any] = {}
    if "value_code" in known:
        options["value_code"] = code
    if "density" in known:
        options["density"] = density
    if name == "strom":
        options["tau"] = NormalDist().inv_cdf(1 - density / 2)
    if name == "hard-threshold":
        options = {"threshold": NormalDist().inv_cdf(1 - density / 2), "value_code": code}
    if name == "adacomp":
        options["bin_other"] = max(1, round(1 / density))
    if name == "adaptive":
        options["algorithm"] = RegTopK(density=density, value_code=code)
    return ALGORITHMS[name](**options)


def algorithm_points(name: str, clock: Clock) -> Iterator[Point]:
    """What an algorithm itself computes, without its messages."""
    seconds, before = 0.0, 1
    for numel, density in (
        (SMALL_NUMEL, 1 / 1024),
        (SMALL_NUMEL, 1 / 16),
        (MIDDLE_NUMEL, 1 / 1024),
        (LARGE_NUMEL, 1 / 1024),
    ):
        if seconds * numel / before > SLOW_S:
            return
        seconds, count = _time_algorithm(make_algorithm(name, density), numel, clock)
        yield f"select {name}", {"calls": 1, "entries": count, **numel_units(numel)}, seconds
        before = numel


def _time_algorithm(algorithm: Algorithm[Any], numel: int, clock: Clock) -> tuple[float, int]:
    matrices = [(str(n), (_MATRIX, _MATRIX), "linear") for n in range(numel // _MATRIX**2)]
    device = clock.device
    weight = torch.tensor(0.5, device=device)
    worker = Worker(weight, torch.tensor(0, device=device), 2, 1, Layout.of_shapes(matrices))
    rank = echo_rank(2, now=clock.now)
    state = algorithm.init(worker)
    grad = torch.randn(numel, device=device)

    def step() -> float:
        rank.begin(device)
        with rank.timer.phase("select_s"):
            converse(algorithm.exchange(grad, state, worker), partial(answer, rank))
        return rank.timer.seconds()["select_s"]

    seconds = typical(step)
    return seconds, rank.record.num_entries


def message_points(kind: str, code: str, clock: Clock) -> Iterator[Point]:
    """Encoding one's own messages of a kind and decoding everybody's.

    Args:
        kind: "gather", "split" or "dense".
        code: of the values; "none" for sets of indices, which are gathered.
        clock: which times it.
    """
    sizes = ((SMALL_NUMEL, 2**10), (MIDDLE_NUMEL, 2**13), (MIDDLE_NUMEL, 2**17))
    for num_workers, (numel, count) in product((2, 8), sizes):
        rank = echo_rank(num_workers, "split" if kind == "split" else "all_gather", clock.now)
        request = _request(kind, code, numel, count, clock.device)
        times: list[dict[str, float]] = []
        for _ in range(_NUM_REPEATS + 1):
            rank.begin(clock.device)
            total = answer(rank, request)
            rank.spare = total if kind == "gather" and code != "none" else None  # as an exchange does
            times.append(rank.timer.seconds())
        for phase, (line, units) in _message_units(kind, code, numel, count, num_workers).items():
            yield line, units, median(spent[phase] for spent in times[1:])


def _request(kind: str, code: str, numel: int, count: int, device: torch.device) -> Request:
    indices = torch.arange(count, device=device) * (numel // count)
    values = quantise(torch.randn(count, device=device), code) if code != "none" else None
    weight = torch.tensor(0.5, device=device)
    if values is None:
        return Gather(indices, numel=numel)
    if kind == "dense":
        return DenseSum(values, weight, code)
    return SparseSum(SparseGradient(indices, values, numel, code=code), weight)


def _message_units(
    kind: str, code: str, numel: int, count: int, num_workers: int
) -> dict[str, tuple[str, Units]]:
    """The lines and units of `rounds.work_of`; the union of the echoes' supports is one of them."""
    N, back = num_workers, count / num_workers
    if kind == "gather":
        summed = float(numel if code != "none" else 0)
        return {
            "encode_s": (f"encode {code}", {"calls": 1, "entries": count}),
            "decode_s": (f"decode {code}", {"calls": 1, "entries": N * count, "numel": summed}),
        }
    received: Units = {"messages": N, "entries": 2 * count, **({"numel": numel} if kind == "split" else {})}
    return {
        "encode_s": (f"{kind} encode {code}", {"calls": 1, "messages": N, "entries": count + back}),
        "decode_s": (f"{kind} decode {code}", received),
    }


def code_points(code: str, clock: Clock) -> Iterator[Point]:
    """Rounding values to a code, and returning what it lost to the residual."""
    for count in (2**12, 2**17):
        device = clock.device
        values, residual = torch.randn(count, device=device), torch.zeros(MIDDLE_NUMEL, device=device)
        indices = torch.arange(count, device=device) * (MIDDLE_NUMEL // count)

        def round_off(values: Tensor = values, residual: Tensor = residual, at: Tensor = indices) -> None:
            residual.scatter_add_(-1, at, values - quantise(values, code))

        seconds = 0.0 if is_lossless(code) else clock.time(round_off)
        yield f"quantise {code}", {"calls": 1, "entries": count}, seconds


def exchange_points(clock: Clock) -> Iterator[Point]:
    """What an exchange does with the whole vector: copy it in, look for NaN, copy the aggregate out."""
    device = clock.device
    flat = torch.zeros(MIDDLE_NUMEL, device=device)
    grads = [torch.randn(_MATRIX, _MATRIX, device=device) for _ in range(MIDDLE_NUMEL // _MATRIX**2)]

    def prepare_and_write_back() -> None:
        layout.copy_to_flat_(flat, grads)
        torch.isfinite(torch.stack(torch.aminmax(flat))).all()
        layout.copy_from_flat_(grads, flat)

    yield "exchange", {"numel": MIDDLE_NUMEL}, clock.time(prepare_and_write_back)


def peer_points(clock: Clock) -> Iterator[Point]:
    """Top-k as other libraries do it: torch.topk, and an index_add_ of what all of two workers sent."""
    numel = MIDDLE_NUMEL  # a bucket's size; its work grows faster than small vectors suggest
    device = clock.device
    for k in (2**12, 2**18):
        residual, grad = torch.zeros(numel, device=device), torch.randn(numel, device=device)

        def step(residual: Tensor = residual, grad: Tensor = grad, k: int = k) -> None:
            chosen = residual.add_(grad).abs().topk(k, sorted=False).indices
            values = residual[chosen]
            residual[chosen] = 0
            indices = chosen.to(torch.int32).repeat(2)
            torch.zeros_like(grad).index_add_(0, indices.long(), values.repeat(2).div_(2))

        yield "peer-topk", {"numel": numel, "entries": 2 * k}, clock.time(step)
