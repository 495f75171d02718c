"""Data sets are told apart by all that a training sees."""

import torch

from regtopk.lab.experiments.data.examples import _fingerprint, of_images


def test_fingerprints_tell_images_and_labels_apart() -> None:
    images, labels = torch.randint(256, (2000, 3, 4, 4)) / 255, torch.arange(2000) % 10
    same = _fingerprint(images, labels)
    assert _fingerprint(images + 1e-6, labels) == same  # as another device may round
    assert _fingerprint(images.add(0.01).clamp(max=1), labels) != same
    assert _fingerprint(images, labels.roll(1)) != same


def test_examples_have_one() -> None:
    first, again = (of_images("digits", "", "cpu") for _ in range(2))
    assert first.fingerprint == again.fingerprint and len(first.fingerprint) == 16
    assert first.train.shape == (1437, 8, 8, 1) and first.test.shape == (360, 8, 8, 1)
    assert first.num_classes == 10 and abs(float(first.train.mean())) < 1e-5
