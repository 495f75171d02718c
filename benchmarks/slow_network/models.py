"""A model with the parameters of ResNet-18 whose own forward and backward pass take little."""

import math

import torch
from torch import Tensor, nn


def resnet18_shapes() -> list[tuple[int, ...]]:
    """Shapes of the parameters of ResNet-18 with a 3 x 3 stem and 10 classes: 11,173,962 in all."""
    shapes: list[tuple[int, ...]] = []

    def convolution(out: int, of: int, size: int) -> None:
        shapes.extend([(out, of, size, size), (out,), (out,)])  # with its batch norm

    convolution(64, 3, 3)
    before = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            convolution(width, before if block == 0 else width, 3)
            convolution(width, width, 3)
            if block == 0 and width != before:
                convolution(width, before, 1)
        before = width
    return [*shapes, (10, 512), (10,)]


class Shapes(nn.Module):
    """Parameters of given shapes, each a layer of its own: loss = sum over layers of |tanh(W x)|^2.

    A product with a matrix instead of a convolution over an image: gradients are dense and differ from step
    to step and from worker to worker, as any network's, for a few reads of the parameters.
    """

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        tensors = [torch.randn(shape) / math.sqrt(math.prod(shape[1:])) for shape in shapes]
        self.layers = nn.ParameterList(tensors)
        self.width = max(math.prod(shape[1:]) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        """The loss; x is (batch, width)."""
        parts = []
        for parameter in self.layers:
            matrix = parameter.flatten(1) if parameter.dim() > 1 else parameter.unsqueeze(1)
            parts.append(torch.tanh(x[:, : matrix.shape[1]] @ matrix.t()).square().sum())
        return torch.stack(parts).sum()


def small_shapes() -> list[tuple[int, ...]]:
    """A quarter of a million parameters, to try the harness itself."""
    return [(400, 600), (400,), (10, 400), (10,)]


MODELS = {"resnet18": resnet18_shapes, "small": small_shapes}
