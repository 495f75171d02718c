"""Image data sets from where the user has them, in the layouts of docs/data.md. Nothing is fetched."""

import gzip
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regtopk.core.options import check_choice
from regtopk.errors import ArgumentError, importing

FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package puts it
FASHION_COUNTS = {"train": 60_000, "t10k": 10_000}
CIFAR_COUNTS = {"train": 50_000, "test": 10_000}
BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}  # of CIFAR-10's archive
# what readers raise for damaged files
DAMAGES = (
    OSError, EOFError, LookupError, AttributeError, TypeError, ValueError, SyntaxError,
    pickle.UnpicklingError, zipfile.BadZipFile,
)  # fmt: skip


class Images(NamedTuple):
    """Images in 0..1 as float32, (n, pixels) or (n, channels, height, width), and labels (n,) int64."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def load_images(name: str, path: Path | None, device: str | torch.device) -> Images:
    """Load a data set onto a device; a path that does not hold it is refused."""
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
    with importing("digits need scikit-learn: pip install 'regtopk[experiments]'"):
        from sklearn import datasets
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
        images = _read_idx(folder / f"{split}-images-idx3-ubyte")
        labels = _read_idx(folder / f"{split}-labels-idx1-ubyte")
        _check_counts(folder, split, images, labels, count)
        parts += [torch.tensor(images).flatten(1), torch.tensor(labels).long()]
    return Images(*parts)


def _read_idx(path: Path) -> Any:
    zipped = path.with_name(f"{path.name}.gz")
    with reading("an IDX file of Fashion-MNIST (Debian: apt install dataset-fashion-mnist)", path):
        content = gzip.decompress(zipped.read_bytes()) if zipped.exists() else path.read_bytes()
        num_dims = content[3]
        shape = np.frombuffer(content, ">i4", num_dims, offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * num_dims).reshape(shape).copy()


def load_cifar10(path: Path | None) -> Images:
    """CIFAR-10: 50,000 + 10,000 images of 3 x 32 x 32, from either layout."""
    if path is None:
        raise ArgumentError("data must be given for cifar10: the archive's folder or a packed file")
    below = path / "cifar-10-batches-py"
    folder = below if below.is_dir() else path
    parts = []
    for split, count in CIFAR_COUNTS.items():
        if path.suffix == ".npz":
            with reading("a packed .npz file of CIFAR-10", path):
                pixels, labels = _read_packed(path, split)
        else:
            batches = [_read_batch(folder / name) for name in BATCHES[split]]
            pixels, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        _check_counts(path, split, pixels, labels, count)
        parts += [torch.tensor(pixels), torch.tensor(labels).long()]
    return Images(*parts)


def _read_batch(path: Path) -> tuple[Any, Any]:
    with reading("the folder of CIFAR-10's Python archive, or a packed .npz file", path):
        batch = _PlainUnpickler(BytesIO(path.read_bytes()), encoding="bytes").load()
        return batch[b"data"].reshape(-1, 3, 32, 32), np.asarray(batch[b"labels"])


class _PlainUnpickler(pickle.Unpickler):
    """Reads arrays and plain containers, and refuses to run anything else a pickle may ask for."""

    def find_class(self, module: str, name: str) -> Any:
        is_array = module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype")
        if is_array or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"no plain array: {module}.{name}")


def _read_packed(path: Path, split: str) -> tuple[Any, Any]:
    """All image files one after another, with offsets and labels: decoded here, once."""
    with importing("image files need Pillow: pip install 'regtopk[experiments]'"):
        from PIL import Image
    with path.open("rb") as file:
        packed = np.load(file)
        files, offsets, labels = (packed[f"{split}_{part}"] for part in ("jpeg", "offsets", "labels"))
    contents = (BytesIO(files[start:end].tobytes()) for start, end in pairwise(offsets))
    pixels = np.stack([np.asarray(Image.open(content).convert("RGB")) for content in contents])
    return pixels.transpose(0, 3, 1, 2).reshape(-1, 3, 32, 32), labels


@contextmanager
def reading(rule: str, path: Path) -> Iterator[None]:
    """Turn what a reader raises into an error that names the file."""
    try:
        yield
    except DAMAGES as error:
        raise ArgumentError(f"data must be {rule}, got {path}: {error!r}") from error


def _check_counts(path: Path, split: str, images: Any, labels: Any, expected: int) -> None:
    if (len(images), len(labels)) != (expected, expected):
        rule = f"{split} part of {path} must hold {expected:,} images and labels"
        raise ArgumentError(f"{rule}, got {len(images):,} and {len(labels):,}")


LOADERS: dict[str, Callable[[Path | None], Images]] = {
    "digits": load_digits,
    "fashion-mnist": load_fashion_mnist,
    "cifar10": load_cifar10,
}
