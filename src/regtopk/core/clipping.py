"""Updates far longer than others' are scaled down: what ranks and simulated workers compute alike."""

from collections.abc import Sequence

import torch
from torch import Tensor


def norm_of(parts: Sequence[Tensor]) -> Tensor:
    """(), float64: the norm of a vector in parts, rounded so that the order of its sum does not show."""
    pieces = [piece for part in parts for piece in part.flatten().split(1 << 22)]  # each is copied
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm.float().double()


def clip_scales(norms: Tensor, weights: Tensor, clip_norm: float) -> Tensor:
    """min(1, clip_norm * median / norm) of each worker, (..., N): what its update is multiplied by.

    The median is that of the workers that have weight, of an even number the lower: of two workers, one
    that is spoilt does not decide. If it is zero, nothing is clipped.
    """
    if not bool((weights > 0).any()):
        return torch.ones_like(norms)
    bound = clip_norm * norms[..., weights > 0].median(-1, keepdim=True).values
    return torch.where((norms > bound) & (bound > 0), bound / norms, 1.0)
