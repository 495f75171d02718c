"""Image data sets from where the user has them: digits, Fashion-MNIST, CIFAR-10.

Nothing is fetched. Understood layouts:

    digits         scikit-learn's, in its wheel; no path needed
    fashion-mnist  a folder with the four IDX files, gzipped or not (Debian: dataset-fashion-mnist)
    cifar10        the folder of the official archive (data_batch_1 ... test_batch), an image folder
                   (train/CLASS/*.png, test/CLASS/*.png), or a packed file (.npz of JPEGs, see docs/data.md)
"""

import gzip
import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regtopk.errors import ArgumentError, MissingExtraError

FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package puts it
FASHION_COUNTS = {"train": 60_000, "t10k": 10_000}
CIFAR_COUNTS = {"train": 50_000, "test": 10_000}


class Images(NamedTuple):
    """Images in 0..1 as float32, (n, pixels) or (n, channels, height, width), and labels (n,) int64."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def load_images(name: str, path: Path | None, device: str) -> Images:
    """Load a data set onto a device.

    Raises:
        ArgumentError: the path does not hold it; the message says what was looked for and what was found.
        MissingExtraError: a package that reads it is not installed.
    """
    if name not in LOADERS:
        raise ArgumentError(f"data set must be one of {', '.join(LOADERS)}, got {name!r}")
    images = LOADERS[name](path)
    return Images(*(tensor.to(device) for tensor in images))


def load_digits(path: Path | None) -> Images:
    """scikit-learn's digits: 1,797 images of 8 x 8, the last 360 of a fixed shuffle for the test."""
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
        parts += [torch.tensor(images).flatten(1).float() / 255, torch.tensor(labels).long()]
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
        f"data path must be a folder with {name}[.gz] (Debian: apt install dataset-fashion-mnist, or give "
        f"--data), got {folder}: {_found(folder)}"
    )


def load_cifar10(path: Path | None) -> Images:
    """CIFAR-10: 50,000 + 10,000 images of 3 x 32 x 32, from any of the three layouts."""
    if path is None:
        raise ArgumentError(
            "cifar10 needs --data PATH: the archive's folder, an image folder or a packed file"
        )
    if path.is_file() and path.suffix == ".npz":
        return _load_packed(path)
    for folder in (path, path / "cifar-10-batches-py"):
        if (folder / "data_batch_1").is_file():
            return _load_batches(folder)
    if (path / "train").is_dir() and (path / "test").is_dir():
        return _load_image_folder(path)
    raise ArgumentError(
        "data path must be the folder of the official archive (data_batch_1 ...), an image folder "
        f"(train/CLASS/*.png, test/CLASS/*.png) or a packed .npz file, got {path}: {_found(path)}"
    )


def _load_batches(folder: Path) -> Images:
    def read(names: list[str]) -> tuple[Tensor, Tensor]:
        batches = []
        for name in names:
            with (folder / name).open("rb") as file:
                batches.append(_PlainUnpickler(file, encoding="bytes").load())
        pixels = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
        labels = np.concatenate([np.asarray(batch[b"labels"]) for batch in batches])
        return torch.tensor(pixels).float() / 255, torch.tensor(labels).long()

    train, test = read([f"data_batch_{i}" for i in range(1, 6)]), read(["test_batch"])
    for split, (images, labels) in {"train": train, "test": test}.items():
        _check_counts(folder, split, len(images), len(labels), CIFAR_COUNTS[split])
    return Images(*train, *test)


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
    packed = np.load(path)
    parts = []
    for split, count in CIFAR_COUNTS.items():
        names = [f"{split}_{part}" for part in ("jpeg", "offsets", "labels")]
        missing = [name for name in names if name not in packed]
        if missing:
            raise ArgumentError(f"packed file must hold {', '.join(names)}, got {path} without {missing}")
        jpegs, offsets, labels = (packed[name] for name in names)
        _check_counts(path, split, len(offsets) - 1, len(labels), count)
        pixels = np.empty((count, 32, 32, 3), np.uint8)
        for i in range(count):
            pixels[i] = _decode(jpegs[offsets[i] : offsets[i + 1]].tobytes())
        parts += [_to_channels_first(pixels), torch.tensor(labels).long()]
    return Images(*parts)


def _load_image_folder(path: Path) -> Images:
    parts = []
    classes = sorted(folder.name for folder in (path / "train").iterdir() if folder.is_dir())
    for split in ("train", "test"):
        pixels, labels = [], []
        for label, name in enumerate(classes):
            for file in sorted((path / split / name).glob("*")):
                pixels.append(_decode(file.read_bytes()))
                labels.append(label)
        if not pixels:
            raise ArgumentError(f"image folder must hold {split}/CLASS/*, got {path}: {_found(path / split)}")
        parts += [_to_channels_first(np.stack(pixels)), torch.tensor(labels)]
    return Images(*parts)


def _to_channels_first(pixels: Any) -> Tensor:
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float() / 255


def _decode(image: bytes) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("image files need Pillow: pip install 'regtopk[plots]'") from error
    return np.asarray(Image.open(BytesIO(image)).convert("RGB"))


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
