"""What an algorithm asks of a cluster: found by running one step of it on a small vector, and scaled.

The algorithm is its own description, so a new one is planned without a word about it here.
"""

from dataclasses import fields, replace
from functools import lru_cache
from math import ceil, isqrt
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from regtopk.algorithms import ALGORITHMS
from regtopk.core.algorithm import Algorithm, converse
from regtopk.core.requests import DenseSum, Gather, Peek, Request, SparseSum
from regtopk.core.worker import Layout, Worker
from regtopk.simulate.driver import SimulatedDriver

PROBE_ENTRIES = 8  # k of the small vector; both numbers of workers divide it
PROBE_NUMEL = 2500  # J of it for an algorithm that is told no density
MAX_PROBE_NUMEL = 2**20
FEW, MORE = 2, 4  # the numbers of workers it is asked with


class Asked(NamedTuple):
    """One request of a step, and how its length depends on k and N: it is (a + b / N) k."""

    request: Request  # as it was made on the small vector
    per_k: float  # a
    per_k_over_n: float  # b
    numel_per_k: float | None  # of the vector that its entries belong to; None where that is the gradient
    is_ragged: bool  # the gradient decides how many entries are sent: ranks tell their sizes first

    def scaled(self, numel: int, k: int, num_workers: int) -> Request:
        """The request on a vector of J entries: of the right shapes, on torch's "meta" device."""
        length = max(1, ceil(k * (self.per_k + self.per_k_over_n / num_workers) - 1e-9))
        of = numel if self.numel_per_k is None else round(k * self.numel_per_k)
        request = self.request
        if isinstance(request, SparseSum):
            sparse = request.sparse
            indices, values = (_of_length(x, min(length, of)) for x in (sparse.indices, sparse.values))
            return replace(
                request, sparse=replace(sparse, indices=indices, values=values, numel=of, count=None)
            )
        tensor = _of_length(request.tensor, length)
        if isinstance(request, Gather):
            return replace(request, tensor=tensor, count=None, numel=request.numel and of)
        if isinstance(request, (DenseSum, Peek)):
            return replace(request, tensor=tensor)
        return replace(request, tensor=tensor, numel=request.numel and of)


class Probe(NamedTuple):
    """What a step of an algorithm on a small vector showed."""

    requests: tuple[Asked, ...]  # of the step, in order
    density: float | None  # of one that is told none and always sends the same share; None for the others
    code: str  # of the values it sends
    listens: bool  # rank 0 shares a report before every step
    peeks: bool  # it asks what only a simulator can answer

    @property
    def ways(self) -> tuple[Literal["all_gather", "split"], ...]:
        """How a cluster can answer: a sparse sum is gathered by all, or split by region like a dense one."""
        is_sparse = any(isinstance(asked.request, SparseSum) for asked in self.requests)
        return ("all_gather", "split") if is_sparse else ("split",)


def takes(name: str, option: str) -> bool:
    """Whether an algorithm of the table has an option."""
    return any(field.name == option for field in fields(ALGORITHMS[name]))


def make_algorithm(name: str, *, code: str | None = None, **amount: float) -> Algorithm[Any]:
    """An algorithm of the table; it is told a code and how much to send if it takes such options."""
    options: dict[str, Any] = amount if takes(name, "density") else {}
    if code is not None and takes(name, "value_code"):
        options["value_code"] = code
    return ALGORITHMS[name](**options)


@lru_cache(maxsize=1024)
def probe(name: str, density: float, code: str) -> Probe:
    """Run a step of an algorithm of the table, told a density and a code if it takes them, and look at it."""
    is_told = takes(name, "density")
    numel = min(MAX_PROBE_NUMEL, round(PROBE_ENTRIES / density)) if is_told else PROBE_NUMEL
    rows = isqrt(numel)
    shape = rows, numel // rows  # one matrix, as nearly square as can be
    numel = shape[0] * shape[1]
    algorithm = make_algorithm(name, code=code, density=min(1.0, PROBE_ENTRIES / numel))
    few, more = (_requests(algorithm, shape, num_workers) for num_workers in (FEW, MORE))
    if len(few) != len(more):  # a number of requests that grows with N is taken as it is for more workers
        few = more
    sums = [request for request in few if isinstance(request, (SparseSum, DenseSum))]
    is_fixed = not any(_count(request) is not None for request in few)
    k = PROBE_ENTRIES if is_told or not is_fixed or not sums else _length(sums[-1])
    return Probe(
        tuple(_asked(one, other, k, numel) for one, other in zip(few, more, strict=True)),
        density=None if is_told or not is_fixed else k / numel,
        code=_code(sums[-1]) if sums else "float32",
        listens=algorithm.listens,
        peeks=any(isinstance(request, Peek) for request in few),
    )


def _requests(algorithm: Algorithm[Any], shape: tuple[int, int], num_workers: int) -> list[Request]:
    layout = Layout.of_shapes([("", shape, "linear")])
    worker = Worker(
        weight=torch.full((num_workers, 1), 1 / num_workers),
        index=torch.arange(num_workers).unsqueeze(-1),
        num_workers=num_workers,
        step=0,
        layout=layout,
        batch_shape=(num_workers,),
    )
    driver, requests = SimulatedDriver(worker), []

    def answer(request: Request) -> Any:
        requests.append(request)
        return driver.answer(request)

    grads = torch.randn(num_workers, layout.numel, generator=torch.Generator().manual_seed(0))
    converse(algorithm.exchange(grads, algorithm.init(worker), worker), answer)
    return requests


def _asked(few: Request, more: Request, k: int, numel: int) -> Asked:
    """How a request's size depends on k and N, from what it was with two numbers of workers.

    Where the gradient decides how many entries are sent, as many as planned are assumed.
    """
    of = few.sparse.numel if isinstance(few, SparseSum) else numel
    numel_per_k = None if of == numel else of / k
    if _count(few) is not None:
        return Asked(few, 1.0, 0.0, numel_per_k, is_ragged=True)
    per_k_over_n = (_length(few) - _length(more)) / (1 / FEW - 1 / MORE) / k
    return Asked(few, _length(few) / k - per_k_over_n / FEW, per_k_over_n, numel_per_k, is_ragged=False)


def _count(request: Request) -> Tensor | None:
    if isinstance(request, SparseSum):
        return request.sparse.count
    return request.count if isinstance(request, Gather) else None


def _length(request: Request) -> int:
    tensor = request.sparse.indices if isinstance(request, SparseSum) else request.tensor
    return tensor.shape[-1]


def _code(request: SparseSum | DenseSum) -> str:
    return request.sparse.code if isinstance(request, SparseSum) else request.code


def _of_length(tensor: Tensor, length: int) -> Tensor:
    return torch.empty(length, dtype=tensor.dtype, device="meta")
