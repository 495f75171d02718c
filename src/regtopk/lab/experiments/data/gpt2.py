"""Text as tokens of GPT-2: about 50,000 pieces of words, found by byte pair encoding (Radford et al., 2019).

Encoding takes a minute per 40 MB. So tokens are kept in the data folder, in a file whose name has the hashes
of the text and of the encoding. Where that file is, neither the text nor the package tokenizers is needed.
"""

import io
import json
import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regtopk.errors import importing
from regtopk.lab.experiments.data.files import FILES, GPT2_FILES, data_folder, read_public, write_file
from regtopk.lab.experiments.data.images import reading

NUM_AT_ONCE = 10_000  # lines that are encoded in one call
# GPT-2's own pattern cuts before a line feed after a letter, digit or sign: the pieces have the text's tokens
CUTS = re.compile(r"(?<=[!-~])(?=\n)")


def gpt2_tokens(text_sha256: str, read_parts: Callable[[], Sequence[str]]) -> tuple[list[Tensor], Tensor]:
    """The tokens of a text's parts, from the data folder if they are there; and the bytes of each token."""
    encoding = sha256("".join(FILES[name].sha256 for name in GPT2_FILES).encode()).hexdigest()
    path = data_folder() / f"gpt2-{encoding[:8]}-{text_sha256[:16]}.npz"
    if not path.exists():
        packed = io.BytesIO()
        np.savez_compressed(packed, **_encoded(read_parts()))
        write_file(path, packed.getvalue())
    with reading("tokens as regtopk wrote them: remove the file", path), path.open("rb") as file:
        saved = np.load(file)
        both = (saved[key].astype(np.int64) for key in ("tokens", "token_bytes"))
        tokens, token_bytes = map(torch.from_numpy, both)
        return list(tokens.split(saved["lengths"].tolist())), token_bytes


def _encoded(parts: Sequence[str]) -> dict[str, Any]:
    with importing("tokens of GPT-2 need tokenizers: pip install 'regtopk[text]'"):
        from tokenizers import Tokenizer, models, pre_tokenizers
    vocabulary, merges = (read_public(name).decode("utf-8") for name in GPT2_FILES)
    numbers: dict[str, int] = json.loads(vocabulary)
    lines = merges.strip().splitlines()[1:]  # after one with the version
    pairs = [(first, second) for first, second in (line.split(" ") for line in lines)]
    tokenizer = Tokenizer(models.BPE(numbers, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def tokens_of(part: str) -> Any:
        pieces, found = CUTS.split(part), []
        for at in range(0, len(pieces), NUM_AT_ONCE):
            encoded = tokenizer.encode_batch_fast(pieces[at : at + NUM_AT_ONCE])
            found.append(np.array([token for piece in encoded for token in piece.ids], np.uint16))
        return np.concatenate(found)

    token_bytes = np.zeros(len(numbers), np.uint8)
    for word, token in numbers.items():
        token_bytes[token] = len(word)  # a byte is written as one character
    tokens = [tokens_of(part) for part in parts]
    for part, own in zip(parts, tokens, strict=True):
        assert token_bytes[own].sum(dtype=np.int64) == len(part.encode()), "every byte is in one token"
    lengths = np.array([len(own) for own in tokens])
    return {"tokens": np.concatenate(tokens), "lengths": lengths, "token_bytes": token_bytes}
