"""Training and test examples of deep networks, resident on the device."""

import math
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from regtopk.lab.experiments.data.images import load_images, standardised
from regtopk.lab.experiments.data.text import Text, windows

NUM_FINGERPRINTED = 500  # images


class Examples(NamedTuple):
    """Images (n, height, width, channels) in float32 with labels, or tokens (n, length) with the next."""

    train: Tensor
    train_targets: Tensor
    test: Tensor
    test_targets: Tensor
    labels: Tensor  # what splits sort by, on the CPU: the class of an image, the place of a text window
    num_classes: int
    fingerprint: str = ""  # tells data sets apart, and orders of one: else the batches of a seed are the same
    token_bytes: Tensor | None = None  # how many bytes each class stands for, if that is counted
    validation: tuple[Tensor, Tensor] | None = None  # what searches are judged by; None: the test examples


_NOTHING = torch.empty(0)
NO_EXAMPLES = Examples(_NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, num_classes=0)  # of a formula


def of_images(data_set: str, data: str, device: str) -> Examples:
    """The images of a data set in some place, standardised; `data` is empty where it needs no place."""
    images = load_images(data_set, Path(data) if data else None, device)
    fingerprint = _fingerprint(*images)  # before arithmetic that a device may round in its own way
    images = standardised(images)
    labels = images.train_labels.cpu()
    train, test, num_classes = *map(_channels_last, (images.train, images.test)), int(labels.max()) + 1
    return Examples(train, images.train_labels, test, images.test_labels, labels, num_classes, fingerprint)


def _channels_last(images: Tensor) -> Tensor:
    if images.dim() == 2:  # rows of square grey images
        side = math.isqrt(images.shape[1])
        return images.view(-1, side, side, 1)
    return images.permute(0, 2, 3, 1).contiguous()


def of_text(text: Text, device: str, window: int, most_tested: int) -> Examples:
    """Windows of a text: all but the last token of each are read, all but the first predicted.

    Those to train on are views of one vector on the device: 90 million tokens take 720 MB. Of the others
    there are at most so many, evenly spread.
    """
    train = windows(text.train.to(device), window)

    def some(tokens: Tensor) -> tuple[Tensor, Tensor]:
        found = windows(tokens.to(device), window)
        found = found[:: -(-len(found) // most_tested)]
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()

    places, fixed = torch.arange(len(train)), (text.vocabulary_size, text.sha256)
    examples = Examples(train[:, :-1], train[:, 1:], *some(text.test), places, *fixed)
    validation = None if text.validation is None else some(text.validation)
    return examples._replace(token_bytes=text.token_bytes.to(device), validation=validation)


def _fingerprint(*tensors: Tensor) -> str:
    """Of labels all, of images some."""
    found = sha256()
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor = (255 * tensor[:: max(1, len(tensor) // NUM_FINGERPRINTED)]).round().to(torch.uint8)
        found.update(tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
