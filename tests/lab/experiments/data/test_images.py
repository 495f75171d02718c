import gzip
import pickle
import re
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch

from regtopk.errors import ArgumentError
from regtopk.lab.experiments.data import images
from regtopk.lab.experiments.data.examples import _fingerprint, of_images
from regtopk.lab.experiments.data.images import load_images

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def small_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "FASHION_COUNTS", {"train": 6, "t10k": 4})
    monkeypatch.setattr(images, "CIFAR_COUNTS", {"train": 20, "test": 10})


def write_idx(path: Path, array: np.ndarray) -> None:
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as file:
        file.write(head + array.astype(np.uint8).tobytes())


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
    write_idx(tmp_path / "train-images-idx3-ubyte", np.zeros((2, 28, 28)))
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(2))
    with pytest.raises(ArgumentError, match=r"train part of .* must hold 6 images and labels, got 2 and 2"):
        load_images("fashion-mnist", tmp_path, "cpu")


def write_archive(folder: Path) -> None:
    for name, count in [*((f"data_batch_{i}", 4) for i in range(1, 6)), ("test_batch", 10)]:
        first = 0 if name == "test_batch" else 4 * int(name[-1]) - 4
        labels = [label % 10 for label in range(first, first + count)]
        batch = {b"data": np.full((count, 3072), 51, np.uint8), b"labels": labels}
        content = pickle.dumps(batch, protocol=2).replace(b"numpy._core.", b"numpy.core.")  # as in 2009
        (folder / name).write_bytes(content)


def image_file(number: int, suffix: str) -> bytes:
    content = BytesIO()
    pytest.importorskip("PIL.Image").new("RGB", (32, 32), (number * 10, 0, 0)).save(content, suffix)
    return content.getvalue()


def write_packed(path: Path, **changes: np.ndarray) -> Path:
    packed: dict[str, np.ndarray] = {}
    for split, count in (("train", 20), ("test", 10)):
        contents = [image_file(i, "png") for i in range(count)]
        packed[f"{split}_jpeg"] = np.frombuffer(b"".join(contents), np.uint8)
        packed[f"{split}_offsets"] = np.cumsum([0, *map(len, contents)])
        packed[f"{split}_labels"] = np.arange(count, dtype=np.uint8) % 10
    np.savez(path, **{**packed, **changes})  # type: ignore[arg-type]
    return path


def test_the_official_archive_is_read_without_running_its_pickles(tmp_path: Path) -> None:
    write_archive(tmp_path)
    found = load_images("cifar10", tmp_path, "cpu")
    assert found.train.shape == (20, 3, 32, 32) and float(found.train[0, 0, 0, 0]) == pytest.approx(0.2)
    assert found.train_labels.tolist() == [*range(10)] * 2
    (tmp_path / "test_batch").write_bytes(pickle.dumps({b"data": Path("x")}))
    with pytest.raises(ArgumentError, match=r"test_batch: .*no plain array: pathlib"):
        load_images("cifar10", tmp_path, "cpu")


@pytest.mark.parametrize("content", [b"", b"cut", pickle.dumps({b"data": [1]}), pickle.dumps({})])
def test_a_damaged_archive_names_its_file(tmp_path: Path, content: bytes) -> None:
    write_archive(tmp_path)
    (tmp_path / "data_batch_3").write_bytes(content)
    with pytest.raises(ArgumentError, match=r"data must be the folder .*, got .*data_batch_3"):
        load_images("cifar10", tmp_path, "cpu")


def test_the_guides_code_packs_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, count in (("train", 20), ("test", 10)):
        for i in range(count):
            path = tmp_path / "images" / split / "abcdefghij"[i % 10] / f"{i:02}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image_file(i, "jpeg"))
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "data.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(compile(code, str(page), "exec"), {})
    packed = load_images("cifar10", tmp_path / "cifar10.npz", "cpu")
    assert packed.train.shape == (20, 3, 32, 32) and packed.train_labels.tolist() == sorted([*range(10)] * 2)
    red = packed.train[:, 0, 0, 0][packed.train_labels == 3]  # images 3 and 13
    assert torch.allclose(red, torch.tensor([30.0, 130.0]) / 255, atol=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": np.arange(19)}, "train part .* got 20 and 19"),
        ({"train_jpeg": np.frombuffer(b"no image" * 99, np.uint8)}, "packed.npz: UnidentifiedImageError"),
        ({"test_jpeg": np.zeros(0, np.uint8)}, "data must be a packed .npz file .*, got .*packed.npz"),
    ],
)
def test_a_packed_file_is_checked(tmp_path: Path, changes: dict[str, np.ndarray], message: str) -> None:
    path = write_packed(tmp_path / "packed.npz", **changes)
    with pytest.raises(ArgumentError, match=message):
        load_images("cifar10", path, "cpu")


def test_a_damaged_packed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "packed.npz"
    np.savez(path, train_jpeg=np.zeros(1))
    for damaged in (path.read_bytes(), b"PK\x03\x04 cut short", b"nothing", b""):
        path.write_bytes(damaged)
        with pytest.raises(ArgumentError, match=r"packed .npz file of CIFAR-10, got .*packed.npz"):
            load_images("cifar10", path, "cpu")


@pytest.mark.parametrize(
    ("name", "has_path", "message"),
    [
        ("fashion-mnist", True, r"data must be an IDX file .*, got .*train-images-idx3-ubyte: FileNotFound"),
        ("cifar10", True, r"data must be the folder of CIFAR-10's Python archive, .*data_batch_1: File"),
        ("cifar10", False, "data must be given for cifar10"),
        ("mnist", True, "data set must be one of digits"),
    ],
)
def test_a_path_without_the_data_is_refused(tmp_path: Path, name: str, has_path: bool, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        load_images(name, tmp_path if has_path else None, "cpu")


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
