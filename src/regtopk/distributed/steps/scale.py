"""What a rank's update is multiplied by before it meets the residual: two numbers of each rank decide it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regtopk.core.clipping import clip_scales, norm_of
from regtopk.distributed.transport.collectives import Collectives
from regtopk.errors import ClusterError


class Scaling(NamedTuple):
    """Whether updates are clipped (`clip_scales`), and whether tokens weigh them.

    Tokens t_n scale an update by N t_n / T, and weights stay 1/N. With weights t_n / T that change from round
    to round, a residual would be sent by another weight than it was kept with, and sums not be conserved.
    Weights by steps do not change: those are plain weights.
    """

    clip_norm: float | None = None
    by_tokens: bool = False

    def numbers(self, flats: Sequence[Tensor], tokens: float, shards: Collectives | None) -> Tensor:
        """(2,) float64: the norm, if it is needed, and the tokens of a rank, or of all that share a model."""
        norm = norm_of(flats if self.clip_norm else [flats[0][:0]])
        squares = torch.stack([norm.square(), norm.new_tensor(tokens)])
        if shards is not None:
            squares = shards.all_gather(squares.to(shards.device_for_flags(norm.device))).sum(0)
        return torch.stack([squares[0].sqrt(), squares[1]])

    def clipped(self, numbers: Tensor, weights: Tensor) -> Tensor:
        """What clipping multiplies each rank's update by, (N,), from all ranks' numbers, (N, 2)."""
        if self.by_tokens:  # who has learned from none has no weight
            weights = weights * (numbers[:, 1] > 0)
        return clip_scales(numbers[:, 0], weights, self.clip_norm or math.inf)

    def weighed(self, numbers: Tensor, ranks: list[int]) -> Tensor:
        """What tokens multiply each rank's update by, (N,); they are NaN of ranks that have not counted."""
        tokens = numbers[:, 1] if self.by_tokens else numbers.new_zeros(len(ranks))
        if silent := [rank for rank, own in zip(ranks, tokens.tolist(), strict=True) if math.isnan(own)]:
            raise ClusterError(
                "every rank must call count(tokens) before optimizer.step() where weight is 'tokens', got no "
                f"call on rank(s) {silent} since the last exchange"
            )
        return len(ranks) * tokens / tokens.sum() if tokens.any() else torch.ones_like(tokens)
