"""Text as tokens, one for each different character: a file the user has, or Python's own library sources."""

import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regtopk.errors import ArgumentError

WINDOW = 129  # characters per example: 128 that are read, each with the one that follows
TEST_PART = 10  # the last tenth is kept for the test
MOST_BYTES = 2_000_000  # of library sources


class Text(NamedTuple):
    """Tokens (n,) int64 of the training and the test part, and how many different ones there are."""

    train: Tensor
    test: Tensor
    vocabulary_size: int


def load_text(path: Path | None = None) -> Text:
    """Read a text: the vocabulary is the characters found, the last tenth is the test.

    Args:
        path: a file in UTF-8; None takes the sources of this Python's library, which differ with its version.

    Raises:
        ArgumentError: there is no such file, it is not UTF-8, or it is too short for one test example.
    """
    text = library_sources() if path is None else _read(path)
    least = TEST_PART * WINDOW
    if len(text) < least:
        raise ArgumentError(f"text must have at least {least:,} characters, got {len(text):,} in {path}")
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    vocabulary, tokens = np.unique(points, return_inverse=True)
    train, test = torch.from_numpy(tokens.astype(np.int64)).split_with_sizes(
        [len(tokens) - len(tokens) // TEST_PART, len(tokens) // TEST_PART]
    )
    return Text(train, test, len(vocabulary))


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


def _read(path: Path) -> str:
    if not path.is_file():
        raise ArgumentError(
            f"text must be a file, got {path}: {'a folder' if path.is_dir() else 'nothing there'}"
        )
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"text must be UTF-8, got another byte at {error.start} of {path}") from error
