"""Normalisation layers that simulated workers can share.

All workers of a simulation use one module, some of them at the same time on parallel CUDA streams. torch's
BatchNorm2d writes its running statistics in every training step: workers would mix, and race. Here training
leaves them alone, and an evaluation sets them from a batch of its choice.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_GROUPS = 32


class BatchNorm(nn.BatchNorm2d):
    """Batch norm that keeps no moving average.

    In training mode it normalises by the batch and writes nothing; with `recording` set, the running
    statistics become the batch's own (as in torch, with the variance that divides by n - 1). In eval mode it
    normalises by the running statistics.
    """

    running_mean: Tensor  # torch's may be None
    running_var: Tensor
    recording = False

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (B, C, H, W) channel by channel."""
        weight, bias, mean, var = self.weight, self.bias, self.running_mean, self.running_var
        if not self.training:
            return F.batch_norm(x, mean, var, weight, bias, training=False, eps=self.eps)
        if not self.recording:
            return F.batch_norm(x, None, None, weight, bias, training=True, eps=self.eps)
        self.reset_running_stats()  # 0 * old + 1 * new stays NaN where old is, after a model that diverged
        return F.batch_norm(x, mean, var, weight, bias, training=True, momentum=1.0, eps=self.eps)


class GroupNorm(nn.GroupNorm):
    """Group norm over 32 groups; where 32 does not divide the channels, over the most groups that do."""

    def __init__(self, num_channels: int) -> None:
        super().__init__(math.gcd(NUM_GROUPS, num_channels), num_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (B, C, H, W) image by image and group by group."""
        # on CUDA x in bfloat16 with parameters in float32 is refused; batch norm takes both
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.group_norm(x, self.num_groups, weight, bias, self.eps)


class LayerNorm(nn.LayerNorm):
    """Layer norm of one model, or of W, whose parameters may be of a higher precision than its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)  # as in GroupNorm
        if weight.dim() == 1:
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
        normed = F.layer_norm(x, self.normalized_shape, eps=self.eps)
        return torch.addcmul(bias[:, None, None], normed, weight[:, None, None])


@torch.no_grad()
def record_statistics(network: nn.Module, images: Tensor) -> None:
    """Set every BatchNorm's statistics from one pass over `images`; leaves the network in eval mode."""
    layers = [layer for layer in network.modules() if isinstance(layer, BatchNorm)]
    network.train()
    for layer in layers:
        layer.recording = True
    if layers:
        network(images)
    for layer in layers:
        layer.recording = False
    network.eval()
