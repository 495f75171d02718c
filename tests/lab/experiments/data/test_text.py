from pathlib import Path

import pytest
import torch

from regtopk.errors import ArgumentError
from regtopk.lab.experiments.data import text as texts
from regtopk.lab.experiments.data.text import load_text, torch_sources, windows


def test_a_file_is_read_character_by_character(tmp_path: Path) -> None:
    content = "büßt\n€" * 500
    (tmp_path / "text").write_text(content, encoding="utf-8", newline="")
    text = load_text(tmp_path / "text", window=129)
    vocabulary = sorted(set(content))
    assert text.vocabulary_size == len(vocabulary) == 6
    assert (len(text.train), len(text.test)) == (2700, 300)
    assert "".join(vocabulary[token] for token in torch.cat([text.train, text.test]).tolist()) == content


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
