"""Text as tokens, one for each different character: a file the user has, or the sources of torch."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regtopk.errors import ArgumentError

TEST_PART = 10  # the last tenth is kept for the test
LEAST_OF_TORCH, MOST_OF_TORCH = 8_000_000, 24_000_000  # bytes of torch's sources
USUAL = bytes([10, *range(32, 127)])  # the line feed and what ASCII prints: 96 characters


class Text(NamedTuple):
    """Tokens (n,) int64 of the training and the test part, how many different ones there are, and a hash."""

    train: Tensor
    test: Tensor
    vocabulary_size: int
    sha256: str  # of the text in UTF-8


def load_text(path: Path | None, *, sources: Callable[[], str] | None = None, window: int) -> Text:
    """Read a text: the vocabulary is the characters found, the last tenth is the test.

    Args:
        path: a file in UTF-8.
        sources: makes the text where there is no file; None: `torch_sources`.
        window: characters per example; the text must have ten examples.
    """
    text = _read(path) if path else (sources or torch_sources)()
    least = TEST_PART * window
    if len(text) < least:
        raise ArgumentError(f"text must have at least {least:,} characters, got {len(text):,} in {path}")
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    vocabulary, tokens = np.unique(points, return_inverse=True)
    num_test = len(tokens) // TEST_PART
    train, test = torch.from_numpy(tokens.astype(np.int64)).split([len(tokens) - num_test, num_test])
    return Text(train, test, len(vocabulary), sha256(text.encode()).hexdigest())


def windows(tokens: Tensor, length: int) -> Tensor:
    """Examples (n, length), each beginning with the last token of the one before: all are predicted once."""
    return tokens.unfold(0, length, length - 1)


def torch_sources(folder: Path | None = None, least: int = LEAST_OF_TORCH) -> str:
    """Sources of torch, 24 MB of them: all who train have them, and they depend on torch's version alone.

    Files come in the order of a hash of their names, which is as good as a random draw. Left out are copies,
    and files with other characters than `USUAL`. Of the chosen files the first ones are the last tenth of the
    text, so the test has files of all kinds. The rest is in the order of names: neighbours in the text are of
    one package.
    """
    folder = folder or Path(torch.__file__).parent
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if path.is_file()]
    drawn: dict[str, bytes] = {}
    seen, num_bytes = set(), 0
    for name in sorted(names, key=lambda name: sha256(name.encode()).digest()):
        content = (folder / name).read_bytes()
        if content and content not in seen and not content.translate(None, USUAL):
            seen.add(content)
            drawn[name] = content[: MOST_OF_TORCH - num_bytes]
            num_bytes += len(drawn[name])
        if num_bytes == MOST_OF_TORCH:
            break
    if num_bytes < least:
        raise ArgumentError(
            f"without data, torch must have sources of at least {least:,} bytes, got {num_bytes:,} in "
            f"{folder}: give a text file"
        )
    train, test, num_test = list(drawn), [], 0
    while num_test < num_bytes // TEST_PART:
        test.append(train.pop(0))
        num_test += len(drawn[test[-1]])
    return b"".join(drawn[name] for name in (*sorted(train), *sorted(test))).decode("ascii")


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ArgumentError(f"text must be a file, got {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"text must be UTF-8, got another byte at {error.start} of {path}") from error
