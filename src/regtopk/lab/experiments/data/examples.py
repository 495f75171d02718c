"""Training and test examples, resident on the device."""

from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from regtopk.errors import ArgumentError
from regtopk.lab.experiments.data.images import load_images, standardised
from regtopk.lab.experiments.data.text import WINDOW, Text, load_text, windows

DATA_SETS = ("cifar10", "digits", "text")
NUM_FINGERPRINTED = 500  # images


class Examples(NamedTuple):
    """Images (n, height, width, channels) in float32 with labels (n,), or tokens (n, length) with the next.

    `labels` is what splits sort by, on the CPU: the class of an image, the place of a text window.
    `fingerprint` tells data sets apart, and orders of one: where it differs, so do the batches of a seed.
    """

    train: Tensor
    train_targets: Tensor
    test: Tensor
    test_targets: Tensor
    labels: Tensor
    num_classes: int
    fingerprint: str = ""

    def read(self, inputs: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """As a network takes them: images in its precision, channels last in memory, `size` wide (0: any)."""
        if not inputs.is_floating_point():
            return inputs
        images = inputs.to(dtype).permute(0, 3, 1, 2)
        if size in (0, images.shape[-1]):
            return images
        return F.interpolate(images, size=(size, size), mode="bilinear", antialias=False)


class Pixels(NamedTuple):
    """What images in 0..1 are shifted and scaled by: one number per channel, or one for all."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def load_examples(data_set: str, data: str, device: str, pixels: Pixels | None = None) -> Examples:
    """Load a data set.

    Args:
        data_set: one of `DATA_SETS`.
        data: where it is; empty where it needs no place.
        device: where the examples go.
        pixels: mean and standard deviation that a network expects; None: the images' own.
    """
    path = Path(data) if data else None
    if data_set == "text":
        return of_text(load_text(path), device)
    return _of_images(data_set, path, device, pixels)


def _of_images(data_set: str, path: Path | None, device: str, pixels: Pixels | None) -> Examples:
    images = load_images(data_set, path, device)
    fingerprint = _fingerprint(*images)  # before arithmetic that a device may round in its own way
    if pixels is None:
        images = standardised(images)
    else:
        mean, std = (torch.tensor(of, device=device).view(-1, 1, 1) for of in pixels)
        if len(pixels.mean) not in (1, images.train.shape[1]):
            raise ArgumentError(f"data_set must have {len(pixels.mean)} channels, got {data_set!r}")
        images = standardised(images, mean, std)
    if data_set == "digits":
        images = images._replace(train=images.train.view(-1, 1, 8, 8), test=images.test.view(-1, 1, 8, 8))
    labels = images.train_labels.cpu()
    train, test = (x.permute(0, 2, 3, 1).contiguous() for x in (images.train, images.test))  # channels last
    targets = images.train_labels, images.test_labels
    return Examples(train, targets[0], test, targets[1], labels, int(labels.max()) + 1, fingerprint)


def of_text(text: Text, device: str, window: int = WINDOW) -> Examples:
    """Windows of a text: all but the last character of each are read, all but the first predicted."""
    train, test = (windows(tokens, window).to(device) for tokens in (text.train, text.test))
    places = torch.arange(len(train))
    return Examples(
        train[:, :-1].contiguous(), train[:, 1:].contiguous(),
        test[:, :-1].contiguous(), test[:, 1:].contiguous(), places, text.vocabulary_size,
        _fingerprint(train, test),
    )  # fmt: skip


def _fingerprint(*tensors: Tensor) -> str:
    """Of labels and tokens all, of images some."""
    found = sha256()
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor = (255 * tensor[:: max(1, len(tensor) // NUM_FINGERPRINTED)]).round().to(torch.uint8)
        found.update(tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
