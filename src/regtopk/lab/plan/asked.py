"""What an algorithm asks of a cluster: found by running one step of it on a small vector, and scaled.

The algorithm is its own description, so a new one is planned without a word about it here.
"""

from dataclasses import fields
from functools import lru_cache
from math import ceil, isqrt
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from regtopk.algorithms import ALGORITHMS
from regtopk.core.algorithm import Algorithm, converse
from regtopk.core.requests import DenseSum, Gather, Peek, Request, SparseSum
from regtopk.core.worker import Layout, Worker
from regtopk.lab.method import Method
from regtopk.simulate.driver import SimulatedDriver

PROBE_ENTRIES = 8  # k of the small vector; both numbers of workers divide it
PROBE_NUMEL = 2500  # J of it for an algorithm that is told no density
MAX_PROBE_NUMEL = 2**20
FEW, MORE = 2, 4  # the numbers of workers it is asked with


class Asked(NamedTuple):
    """One request of a step, whose length is (a + b / N) k."""

    request: Request  # as it was made on the small vector
    per_k: float  # a
    per_k_over_n: float  # b
    numel_per_k: float | None  # of the vector that its entries belong to; None where that is the gradient
    is_ragged: bool  # the gradient decides how many entries are sent: ranks tell their sizes first

    def size(self, numel: int, k: int, num_workers: int) -> tuple[int, int]:
        """Its length on a vector of J entries, and the length of the vector that its entries belong to."""
        length = max(1, ceil(k * (self.per_k + self.per_k_over_n / num_workers) - 1e-9))
        of = numel if self.numel_per_k is None else round(k * self.numel_per_k)
        return (min(length, of) if isinstance(self.request, SparseSum) else length), of


class Probe(NamedTuple):
    """What a step of an algorithm on a small vector showed."""

    requests: tuple[Asked, ...]  # of the step, in order
    density: float | None  # of an algorithm that always sends the same share; None for the others
    code: str  # of the values it sends
    listens: bool  # rank 0 shares a report before every step
    peeks: bool  # it asks what only a simulator can answer

    @property
    def ways(self) -> tuple[Literal["all_gather", "split"], ...]:
        """How a cluster can answer: a sparse sum is gathered by all, or split by region like a dense one."""
        is_sparse = any(isinstance(asked.request, SparseSum) for asked in self.requests)
        return ("all_gather", "split") if is_sparse else ("split",)


def takes(words: str, option: str) -> bool:
    """Whether an algorithm takes an option."""
    return any(field.name == option for field in fields(ALGORITHMS[words.partition(":")[0]]))


def make_algorithm(words: str, density: float, code: str = "float32") -> Algorithm[Any]:
    """An algorithm in words, "topk:impute=0.35"; it is told a density and a code if it takes such options."""
    return Method.parse(words).build(density=density, value_code=code)


@lru_cache(maxsize=1024)
def probe(words: str, density: float, code: str) -> Probe:
    """Run a step of an algorithm, and look at its requests.

    Where the gradient decides how many entries are sent, as many as planned are assumed.
    """
    is_told = takes(words, "density")
    rows = isqrt(min(MAX_PROBE_NUMEL, round(PROBE_ENTRIES / density)) if is_told else PROBE_NUMEL)
    numel = rows * rows
    algorithm = make_algorithm(words, min(1.0, PROBE_ENTRIES / numel), code)
    few, more = (_step(algorithm, rows, num_workers) for num_workers in (FEW, MORE))
    if len(few) != len(more):  # the number of requests grows with N: those of more workers are planned
        few = more
    sums = [request for request in few if isinstance(request, (SparseSum, DenseSum))]
    is_fixed = not is_told and all(_sent(request)[1] is None for request in few)
    k = _sent(sums[-1])[0] if is_fixed and sums else PROBE_ENTRIES
    return Probe(
        tuple(_asked(one, other, k, numel) for one, other in zip(few, more, strict=True)),
        density=k / numel if is_fixed else None,
        code=_sent(sums[-1])[2] if sums else "float32",
        listens=algorithm.listens,
        peeks=any(isinstance(request, Peek) for request in few),
    )


def _step(algorithm: Algorithm[Any], rows: int, num_workers: int) -> list[Request]:
    """What is asked in a first step on a square matrix of normal numbers."""
    layout = Layout.of_shapes([("", (rows, rows), "linear")])
    weight, index = torch.full((num_workers, 1), 1 / num_workers), torch.arange(num_workers).unsqueeze(-1)
    worker = Worker(weight, index, num_workers, 0, layout, batch_shape=(num_workers,))
    driver, requests = SimulatedDriver(worker), []

    def answer(request: Request) -> Any:
        requests.append(request)
        return driver.answer(request)

    grads = torch.randn(num_workers, layout.numel, generator=torch.Generator().manual_seed(0))
    converse(algorithm.exchange(grads, algorithm.init(worker), worker), answer)
    return requests


def _asked(few: Request, more: Request, k: int, numel: int) -> Asked:
    """How a request's length depends on k and N, from what it was with two numbers of workers."""
    of = few.sparse.numel if isinstance(few, SparseSum) else numel
    numel_per_k = None if of == numel else of / k
    (length, count, _), (length_of_more, _, _) = _sent(few), _sent(more)
    if count is not None:
        return Asked(few, 1.0, 0.0, numel_per_k, is_ragged=True)
    per_k_over_n = (length - length_of_more) / (1 / FEW - 1 / MORE) / k
    return Asked(few, length / k - per_k_over_n / FEW, per_k_over_n, numel_per_k, is_ragged=False)


def _sent(request: Request) -> tuple[int, Tensor | None, str]:
    """The length of what is sent, how many of its entries are valid (None: all), and its value code."""
    if isinstance(request, SparseSum):
        return request.sparse.indices.shape[-1], request.sparse.count, request.sparse.code
    count = request.count if isinstance(request, Gather) else None
    return request.tensor.shape[-1], count, request.code if isinstance(request, DenseSum) else "none"
