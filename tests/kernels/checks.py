"""What every kernel must do, checked against the plain-torch reference."""

from types import ModuleType

import torch
from torch import Tensor

from regtopk.kernels import reference


def check_take_largest_(
    kernel: ModuleType,
    residual: Tensor,
    grad: Tensor,
    k: int,
    damped: Tensor | None = None,
    damping: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a kernel and the reference on the same input; they may differ in ties alone."""
    accumulated, given = residual.clone().add_(grad), grad.clone()
    score = reference._score(accumulated, damped, damping)
    of_reference = reference.take_largest_(residual.clone(), grad, k, damped=damped, damping=damping)
    indices, values = kernel.take_largest_(residual, grad, k, damped=damped, damping=damping)
    assert indices.shape == values.shape == of_reference[0].shape
    assert indices.dtype == torch.int64 and values.dtype == residual.dtype
    chosen, expected = score.gather(-1, indices), score.gather(-1, of_reference[0])
    assert torch.equal(chosen.sort(-1).values, expected.sort(-1).values)
    if score.shape[-1] < 100_000:  # of equals, fast kernels take the first
        first = score.sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(-1).values
        assert torch.equal(indices, first)
    check_taken_at(residual, accumulated, indices, values)
    assert torch.equal(grad, given)
    return indices, values


def check_taken_at(residual: Tensor, accumulated: Tensor, indices: Tensor, values: Tensor) -> None:
    """The values are those of a at the indices, bit for bit; the residual is a, but zero there."""
    assert torch.equal(bits(values), bits(accumulated.gather(-1, indices)))
    assert torch.equal(bits(residual), bits(accumulated.scatter(-1, indices, 0.0)))


def bits(x: Tensor) -> Tensor:
    """Memory as integers: NaN equals itself, and 0 is not -0."""
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int64)


def choose_damped(
    numel: int, m: int, batch: tuple[int, ...] = (), spread: float = 1.0
) -> tuple[Tensor, Tensor]:
    """m distinct entries a row, ascending, and factors in [0, spread)."""
    damped = torch.rand(*batch, numel).topk(m, dim=-1).indices.sort(-1).values
    return damped, torch.rand(*batch, m) * spread
