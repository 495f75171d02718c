"""What the contract is tested on: every algorithm of the table, in all its variants."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from regtopk import ALGORITHMS, Consensus, PosteriorScore, TopK
from regtopk.core import VALUE_CODES, Algorithm, Layout, Promise, is_lossless
from regtopk.simulate import Cluster

N, J, K = 4, 150, 7  # J is more than one block of a code
SHAPES = [("conv", (5, 4, 5), "conv"), ("linear", (4, 10), "linear"), ("bias", (10,), "bias")]
LAYOUT = Layout.of_shapes(SHAPES)
WEIGHTS = [0.4, 0.3, 0.2, 0.1]
CODES = list(VALUE_CODES)
CODES_OF_EACH_KIND = ["float32", "float16", "4bit", "2bit", "sign"]  # exact, rounded, in blocks

CURRENT = PosteriorScore(mu=1.0, reference="current")

# Options beside k and value_code; an algorithm that is not here is tested with its defaults.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "dense": [{}, {"sum_code": "4bit"}],
    "topk": [{}, {"impute": 0.35}, {"returned": 0.05}, {"returned": 1.0}],
    "regtopk": [
        {},
        {"reference": "current"},
        {"q": 0.5, "mu": 0.7},
        {"q": -0.5, "reference": "current"},
        {"damping": "cap", "mu": 0.2},
        {"impute": 0.5},
    ],
    "randomk": [{}, {"seed": -3}],
    "chunked-topk": [
        {"chunk": 20},
        {},
        {"chunk": 32, "decay": 0.9, "score": PosteriorScore(mu=1.0)},
        {"chunk": 20, "impute": 1.0},
        {"chunk": 20, "returned": 0.1},
    ],
    "consensus": [{}, {"score": PosteriorScore(mu=1.0)}, {"seed": 4, "score": CURRENT}, {"sum_code": "4bit"}],
    "demo": [{}, {"sign": False, "tile": 4, "decay": 0.9}],
    "dgc": [{}, {"clip": 100.0, "score": CURRENT}, {"momentum": 0.5, "impute": 0.35}, {"returned": 0.05}],
    "ef21": [{}, {"eta": 0.3}, {"eta": 0.3, "returned": 0.05}],
    "powersgd": [{"rank": 1}, {"rank": 2, "seed": 5}],
    "random-candidates": [{}, {"factor": 3, "seed": 8}],
    "scalecom": [{}, {"beta": 0.1}],
    "strom": [{"tau": 2.0}, {"tau": 0.3}],
    "gradient-dropping": [{}, {"sample": 0.01}],
    "adacomp": [{}, {"bin_conv": 7, "bin_other": 10}],
    "hard-threshold": [{}, {"k": None, "threshold": 20.0}],
    "adaptive": [
        {"target_error": 0.5, "every": 1, "algorithm": TopK(density=0.05)},
        {"bytes_per_step": 200.0, "every": 2, "algorithm": Consensus(density=0.05)},
    ],
    "fair-topk": [{"trial": 2}],
    "mipd-style": [{}, {"decay": 0.9}],
    "sparseloco": [{}, {"tile": 4, "decay": 1.0}],
    "sketch": [{"seed": 3}, {"rows": 3, "columns": 20, "sketch_code": "4bit"}],
    "sidco": [{}, {"fit": "pareto"}, {"fit": "gamma"}],
}


@dataclass(frozen=True)
class Case:
    name: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])

    def takes(self, option: str) -> bool:
        return option in {f.name for f in fields(ALGORITHMS[self.name])}

    @property
    def is_first(self) -> bool:
        """Whether it stands for its algorithm where one variant tells enough."""
        return self.options == VARIANTS.get(self.name, [{}])[0]

    @property
    def codes(self) -> list[str]:
        """One of each kind, two for a second variant, and all for the two that most others are made of."""
        if not self.takes("value_code"):
            return ["float32"]
        if not self.is_first:
            return ["float32", "4bit"]
        return CODES if self.name in ("topk", "regtopk") else CODES_OF_EACH_KIND

    def sends_exactly(self, code: str) -> bool:
        """Whether what it sends with a code are the accumulated values to the bit."""
        return self.takes("value_code") and is_lossless(code)

    def make(self, **options: Any) -> Algorithm[Any]:
        """The algorithm; k is K unless told, and options it does not take are left out."""
        if "density" not in options:
            options.setdefault("k", K)
        if "returned" in self.options and options.get("k") is not None:
            options["density"] = options.pop("k") / J  # a part of the sum comes back for a part that is sent
        taken = {key: value for key, value in options.items() if self.takes(key)}
        return ALGORITHMS[self.name](**{**taken, **self.options})

    def cluster(self, weights: list[float] | None = None, **options: Any) -> Cluster:
        return Cluster(self.make(**options), num_workers=N, weights=weights or WEIGHTS, layout=LAYOUT)


CASES = [Case(name, options) for name in ALGORITHMS for options in VARIANTS.get(name, [{}])]


def cases_that_promise(promise: Promise) -> list[Case]:
    return [case for case in CASES if promise in case.make().promises]


def with_codes(cases: list[Case]) -> list[tuple[Case, str]]:
    """Each case with each of its codes, in float32."""
    return [(case, code) for case in cases for code in case.codes]


def with_codes_and_dtypes(cases: list[Case]) -> list[tuple[Case, str, torch.dtype]]:
    """Each case with its codes in float32; the first of an algorithm uncoded in the other dtypes, too.

    float16 is summed as bfloat16 is, so two algorithms stand for all.
    """
    coded = [(case, code, torch.float32) for case, code in with_codes(cases)]
    dtypes = (torch.float64, torch.bfloat16)
    other = [(case, "float32", dtype) for case in cases if case.is_first for dtype in dtypes]
    return coded + other + [(case, "float32", torch.float16) for case in cases if case.codes == CODES]


def random_grads(
    num_steps: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Tensor]:
    """Gradients, (N, J) unless told, whose entries are of very different size."""
    generator = torch.Generator().manual_seed(seed)
    shape = shape or (N, J)
    scale = torch.logspace(-2, 2, shape[-1])
    return [(torch.randn(*shape, generator=generator) * scale).to(dtype) for _ in range(num_steps)]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gradients whose entries are of similar size."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def state_of(cluster: Cluster) -> dict[str, Tensor]:
    """What the workers keep."""
    assert cluster.state is not None
    return cluster.state.state_dict()


def residual_of(cluster: Cluster) -> Tensor:
    """What the workers have not sent, (N, J)."""
    return state_of(cluster)["residual"]


@dataclass(frozen=True)
class Steps:
    """The gradients of each step and the aggregate of it, and what is left in the residuals."""

    algorithm: Algorithm[Any]
    steps: list[tuple[list[list[float]], list[float]]]
    residual: list[list[float]] | None = None
    weights: list[float] | None = None
    layout: Layout | None = None

    def __str__(self) -> str:
        return self.algorithm.name

    def check(self) -> None:
        num_workers = len(self.steps[0][0])
        cluster = Cluster(self.algorithm, num_workers=num_workers, weights=self.weights, layout=self.layout)
        for grads, aggregate in self.steps:
            assert cluster.step(torch.tensor(grads, dtype=torch.float32)).tolist() == aggregate
        if self.residual is not None:
            assert residual_of(cluster).tolist() == self.residual


def saved_tensors(cluster: Cluster) -> dict[str, Tensor]:
    """A copy of everything a cluster knows that is a tensor or a number, by name."""
    saved = cluster.state_dict()
    tensors = {f"state.{name}": tensor for name, tensor in saved["state"].items()}
    tensors |= {f"total.{name}": count for name, count in saved["total"].items()}
    return tensors | {"num_steps": torch.tensor(saved["num_steps"])}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """The same names, shapes, dtypes and bits."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert right[name].dtype == tensor.dtype and torch.equal(right[name], tensor), name
