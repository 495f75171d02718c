"""Perceptrons, for vectors."""

from itertools import pairwise

from torch import nn


def perceptron(*sizes: int) -> nn.Sequential:
    """Linear layers from one size to the next, with ReLU between them."""
    layers = [part for a, b in pairwise(sizes) for part in (nn.ReLU(), nn.Linear(a, b))]
    return nn.Sequential(*layers[1:])
