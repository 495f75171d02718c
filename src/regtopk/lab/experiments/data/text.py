"""Text as tokens: characters, bytes or those of GPT-2, of a file the user has or of the sources of torch."""

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regtopk.core.options import check_choice
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.data.files import FILES, GPT2_FILES, TEXTS, fetch_public, read_public
from regtopk.lab.experiments.data.gpt2 import gpt2_tokens

TOKENS = ("characters", "bytes", "gpt2")
TEST_PART = 10  # of characters the last tenth is kept for the test
NUM_PARTS = 20  # of bytes and GPT-2's tokens the last is the test, and the one before it the validation
LEAST_OF_TORCH, MOST_OF_TORCH = 8_000_000, 24_000_000  # bytes of torch's sources
USUAL = bytes([10, *range(32, 127)])  # the line feed and what ASCII prints: 96 characters


class Text(NamedTuple):
    """Tokens (n,) int64 of the training and the test part, how many different ones there are, and a hash."""

    train: Tensor
    test: Tensor
    vocabulary_size: int
    sha256: str  # of the text in UTF-8
    token_bytes: Tensor  # of each token of the vocabulary
    validation: Tensor | None = None  # what searches are judged by; None: the test part


def load_text(path: Path | None, *, tokens: str = "characters", window: int) -> Text:
    """Read a text as tokens, each of its parts at least one example long.

    Args:
        path: a file in UTF-8, or the name of a public text that was fetched; None: `torch_sources`.
        tokens: one of `TOKENS`. characters: those found; the last tenth is the test. bytes: 256 of them, and
            gpt2: pieces of words; the last twentieth is the test, the one before it the validation.
        window: tokens per example.
    """
    check_choice("tokens", tokens, TOKENS)

    @cache
    def content() -> bytes:
        if path is None:
            return torch_sources().encode()
        try:
            return read_public(str(path)) if str(path) in TEXTS else path.read_bytes()
        except OSError as error:
            raise ArgumentError(f"text must be a file, got {path}: {error.strerror}") from error

    def parts() -> list[str]:
        _decoded(content(), path)  # as a whole: an error then names the place
        return [part.decode() for part in _cut(content())]

    if tokens == "gpt2":
        text_sha256 = FILES[str(path)].sha256 if str(path) in TEXTS else sha256(content()).hexdigest()
        (train, validation, test), token_bytes = gpt2_tokens(text_sha256, parts)
        text = Text(train, test, len(token_bytes), text_sha256, token_bytes, validation)
    else:
        text = _of_bytes(content()) if tokens == "bytes" else _of_characters(content(), path)
    shortest = min(len(part) for part in (text.train, text.validation, text.test) if part is not None)
    if shortest < window:
        raise ArgumentError(
            f"text must have at least {window:,} tokens in each part, got {shortest:,} in {path}"
        )
    return text


def fetch_text(path: Path, tokens: str) -> Text:
    """Fetch a text, if it is a public one, and what its tokens need, and read it, which encodes it once."""
    check_choice("tokens", tokens, TOKENS)
    public = [name for name in TEXTS if name == str(path)]
    for name in (*public, *(GPT2_FILES if tokens == "gpt2" else ())):
        fetch_public(name)
    return load_text(path, tokens=tokens, window=1)


def _of_characters(content: bytes, path: Path | None) -> Text:
    points = np.frombuffer(_decoded(content, path).encode("utf-32-le"), "<u4")
    vocabulary, tokens = np.unique(points, return_inverse=True)
    num_test = len(tokens) // TEST_PART
    train, test = torch.from_numpy(tokens.astype(np.int64)).split([len(tokens) - num_test, num_test])
    token_bytes = torch.tensor([len(chr(point).encode()) for point in vocabulary])
    return Text(train, test, len(vocabulary), sha256(content).hexdigest(), token_bytes)


def _of_bytes(content: bytes) -> Text:
    parts = (np.frombuffer(part, np.uint8).astype(np.int64) for part in _cut(content))
    train, validation, test = map(torch.from_numpy, parts)
    return Text(train, test, 256, sha256(content).hexdigest(), torch.ones(256, dtype=torch.int64), validation)


def _cut(content: bytes) -> list[bytes]:
    """18 of 20 parts to train on, one to search by and one to test on; no character is cut."""
    size = len(content) // NUM_PARTS
    starts = [len(content) - 2 * size, len(content) - size]
    first, second = (  # a byte of UTF-8 from 0x80 to 0xbf goes on with a character
        next((at for at in range(start, start + 4) if not b"\x80" <= content[at : at + 1] < b"\xc0"), start)
        for start in starts
    )
    return [content[:first], content[first:second], content[second:]]


def windows(tokens: Tensor, length: int) -> Tensor:
    """Examples (n, length), each beginning with the last token of the one before: all are predicted once."""
    return tokens.unfold(0, length, length - 1)


def torch_sources(folder: Path | None = None, least: int = LEAST_OF_TORCH) -> str:
    """Sources of torch, 24 MB of them, drawn as docs/data.md says: they depend on torch's version alone.

    Of the chosen files the first ones are the last tenth of the text, so the test has files of all kinds.
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


def _decoded(content: bytes, path: Path | None) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"text must be UTF-8, got another byte at {error.start} of {path}") from error
