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

    Differs from the paper: it prints w^{t+1} - w^t, which has the wrong sign.
    """
    check_positive("lr", lr)
    old, new = ([given] if isinstance(given, Tensor) else list(given) for given in (before, after))
    if len(old) != len(new) or not old:
        raise ArgumentError(
            "before and after must hold the same parameters, at least one, "
            f"got {len(old)} before and {len(new)} after"
        )
    for pair in zip(old, new, strict=True):
        _check_pair(*pair)
    found = [(x - y) / lr for x, y in zip(old, new, strict=True)]
    return found[0] if isinstance(before, Tensor) else torch.cat([g.flatten() for g in found])


def _check_pair(before: Tensor, after: Tensor) -> None:
    for name, given in (("before", before), ("after", after)):
        if not isinstance(given, Tensor) or not given.is_floating_point():
            kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
            raise ArgumentError(f"{name} must hold floating point tensors, got {kind}")
    ours, theirs = (f"{tuple(x.shape)} {x.dtype} {x.device}" for x in (before, after))
    if ours != theirs:
        raise ArgumentError(f"after must have the shape, dtype and device of before, {ours}, got {theirs}")
    if before.numel() and before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr():
        raise ArgumentError("before must be a copy made before the step, got the same memory as after")
