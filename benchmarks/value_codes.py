"""Which 4-bit and 2-bit code loses least, and does training with it converge?

Errors are relative, ||x - Q(x)|| / ||x||: on what Top-k keeps of vectors with lighter and heavier tails, and
on whole vectors. Then error feedback in the simulator, Top-k with the loss of each code kept in the residual:

- distance: to the optimum of least squares after 100 steps, relative (8 workers that agree on it but see
  different curvatures, 2,000 entries, heavy-tailed solution, density 0.1);
- residual: its norm after 300 steps if every gradient has heavy-tailed noise, over that without a code;
- digits: test error of a small network on scikit-learn's digits (8 workers that hold different digits, 4,810
  parameters, density 0.01).

    python benchmarks/value_codes.py [--json] [--out FILE]
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from reporting import give, parser_for
from torch import Tensor

from regtopk import TopK
from regtopk.core.algorithm import Conversation
from regtopk.core.codes import quantise
from regtopk.core.requests import SparseSum
from regtopk.core.sparse import take_largest_
from regtopk.core.state import ResidualState
from regtopk.core.worker import Worker
from regtopk.simulate import Cluster

Code = Callable[[Tensor], Tensor]
BLOCK = 128


def from_levels(levels: Callable[[Tensor, Tensor], Tensor]) -> Code:
    """A code that takes the nearest of some magnitudes, a function of the block's smallest and largest."""

    def code(x: Tensor) -> Tensor:
        size = x.shape[-1]
        blocks = torch.nn.functional.pad(x, (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
        is_valid = torch.arange(blocks[0].numel() if x.dim() > 1 else blocks.numel()).view(-1, BLOCK) < size
        magnitude = blocks.abs()
        low = magnitude.masked_fill(~is_valid, torch.inf).amin(-1, keepdim=True)
        offer = levels(low, magnitude.amax(-1, keepdim=True))
        nearest = (magnitude.unsqueeze(-1) - offer.unsqueeze(-2)).abs().argmin(-1)
        return (offer.gather(-1, nearest) * blocks.sign()).flatten(-2)[..., :size]

    return code


def powers(base: float, num: int) -> Tensor:
    return torch.cat([torch.zeros(1), base ** torch.arange(num - 1.0, -1, -1)])


def means(x: Tensor, *, keep_zero: bool) -> Tensor:
    """sign(x) mean|x|, or that of the larger half of a three-level code."""
    size = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
    magnitude = blocks.abs()
    is_sent = magnitude > 0
    for _ in range(3 if keep_zero else 1):
        mean = (magnitude * is_sent).sum(-1, keepdim=True) / is_sent.sum(-1, keepdim=True).clamp(min=1)
        is_sent = magnitude > mean / 2 if keep_zero else is_sent
    return (mean * is_sent * blocks.sign()).flatten(-2)[..., :size]


CODES: dict[str, tuple[int, Code]] = {
    "4bit (shipped)": (4, partial(quantise, code="4bit")),
    "4 bits, even from lo to hi": (4, from_levels(lambda lo, hi: lo + (hi - lo) * torch.arange(8) / 7)),
    "4 bits, even from 0": (4, from_levels(lambda lo, hi: hi * torch.arange(8) / 7)),
    "4 bits, powers of sqrt 1/2": (4, from_levels(lambda lo, hi: hi * powers(0.5**0.5, 7))),
    "2bit (shipped)": (2, partial(quantise, code="2bit")),
    "2 bits, lo and hi": (2, from_levels(lambda lo, hi: torch.cat([lo, hi], -1))),
    "2 bits, hi and hi / 4": (2, from_levels(lambda lo, hi: hi * torch.tensor([0.25, 1.0]))),
    "2 bits, 0 and hi": (2, from_levels(lambda lo, hi: hi * torch.tensor([0.0, 1.0]))),
    "2 bits, 0 and a mean": (2, partial(means, keep_zero=True)),
    "1 bit, the mean": (1, partial(means, keep_zero=False)),
    "none": (32, lambda x: x),
}


def vectors() -> dict[str, Tensor]:
    """What Top-k keeps, at density 0.004, and whole vectors."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(2_000_000, generator=generator)
    chi = torch.randn(3, 2_000_000, generator=generator).square()
    heavy = normal.roll(1) / chi.mean(0).sqrt()
    whole = {"normal": normal, "t3": heavy, "t2": normal.roll(2) / chi[:2].mean(0).sqrt()}
    found = {f"top of {name}": x[x.abs().topk(8000).indices.sort().values] for name, x in whole.items()}
    return found | {f"all of {name}": x[:8000] for name, x in whole.items()}


@dataclass(frozen=True, kw_only=True)
class CodedTopK(TopK):
    """Top-k with any code, the loss kept in the residual."""

    quantiser: Code

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        taken = take_largest_(state.residual, grad, self.num_selected(worker))
        sent = self.quantiser(taken.values)
        state.residual.scatter_(-1, taken.indices, taken.values - sent)
        return (yield from SparseSum(replace(taken, values=sent), worker.weight))


def student(generator: torch.Generator, *shape: int) -> Tensor:
    """Student's t with 2 degrees of freedom."""
    return torch.randn(shape, generator=generator) / (
        torch.randn(2, *shape, generator=generator).square().mean(0).sqrt()
    )


def least_squares(code: Code, noise: float, learning_rate: float, num_steps: int) -> tuple[float, float]:
    """Relative distance to the optimum, and mean norm of the residuals."""
    generator = torch.Generator().manual_seed(0)
    truth = student(generator, 2000)
    curvature = torch.randn(8, 2000, generator=generator).exp()
    curvature /= curvature.mean(0)
    x, cluster = torch.zeros(2000), Cluster(CodedTopK(density=0.1, quantiser=code), num_workers=8)
    for _ in range(num_steps):
        grads = curvature * (x - truth) + noise * student(generator, 8, 2000)
        x = x - learning_rate * cluster.step(grads)
    assert isinstance(cluster.state, ResidualState)
    distance = float((x - truth).norm() / truth.norm())
    return distance, float(cluster.state.residual.norm(dim=-1).mean())


def digits(code: Code, num_steps: int = 600) -> float:
    """Test error after training a network of one hidden layer on label-sorted shards."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    shards = train[y[train].sort(stable=True).indices].view(8, -1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    parameters = list(net.parameters())
    cluster = Cluster(CodedTopK(density=0.01, quantiser=code), num_workers=8)
    for _ in range(num_steps):
        rows = []
        for shard in shards:
            loss = torch.nn.functional.cross_entropy(net(x[shard]), y[shard])
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
        grads = torch.stack(rows)
        flat = torch.nn.utils.parameters_to_vector(parameters) - 0.1 * cluster.step(grads)
        torch.nn.utils.vector_to_parameters(flat, parameters)
    with torch.no_grad():
        return float((net(x[test]).argmax(-1) != y[test]).float().mean())


def run() -> dict[str, Any]:
    found = vectors()
    rows = []
    uncoded = least_squares(CODES["none"][1], 0.1, 0.05, 300)[1]
    for name, (bits, code) in CODES.items():
        error = {kind: float((x - code(x)).norm() / x.norm()) for kind, x in found.items()}
        rows.append(
            {
                "code": name,
                "bits": bits,
                "error": error,
                "distance": least_squares(code, 0.0, 0.2, 100)[0],
                "residual": least_squares(code, 0.1, 0.05, 300)[1] / uncoded,
                "digits": digits(code),
            }
        )
    return {"command": "benchmarks/value_codes.py", "torch": torch.__version__, "codes": rows}


def show(report: dict[str, Any]) -> None:
    kinds = list(report["codes"][0]["error"])
    print(f"{'':<28}" + "".join(f"{kind:>15}" for kind in kinds) + "   distance residual digits")
    for row in report["codes"]:
        errors = "".join(f"{row['error'][kind]:>15.4f}" for kind in kinds)
        print(
            f"{row['code']:<28}{errors}{row['distance']:>11.1e}{row['residual']:>9.2f}{row['digits']:>7.3f}"
        )


def main() -> None:
    parser = parser_for(__doc__)
    arguments = parser.parse_args()
    report = run()
    give(report, arguments, show)


if __name__ == "__main__":
    main()
