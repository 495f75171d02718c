"""Text as tokens, one for each different character: a file the user has, or sources of Python or torch."""

import sysconfig
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regtopk.errors import ArgumentError

WINDOW = 129  # characters per example: 128 that are read, each with the one that follows
TEST_PART = 10  # the last tenth is kept for the test
MOST_BYTES = 2_000_000  # of library sources
LEAST_OF_TORCH, MOST_OF_TORCH = 8_000_000, 24_000_000  # bytes of torch's sources
USUAL = bytes([10, *range(32, 127)])  # the line feed and what ASCII prints: 96 characters


class Text(NamedTuple):
    """Tokens (n,) int64 of the training and the test part, how many different ones there are, and a hash."""

    train: Tensor
    test: Tensor
    vocabulary_size: int
    sha256: str  # of the text in UTF-8


def load_text(
    path: Path | None = None, *, sources: Callable[[], str] | None = None, window: int = WINDOW
) -> Text:
    """Read a text: the vocabulary is the characters found, the last tenth is the test.

    Args:
        path: a file in UTF-8; None takes sources that are installed, which differ with their version.
        sources: which of these, `library_sources` or `torch_sources`; None: the first.
        window: characters per example.

    Raises:
        ArgumentError: there is no such file, it is not UTF-8, or it is too short for one test example.
    """
    text = (sources or library_sources)() if path is None else _read(path)
    least = TEST_PART * window
    if len(text) < least:
        raise ArgumentError(f"text must have at least {least:,} characters, got {len(text):,} in {path}")
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    vocabulary, tokens = np.unique(points, return_inverse=True)
    train, test = torch.from_numpy(tokens.astype(np.int64)).split_with_sizes(
        [len(tokens) - len(tokens) // TEST_PART, len(tokens) // TEST_PART]
    )
    return Text(train, test, len(vocabulary), sha256(text.encode()).hexdigest())


def windows(tokens: Tensor, length: int = WINDOW) -> Tensor:
    """Examples (n, length), each beginning with the last token of the one before: all are predicted once."""
    return tokens.unfold(0, length, length - 1)


def library_sources(folder: Path | None = None) -> str:
    """The modules of Python's library in order of their names, up to 2 MB; packages are left out.

    So are files with characters beyond ASCII, for a small vocabulary, and those that the build wrote.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    parts, num_bytes = [], 0
    for path in sorted(folder.glob("*.py")):
        content = path.read_bytes()
        if path.name.startswith("_sysconfigdata") or not content.isascii():
            continue
        parts.append(content[: MOST_BYTES - num_bytes])
        num_bytes += len(parts[-1])
    if not parts:
        raise ArgumentError(f"this Python has no library sources in {folder}: give a text file")
    return b"".join(parts).decode("ascii")


def torch_sources(folder: Path | None = None, least: int = LEAST_OF_TORCH) -> str:
    """Sources of torch, 24 MB of them: all who train have them, and they depend on torch's version alone.

    Files come in the order of a hash of their names, which is as good as a random draw. Left out are copies,
    and files with other characters than `USUAL`. Of the chosen files the first ones are the last tenth of the
    text, so the test has files of all kinds. The rest is in the order of names: neighbours in the text are of
    one package.

    Args:
        folder: where; None: where torch is installed.
        least: bytes that must be found.

    Raises:
        ArgumentError: there are fewer.
    """
    folder = folder or Path(torch.__file__).parent
    chosen = _draw(folder)
    num_bytes = sum(map(len, chosen.values()))
    if num_bytes < least:
        raise ArgumentError(
            f"without data, torch must have sources of at least {least:,} bytes, got {num_bytes:,} in "
            f"{folder}: give a text file"
        )
    drawn, test, num_test = list(chosen), [], 0
    while num_test < num_bytes // TEST_PART:
        test.append(drawn.pop(0))
        num_test += len(chosen[test[-1]])
    return b"".join(chosen[name] for name in (*sorted(drawn), *sorted(test))).decode("ascii")


def _draw(folder: Path) -> dict[str, bytes]:
    """The contents of files, by their names below a folder, in the order of a hash of these."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if path.is_file()]
    chosen: dict[str, bytes] = {}
    seen, num_bytes = set(), 0
    for name in sorted(names, key=lambda name: sha256(name.encode()).digest()):
        content = (folder / name).read_bytes()
        if not content or content in seen or content.translate(None, USUAL):
            continue
        seen.add(content)
        chosen[name] = content[: MOST_OF_TORCH - num_bytes]
        num_bytes += len(chosen[name])
        if num_bytes == MOST_OF_TORCH:
            break
    return chosen


def _read(path: Path) -> str:
    if not path.is_file():
        raise ArgumentError(
            f"text must be a file, got {path}: {'a folder' if path.is_dir() else 'nothing there'}"
        )
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"text must be UTF-8, got another byte at {error.start} of {path}") from error
