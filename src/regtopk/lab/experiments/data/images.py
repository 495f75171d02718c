"""Image data sets from where the user has them: digits, Fashion-MNIST, CIFAR-10.

Nothing is fetched. Understood layouts (docs/data.md describes them):

    digits         scikit-learn's, in its wheel; no path needed
    fashion-mnist  a folder with the four IDX files, gzipped or not (Debian: dataset-fashion-mnist)
    cifar10        the folder of the official archive (data_batch_1 ... test_batch), or a packed file (.npz
                   of image files)
"""

import gzip
import pickle
import zipfile
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regtopk.core.options import check_choice
from regtopk.errors import ArgumentError, MissingExtraError

FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package puts it
FASHION_COUNTS = {"train": 60_000, "t10k": 10_000}
CIFAR_COUNTS = {"train": 50_000, "test": 10_000}
CIFAR_CLASSES = 10
CIFAR_SHAPE = (32, 32, 3)


class Images(NamedTuple):
    """Images in 0..1 as float32, (n, pixels) or (n, channels, height, width), and labels (n,) int64."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def load_images(name: str, path: Path | None, device: str | torch.device) -> Images:
    """Load a data set onto a device.

    Raises:
        ArgumentError: the path does not hold it; the message says what was looked for and what was found.
        MissingExtraError: a package that reads it is not installed.
    """
    check_choice("data set", name, LOADERS)
    images = Images(*(tensor.to(device) for tensor in LOADERS[name](path)))
    if images.train.is_floating_point():
        return images
    # bytes until here: they travel to a device in a quarter of the time
    return images._replace(train=images.train.float() / 255, test=images.test.float() / 255)


def standardised(images: Images) -> Images:
    """Pixels less the mean of the training images, over their deviation, by channel."""
    over = [0, *range(2, images.train.dim())] if images.train.dim() > 2 else [0, 1]
    mean, std = images.train.mean(over, keepdim=True), images.train.std(over, keepdim=True)
    return images._replace(train=(images.train - mean) / std, test=(images.test - mean) / std)


def load_digits(path: Path | None) -> Images:
    """scikit-learn's digits: 1,797 images of 8 x 8, the last 360 of a fixed shuffle for the test."""
    if path is not None:
        raise ArgumentError(f"digits come with scikit-learn and take no data, got '{path}'")
    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingExtraError(
            "the digits come with scikit-learn: pip install 'regtopk[experiments]'"
        ) from error
    x, y = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(x, dtype=torch.float32) / 16)[order]
    labels = torch.tensor(y, dtype=torch.int64)[order]
    return Images(images[:-360], labels[:-360], images[-360:], labels[-360:])


def load_fashion_mnist(path: Path | None) -> Images:
    """Fashion-MNIST: 60,000 + 10,000 images of 28 x 28."""
    folder = path or FASHION_FOLDER
    parts = []
    for split, count in FASHION_COUNTS.items():
        images = _read_idx(folder, f"{split}-images-idx3-ubyte")
        labels = _read_idx(folder, f"{split}-labels-idx1-ubyte")
        _check_counts(folder, split, len(images), len(labels), count)
        parts += [torch.tensor(images).flatten(1), torch.tensor(labels).long()]
    return Images(*parts)


def _read_idx(folder: Path, name: str) -> Any:
    for path, opener in ((folder / f"{name}.gz", gzip.open), (folder / name, open)):
        if path.is_file():
            with opener(path, "rb") as file:
                content = file.read()
            num_dims = content[3]
            shape = np.frombuffer(content, ">i4", num_dims, offset=4)
            return np.frombuffer(content, np.uint8, offset=4 + 4 * num_dims).reshape(shape).copy()
    raise ArgumentError(
        f"data path must be a folder with {name}[.gz] (Debian: apt install dataset-fashion-mnist), "
        f"got {folder}: {_found(folder)}"
    )


def load_cifar10(path: Path | None) -> Images:
    """CIFAR-10: 50,000 + 10,000 images of 3 x 32 x 32, from either layout."""
    if path is None:
        raise ArgumentError("data must be given for cifar10: the archive's folder or a packed file")
    if path.is_file() and path.suffix == ".npz":
        return _load_packed(path)
    for folder in (path, path / "cifar-10-batches-py"):
        if (folder / "data_batch_1").is_file():
            return _load_batches(folder)
    raise ArgumentError(
        "data path must be the folder of the official archive (data_batch_1 ...) or a packed .npz file, "
        f"got {path}: {_found(path)}"
    )


def _load_batches(folder: Path) -> Images:
    def read(split: str, names: list[str]) -> tuple[Tensor, Tensor]:
        batches = [_read_batch(folder / name) for name in names]
        pixels = np.concatenate([pixels for pixels, _ in batches])
        labels = np.concatenate([labels for _, labels in batches])
        _check_cifar(folder, split, len(pixels), labels)
        return torch.tensor(pixels), torch.tensor(labels).long()

    return Images(*read("train", [f"data_batch_{i}" for i in range(1, 6)]), *read("test", ["test_batch"]))


def _read_batch(path: Path) -> tuple[Any, Any]:
    try:
        with path.open("rb") as file:
            batch = _PlainUnpickler(file, encoding="bytes").load()
        return batch[b"data"].reshape(-1, 3, 32, 32), np.asarray(batch[b"labels"])
    except (OSError, EOFError, pickle.UnpicklingError, LookupError, AttributeError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"data batches must be those of CIFAR-10's Python archive, got {path}: {error!r}"
        ) from error


class _PlainUnpickler(pickle.Unpickler):
    """Reads arrays and plain containers, and refuses to run anything else a pickle may ask for."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return super().find_class(module, name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise ArgumentError(f"data batches must hold plain arrays, got {module}.{name}")


def _load_packed(path: Path) -> Images:
    """All JPEG files one after another, with offsets and labels: decoded here, once."""
    try:
        with path.open("rb") as file:
            packed = dict(np.load(file))
    except (OSError, EOFError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ArgumentError(
            f"packed file must be a whole .npz file, got {path} ({type(error).__name__})"
        ) from error
    parts = []
    for split in CIFAR_COUNTS:
        names = [f"{split}_{part}" for part in ("jpeg", "offsets", "labels")]
        missing = [name for name in names if name not in packed]
        if missing:
            raise ArgumentError(f"packed file must hold {', '.join(names)}, got {path} without {missing}")
        jpegs, offsets, labels = (packed[name] for name in names)
        _check_cifar(path, split, len(offsets) - 1, labels)
        if offsets[0] != 0 or offsets[-1] != len(jpegs) or (np.diff(offsets) <= 0).any():
            raise ArgumentError(f"{split}_offsets must rise from 0 to the {len(jpegs):,} bytes in {path}")
        pixels = np.empty((len(labels), *CIFAR_SHAPE), np.uint8)
        for i, (start, end) in enumerate(pairwise(offsets)):
            pixels[i] = _decode(jpegs[start:end].tobytes(), f"{split} image {i} of {path}")
        parts += [torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels).long()]
    return Images(*parts)


def _decode(image: bytes, where: str) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("image files need Pillow: pip install 'regtopk[experiments]'") from error
    try:
        pixels = np.asarray(Image.open(BytesIO(image)).convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for damaged files
        raise ArgumentError(f"image files must be whole, got {where}: {error}") from error
    if pixels.shape != CIFAR_SHAPE:
        raise ArgumentError(f"images must be 32 x 32 pixels, got {pixels.shape[:2]} in {where}")
    return pixels


def _check_cifar(path: Path, split: str, num_images: int, labels: Any) -> None:
    """As many images as CIFAR-10 has, and as many of each class."""
    _check_counts(path, split, num_images, len(labels), CIFAR_COUNTS[split])
    expected = dict.fromkeys(range(CIFAR_CLASSES), CIFAR_COUNTS[split] // CIFAR_CLASSES)
    classes, counts = np.unique(labels, return_counts=True)
    found = dict(zip(classes.tolist(), counts.tolist(), strict=True))
    if found != expected:
        raise ArgumentError(
            f"{split} part must hold as many images of each class from 0 to 9, got {found} in {path}"
        )


def _check_counts(path: Path, split: str, num_images: int, num_labels: int, expected: int) -> None:
    if (num_images, num_labels) != (expected, expected):
        raise ArgumentError(
            f"{split} part must hold {expected:,} images and labels, got {num_images:,} and {num_labels:,} "
            f"in {path}"
        )


def _found(path: Path) -> str:
    if not path.exists():
        return "there is nothing"
    if path.is_file():
        return "that is a file"
    names = sorted(part.name for part in path.iterdir())[:5]
    return f"it holds {', '.join(names)}" if names else "it is empty"


LOADERS: dict[str, Callable[[Path | None], Images]] = {
    "digits": load_digits,
    "fashion-mnist": load_fashion_mnist,
    "cifar10": load_cifar10,
}
