import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from regtopk.errors import ArgumentError
from regtopk.experiments import images
from regtopk.experiments.images import load_images


@pytest.fixture
def small_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "FASHION_COUNTS", {"train": 6, "t10k": 4})
    monkeypatch.setattr(images, "CIFAR_COUNTS", {"train": 10, "test": 4})


def write_idx(path: Path, array: np.ndarray) -> None:
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as file:
        file.write(head + array.astype(np.uint8).tobytes())


def test_digits_are_divided_once_and_for_all() -> None:
    digits = load_images("digits", None, "cpu")
    assert digits.train.shape == (1437, 64) and digits.test.shape == (360, 64)
    assert float(digits.train.max()) == 1.0 and set(digits.train_labels.tolist()) == set(range(10))


@pytest.mark.usefixtures("small_counts")
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_fashion_mnist_is_read_from_idx_files(tmp_path: Path, suffix: str) -> None:
    pixels = np.arange(6 * 28 * 28).reshape(6, 28, 28) % 256
    for split, count in (("train", 6), ("t10k", 4)):
        write_idx(tmp_path / f"{split}-images-idx3-ubyte{suffix}", pixels[:count])
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte{suffix}", np.arange(count))
    found = load_images("fashion-mnist", tmp_path, "cpu")
    assert torch.equal(found.train, torch.tensor(pixels.reshape(6, -1) / 255).float())
    assert found.test_labels.tolist() == [0, 1, 2, 3]


def test_an_incomplete_set_is_refused_with_its_counts(tmp_path: Path) -> None:
    for split in ("train", "t10k"):
        write_idx(tmp_path / f"{split}-images-idx3-ubyte", np.zeros((2, 28, 28)))
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte", np.zeros(2))
    with pytest.raises(ArgumentError, match="train part must hold 60,000 images and labels, got 2 and 2"):
        load_images("fashion-mnist", tmp_path, "cpu")


@pytest.mark.usefixtures("small_counts")
def test_the_official_archive_is_read_without_running_its_pickles(tmp_path: Path) -> None:
    for name, count in [*((f"data_batch_{i}", 2) for i in range(1, 6)), ("test_batch", 4)]:
        batch = {b"data": np.full((count, 3072), 51, np.uint8), b"labels": list(range(count))}
        (tmp_path / name).write_bytes(pickle.dumps(batch))
    found = load_images("cifar10", tmp_path, "cpu")
    assert found.train.shape == (10, 3, 32, 32) and float(found.train[0, 0, 0, 0]) == pytest.approx(0.2)
    (tmp_path / "test_batch").write_bytes(pickle.dumps({b"data": Path("x")}))
    with pytest.raises(ArgumentError, match="data batches must hold plain arrays, got pathlib"):
        load_images("cifar10", tmp_path, "cpu")


@pytest.mark.usefixtures("small_counts")
def test_packed_and_folder_layouts_agree(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    packed: dict[str, np.ndarray] = {}
    for split, count in (("train", 10), ("test", 4)):
        files = []
        for i in range(count):
            folder = tmp_path / "folder" / split / ("cat" if i % 2 else "ant")
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{i:02}.png"
            image.new("RGB", (32, 32), (i * 20, 0, 0)).save(path)
            files.append(path.read_bytes())
        packed[f"{split}_jpeg"] = np.frombuffer(b"".join(files), np.uint8)
        packed[f"{split}_offsets"] = np.cumsum([0, *map(len, files)])
        packed[f"{split}_labels"] = np.arange(count) % 2
    np.savez(tmp_path / "packed.npz", **packed)  # type: ignore[arg-type]
    one, other = (load_images("cifar10", tmp_path / name, "cpu") for name in ("packed.npz", "folder"))
    order = one.train_labels.sort(stable=True).indices
    assert torch.equal(one.train[order], other.train) and torch.equal(
        one.train_labels[order], other.train_labels
    )


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar10"])
def test_a_path_without_the_data_says_what_was_found(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArgumentError, match=r"data path must be .* it is empty"):
        load_images(name, tmp_path, "cpu")
    (tmp_path / "other").touch()
    with pytest.raises(ArgumentError, match="it holds other"):
        load_images(name, tmp_path, "cpu")
    with pytest.raises(ArgumentError, match="there is nothing"):
        load_images(name, tmp_path / "missing", "cpu")


def test_cifar10_needs_a_path() -> None:
    with pytest.raises(ArgumentError, match="cifar10 needs --data PATH"):
        load_images("cifar10", None, "cpu")
    with pytest.raises(ArgumentError, match="data set must be one of digits"):
        load_images("mnist", None, "cpu")
