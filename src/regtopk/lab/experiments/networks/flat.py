"""A network whose parameters live in one flat vector.

Weights of convolutions are stored with the channels last, as fast convolutions read them: entries of such a
layer are in the order (out, height, width, in).
"""

import torch
from torch import Tensor, nn

from regtopk.core.worker import Layout, layer_kinds

NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)


class FlatWeights:
    """(W, J) weights of W networks, in float32 and, for the layers that compute in it, a lower precision.

    Norms stay in float32: their parameters are few and their sums long.
    """

    def __init__(self, network: nn.Module, num: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout_of(network)
        self.full = aligned_rows(num, self.layout.numel, torch.float32, device)
        is_low = dtype != torch.float32
        self.low = aligned_rows(num, self.layout.numel, dtype, device) if is_low else self.full

    def load_(self, params: Tensor) -> None:
        """Take over parameters in float32: W J of them, or J for all."""
        self.full.copy_(params.reshape(-1, self.layout.numel))
        if self.low is not self.full:
            self.low.copy_(self.full)

    def bind(self, network: nn.Module, row: int | slice) -> nn.Module:
        """Make the network's parameters views of a row, or of several as (W, ...)."""
        norms = {id(p) for part in network.modules() if isinstance(part, NORMS) for p in part.parameters()}
        for layer, parameter in zip(self.layout.layers, network.parameters(), strict=True):
            source = self.full if id(parameter) in norms else self.low
            parameter.data = self.views(source[row])[layer.name]
        return network

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat vector (..., J), parameter by parameter, in their own shapes."""
        layers = self.layout.layers
        return {layer.name: _in_own_shape(flat[..., layer.entries], layer.shape) for layer in layers}


def aligned_rows(num: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(num, numel), every row at a multiple of 256 bytes: else convolutions are 20 times slower on a GPU."""
    step = 256 // dtype.itemsize
    return torch.zeros(num, -(-numel // step) * step, dtype=dtype, device=device)[:, :numel]


def flatten(network: nn.Module) -> Tensor:
    """The parameters as one vector."""
    return torch.cat([_channels_last(p.detach()).reshape(-1) for p in network.parameters()]).float()


def layout_of(network: nn.Module) -> Layout:
    """Which parameter owns which entries of the vector."""
    kinds = layer_kinds(network)
    return Layout.of_shapes(
        (name, tuple(_channels_last(p).shape), kinds[name]) for name, p in network.named_parameters()
    )


def _channels_last(parameter: Tensor) -> Tensor:
    return parameter.permute(0, 2, 3, 1) if parameter.dim() == 4 else parameter


def _in_own_shape(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A conv's weight is (out, in, height, width) to torch."""
    own: Tensor = part.unflatten(-1, shape)
    return own.permute(0, 3, 1, 2) if len(shape) == 4 else own
