"""Texts: read, fetched, checked, kept, and counted in bytes and GPT-2's tokens. Public ones are tiny here."""

import gzip
import io
import json
import math
import sys
import tarfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from regtopk.cli import app
from regtopk.errors import ArgumentError, MissingExtraError, OutputError
from regtopk.lab.experiments.compare.config import CompareConfig
from regtopk.lab.experiments.data import files, gpt2
from regtopk.lab.experiments.data import text as texts
from regtopk.lab.experiments.data.files import PublicFile
from regtopk.lab.experiments.data.text import Text, fetch_text, load_text, torch_sources, windows
from regtopk.lab.experiments.networks import engine
from regtopk.lab.experiments.tasks import Problem, deep
from regtopk.lab.experiments.tasks.deep import Gpt

TEXT = "".join(f"In the {n}th line\n\n  the “Ä€” ends. \n" for n in range(300))
NUM_BYTES, SHARES = len(TEXT.encode()), (0.9, 0.05, 0.05)
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
OTHERS = [byte for byte in range(256) if byte not in PRINTED]
LETTERS = {byte: chr(byte) for byte in PRINTED} | {byte: chr(256 + n) for n, byte in enumerate(OTHERS)}
MERGES = ["t h", "th e", "Ġ the", "Ċ Ċ"]  # Ġ is a space, Ċ a line feed
WORDS = [*(LETTERS[byte] for byte in range(256)), *(merge.replace(" ", "") for merge in MERGES)]
CONTENTS = {
    "enwik8": TEXT.encode(),
    "encoder.json": json.dumps({word: number for number, word in enumerate(WORDS)}).encode(),
    "vocab.bpe": "\n".join(["#version: 0.2", *MERGES, ""]).encode(),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder; the public place is a folder of archives with the tiny files."""
    for name, content in CONTENTS.items():
        member = "data/enwik8.gz" if name == "enwik8" else f"data/{name}"
        put(tmp_path / name, member, gzip.compress(content) if name == "enwik8" else content)
        monkeypatch.setitem(files.FILES, name, PublicFile(name, member, sha256(content).hexdigest()))
    monkeypatch.setattr(files, "HOST", tmp_path.as_uri())
    monkeypatch.setenv("REGTOPK_DATA", str(tmp_path / "kept"))
    return tmp_path / "kept"


def put(path: Path, member: str, content: bytes) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name in ("README.md", member):
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))


def test_a_text_is_fetched_once_and_read_as_bytes(folder: Path, tmp_path: Path) -> None:
    """The first 18 of 20 parts are to train on; a part begins with a whole character."""
    answer = CliRunner().invoke(app, ["fetch", "enwik8"])
    assert answer.exit_code == 0, answer.stderr
    assert answer.stdout == f"enwik8 has {NUM_BYTES:,} tokens (bytes); files are kept in {folder}\n"
    (tmp_path / "enwik8").unlink()  # the public one
    text = fetch_text(Path("enwik8"), "bytes")
    parts = parts_of(text)
    assert b"".join(parts) == CONTENTS["enwik8"] and "".join(part.decode() for part in parts) == TEXT
    assert all(abs(len(part) - share * NUM_BYTES) <= 20 for part, share in zip(parts, SHARES, strict=True))
    assert text.vocabulary_size == 256 and text.sha256 == sha256(TEXT.encode()).hexdigest()
    (folder / "enwik8").write_bytes(gzip.decompress((folder / "enwik8.gz").read_bytes()))
    (folder / "enwik8.gz").unlink()
    assert torch.equal(load_text(Path("enwik8"), tokens="bytes", window=9).test, text.test)


def test_characters_of_a_text_are_never_cut(tmp_path: Path) -> None:
    for length in range(200, 212):
        content = "€" * length + "x" * (length % 3)
        (tmp_path / "text").write_text(content, encoding="utf-8")
        parts = parts_of(load_text(tmp_path / "text", tokens="bytes", window=1))
        assert "".join(part.decode() for part in parts) == content


def test_what_is_not_there_or_not_the_public_file_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ArgumentError, match=r"enwik8 must be fetched .* \(regtopk fetch enwik8\), got no .*kept/enwik8"
    ):
        load_text(Path("enwik8"), tokens="bytes", window=9)
    folder.mkdir()
    for content in (b"another", gzip.compress(TEXT.encode())[:-20]):
        (folder / "enwik8.gz").write_bytes(content)
        with pytest.raises(ArgumentError, match="enwik8 must be the public file: remove it, then regtopk"):
            fetch_text(Path("enwik8"), "bytes")
    (folder / "enwik8.gz").unlink()
    put(tmp_path / "enwik8", "data/enwik8.gz", b"another")
    with pytest.raises(OutputError, match="enwik8 must be the public file, got another from file:"):
        fetch_text(Path("enwik8"), "bytes")
    put(tmp_path / "enwik8", "elsewhere", b"another")
    for _ in range(2):
        with pytest.raises(OutputError, match="enwik8 must be in reach to be fetched, got file:"):
            fetch_text(Path("enwik8"), "bytes")
        (tmp_path / "enwik8").unlink(missing_ok=True)
    assert not list(folder.iterdir())
    folder.rmdir()
    folder.write_text("a file")
    with pytest.raises(OutputError, match=r"REGTOPK_DATA must name a folder that can be written, got .*kept"):
        files.write_file(folder / "name", b"")


def test_tokens_of_gpt2_are_those_of_the_whole_text_and_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once encoded, neither the text nor the encoding nor the package is needed."""
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setattr(gpt2, "NUM_AT_ONCE", 7)
    text = fetch_text(Path("enwik8"), "gpt2")
    assert text.validation is not None and text.token_bytes is not None
    whole = tokenizers.ByteLevelBPETokenizer(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    parts, bytes_of = (text.train, text.validation, text.test), {x: byte for byte, x in LETTERS.items()}
    own_bytes = parts_of(load_text(Path("enwik8"), tokens="bytes", window=1))
    for part, as_bytes in zip(parts, own_bytes, strict=True):
        assert part.tolist() == whole.encode(as_bytes.decode()).ids
        assert bytes(bytes_of[x] for token in part.tolist() for x in WORDS[token]) == as_bytes
        assert int(text.token_bytes[part].sum()) == len(as_bytes)
    assert int((torch.cat(parts) == WORDS.index("Ġthe")).sum()) == TEXT.count(" the")
    assert text.vocabulary_size == len(WORDS) and text.sha256 == sha256(TEXT.encode()).hexdigest()

    (kept,) = folder.glob("gpt2-*.npz")
    for path in set(folder.iterdir()) - {kept}:
        path.unlink()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    again = load_text(Path("enwik8"), tokens="gpt2", window=9)
    assert torch.equal(again.train, text.train) and torch.equal(again.test, text.test)
    kept.write_bytes(kept.read_bytes()[:-100])
    with pytest.raises(ArgumentError, match="data must be tokens as regtopk wrote them: remove the file"):
        load_text(Path("enwik8"), tokens="gpt2", window=9)


def parts_of(text: Text) -> list[bytes]:
    """Of one whose tokens are bytes."""
    assert text.validation is not None
    return [bytes(part.tolist()) for part in (text.train, text.validation, text.test)]


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "text").write_text(TEXT)
    message = r"tokens of GPT-2 need tokenizers: pip install 'regtopk\[text\]'"
    with pytest.raises(MissingExtraError, match=message):
        load_text(tmp_path / "text", tokens="gpt2", window=9)


def test_an_encoding_that_was_not_fetched_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "text").write_text(TEXT)
    message = r"encoder.json must be fetched before it is used \(regtopk fetch DATA --tokens gpt2\), got no"
    with pytest.raises(ArgumentError, match=message):
        load_text(tmp_path / "text", tokens="gpt2", window=9)


@pytest.mark.parametrize("tokens", ["characters", "bytes", "gpt2"])
def test_losses_are_in_bits_per_byte_of_what_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: str
) -> None:
    """The tested windows' own bytes are counted; a search is judged by the part before the test."""
    if tokens == "gpt2":
        pytest.importorskip("tokenizers")
    monkeypatch.setattr(deep, "MOST_TESTED", 20)
    monkeypatch.setattr(engine, "MOST_SCORES", 3 * 8 * 300)  # of three windows, or a few more
    fetch_text(Path("enwik8"), tokens)
    sizes: dict[str, Any] = {
        "num_layers": 1,
        "width": 16,
        "context": 8,
        "num_workers": 2,
        "num_steps": 1,
        "batch_size": 2,
    }
    config = CompareConfig("gpt", data="enwik8", tokens=tokens, algorithms="dense", **sizes)
    text, problem = load_text(Path("enwik8"), tokens=tokens, window=9), Problem(config)
    network = Gpt.make_network(config, problem.task([0]).examples, seed=0)
    for is_search in (False, True):
        task = problem.task([0], is_search=is_search)
        (quality,) = task.evaluate(task.start())
        part = text.validation if is_search and tokens != "characters" else text.test
        assert part is not None
        starts = range(0, len(part) - 8, 8)
        windows = torch.stack([part[at : at + 9] for at in starts])[:: -(-len(starts) // 20)]
        assert 10 < len(windows) <= 20
        with torch.no_grad():
            scores = network(windows[:, :-1]).flatten(0, 1)
        nats = F.cross_entropy(scores, windows[:, 1:].flatten(), reduction="sum")
        assert quality["test_loss"] == pytest.approx(float(nats) / windows[:, 1:].numel(), rel=1e-5)
        told = text.token_bytes if tokens == "characters" else torch.tensor([*map(len, WORDS)])
        num_bytes = int(told[windows[:, 1:]].sum())
        assert quality["bits_per_byte"] == pytest.approx(float(nats) / math.log(2) / num_bytes, rel=1e-5)


def test_tokens_are_characters_unless_given() -> None:
    assert CompareConfig("gpt").shared["tokens"] == "characters"


def test_a_file_is_read_character_by_character(tmp_path: Path) -> None:
    content = "büßt\n€" * 500
    (tmp_path / "text").write_text(content, encoding="utf-8", newline="")
    text = load_text(tmp_path / "text", window=129)
    vocabulary = sorted(set(content))
    assert text.vocabulary_size == len(vocabulary) == 6
    assert (len(text.train), len(text.test)) == (2700, 300)
    tokens = torch.cat([text.train, text.test])
    assert "".join(vocabulary[token] for token in tokens.tolist()) == content
    assert int(text.token_bytes[tokens].sum()) == len(content.encode())


def test_torch_sources_are_drawn_once_and_end_with_files_of_all_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {f"{name}/{number}.py": f"{name} {number}\n" for name in "abc" for number in range(10)}
    for name, content in {**contents, "b/00.py": contents["b/0.py"], "b/tab.py": "if x:\n\ty\n"}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    found = torch_sources(tmp_path, least=1).splitlines()
    train, test = found[:-3], found[-3:]
    assert sorted(found) == sorted(content.strip() for content in contents.values())  # each once
    assert test == sorted(test) and train == sorted(train) and found != sorted(found)
    assert found == torch_sources(tmp_path, least=1).splitlines()
    monkeypatch.setattr(texts, "MOST_OF_TORCH", 50)
    assert len(torch_sources(tmp_path, least=1)) == 50
    with pytest.raises(ArgumentError, match=r"torch must have sources of at least 8,000,000 bytes, got 50"):
        torch_sources(tmp_path)


def test_windows_predict_every_token_once() -> None:
    examples = windows(torch.arange(20), 5)
    assert examples.shape == (4, 5)
    assert examples[:, 1:].flatten().tolist() == list(range(1, 17))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"text must be a file, got .*text: No such file"),
        (b"abc" * 99, r"text must have at least 129 tokens in each part, got 29 in .*text"),
        (b"ab\xff" * 1000, "text must be UTF-8, got another byte at 2 of .*text"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(ArgumentError, match=message):
        load_text(tmp_path / "text", window=129)
