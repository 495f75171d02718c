"""What every kernel must do, checked against the plain-torch reference."""

from collections.abc import Callable

import torch
from torch import Tensor

from regtopk.kernels import Damped
from regtopk.kernels.cuda.plan import plan_for
from regtopk.kernels.cuda.programs.words import NUM_CANDIDATES, words_per_row
from regtopk.kernels.cuda.selection import _TILE
from regtopk.kernels.dispatch import Kernel
from regtopk.kernels.reference import selection as reference


def check_take_largest_(
    kernel: Kernel,
    residual: Tensor,
    grad: Tensor,
    k: int,
    damped: Tensor | None = None,
    damping: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a kernel and the reference on the same input; some scores are |a| · damping."""
    accumulated, unchanged = residual.clone().add_(grad), grad.clone()
    given = scored(accumulated, damped, damping)
    of_reference = reference.take_largest_(residual.clone(), grad, k, given, chunk)
    indices, values = kernel.take_largest_(residual, grad, k, given, chunk)
    assert indices.dtype == torch.int64 and values.dtype == residual.dtype
    assert torch.equal(indices, of_reference[0])
    if chunk is None and accumulated.shape[-1] < 100_000:  # of equals, all of them take the first
        score = reference.score_of(accumulated, given)
        first = score.sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(-1).values
        assert torch.equal(indices, first)
    check_taken_at(residual, accumulated, indices, values)
    assert torch.equal(grad, unchanged)
    return indices, values


def check_take_above_(
    kernel: Kernel, residual: Tensor, grad: Tensor | None, threshold: float | Tensor, capacity: int
) -> None:
    """A kernel's threshold selection must be the reference's, bit for bit."""
    of_reference = residual.clone()
    expected = reference.take_above_(of_reference, grad, threshold, capacity)
    taken = kernel.take_above_(residual, grad, threshold, capacity)
    for name in ("indices", "values", "count", "num_left"):
        assert torch.equal(getattr(taken, name), getattr(expected, name)), name
    assert torch.equal(bits(residual), bits(of_reference))


def scored(accumulated: Tensor, damped: Tensor | None, damping: Tensor | None) -> Damped | None:
    """Damped entries with the score |a| · damping, if there are any."""
    if damped is None or damping is None:
        return None
    return Damped(damped, accumulated.abs().gather(-1, damped) * damping)


def check_taken_at(residual: Tensor, accumulated: Tensor, indices: Tensor, values: Tensor) -> None:
    """The values are those of a at the indices, bit for bit; the residual is a, but zero there."""
    assert torch.equal(bits(values), bits(accumulated.gather(-1, indices)))
    assert torch.equal(bits(residual), bits(accumulated.scatter(-1, indices, 0.0)))


def candidates_suffice(words: Tensor, numel: int, k: int) -> list[bool]:
    """Whether each row of a call on CUDA took its k from the candidates, not from all entries."""
    item_bytes = 4 if words.shape[1] == words_per_row(31) else 8
    capacity = plan_for(numel, k, _TILE, item_bytes).capacity
    num = words[:, NUM_CANDIDATES.value]
    suffice: list[bool] = ((num <= capacity) & (num >= k)).tolist()
    return suffice


def bits(x: Tensor) -> Tensor:
    """Memory as integers: NaN equals itself, and 0 is not -0."""
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int64)


def choose_damped(
    numel: int, m: int, batch: tuple[int, ...] = (), device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """m distinct entries a row, ascending, and factors in [0, 2): a finite Q may raise a score."""
    damped = torch.rand(*batch, numel, device=device).topk(m, dim=-1).indices.sort(-1).values
    return damped, 2 * torch.rand(*batch, m, device=device)


ADVERSARIAL: dict[str, Callable[[int, str], Tensor]] = {
    "zero": lambda n, on: torch.zeros(n, device=on),
    "negative zero": lambda n, on: torch.full((n,), -0.0, device=on),
    "equal": lambda n, on: torch.full((n,), 0.75, device=on),
    "two values": lambda n, on: torch.where(torch.rand(n, device=on) < 0.4, 1.0, -2.0),
    "denormal": lambda n, on: torch.randn(n, device=on) * 1e-41,
    "smallest denormals": lambda n, on: torch.randint(-3, 4, (n,), device=on).float() * 1e-45,
    "huge": lambda n, on: torch.randn(n, device=on) * 1e37,
    "all scales": lambda n, on: torch.randn(n, device=on) * 10.0 ** torch.randint(-40, 37, (n,), device=on),
    "few are not zero": lambda n, on: torch.randn(n, device=on) * (torch.rand(n, device=on) < 1e-3),
    "nearly equal": lambda n, on: 1 + torch.randint(0, 4, (n,), device=on) * 2.0**-23,
    "ascending": lambda n, on: torch.linspace(0, 1, n, device=on),
    "large at one end": lambda n, on: (
        torch.randn(n, device=on) * (1 + 1e4 * (torch.arange(n, device=on) >= n - n // 50))
    ),
    "few spikes": lambda n, on: (
        torch.randn(n, device=on) * 1e-3 + 1e3 * (torch.arange(n, device=on) % 4099 == 7)
    ),
}


def rows_to_code(dtype: torch.dtype) -> Tensor:
    """Rows of 700 values that are easy, tiny, huge, alike, on a grid, or zero of either sign."""
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(7, 700, generator=generator, dtype=torch.float64)
    normal[1] *= torch.logspace(-46, 38, 700, dtype=torch.float64)  # denormal to almost too large
    normal[2] = normal[2].sign() * 0.3
    normal[3] = (2 * normal[3]).round()  # with ties
    normal[4] = 0.0
    normal[4, 3], normal[4, 200] = -0.0, -1e-45
    normal[5] *= 1e300 if dtype == torch.float64 else 1e38
    return normal.to(dtype).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
