"""What a worker can tell from the parameters when a server sends them instead of the aggregate."""

from collections.abc import Iterable

import torch
from torch import Tensor

from regtopk.core.options import check_positive
from regtopk.errors import ArgumentError


@torch.no_grad()
def aggregate_from_parameters(
    before: Tensor | Iterable[Tensor], after: Tensor | Iterable[Tensor], lr: float
) -> Tensor:
    """The aggregate g^t, from the parameters before and after the server's step (the paper's footnote 1).

    w^{t+1} = w^t - lr g^t,   so g^t = (w^t - w^{t+1}) / lr

    The server must take plain steps of SGD, with the learning rate given here. After momentum, weight decay,
    clipping or Adam the difference also holds what the optimizer added, and a worker cannot take that out.

    The parameters are rounded, so the aggregate comes back with an error. To first order it is at most
    eps |w^{t+1}| / (2 lr) + 2 eps |g^t|, with eps = 1.2e-7 in float32 and 2.2e-16 in float64. A step too
    short to change a parameter comes back as zero.

    Args:
        before: w^t, a tensor or all parameters in order; a copy, since optimizers write in place.
        after: w^{t+1}, likewise.
        lr: > 0, of this step.

    Returns:
        g^t: shaped like a single tensor, or flat, (J,), in the order of the parameters.

    Raises:
        ArgumentError: the two do not fit each other, share memory, or lr is not positive and finite.

    Differs from the paper: it prints w^{t+1} - w^t, which has the wrong sign.
    """
    check_positive("lr", lr)
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        _check_pair(before, after)
        return (before - after) / lr
    for name, given in (("before", before), ("after", after)):
        if not isinstance(given, Iterable):
            raise ArgumentError(f"{name} must be a tensor or parameters, got {type(given).__name__}")
    pairs = _pairs_of(before, after)
    return torch.cat([((old - new) / lr).flatten() for old, new in pairs])


def _pairs_of(before: Iterable[Tensor], after: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Both lists side by side, checked before anything is computed."""
    for name, given in (("before", before), ("after", after)):
        if isinstance(given, Tensor):
            raise ArgumentError(
                f"before and after must both be tensors or both lists, got one tensor: {name}"
            )
    old, new = list(before), list(after)
    if len(old) != len(new) or not old:
        raise ArgumentError(
            "before and after must hold the same parameters, at least one, "
            f"got {len(old)} before and {len(new)} after"
        )
    pairs = list(zip(old, new, strict=True))
    for pair in pairs:
        _check_pair(*pair)
    return pairs


def _check_pair(before: Tensor, after: Tensor) -> None:
    for name, given in (("before", before), ("after", after)):
        if not isinstance(given, Tensor):
            raise ArgumentError(f"{name} must hold tensors, got {type(given).__name__}")
    if not before.is_floating_point():
        raise ArgumentError(f"before must be floating point, got {before.dtype}")
    ours, theirs = ((tuple(x.shape), x.dtype, x.device) for x in (before, after))
    if ours != theirs:
        wanted, got = (" ".join(map(str, kind)) for kind in (ours, theirs))
        raise ArgumentError(f"after must have the shape, dtype and device of before, {wanted}, got {got}")
    if before.numel() and before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr():
        raise ArgumentError("before must be a copy made before the step, got the same memory as after")
