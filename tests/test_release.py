"""What a release is checked for before it is built, and what happens where a Python is missing."""

from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest

from regtopk import __version__
from tools.check_release import ROOT, is_refused, trials, wrong_names


def test_the_citation_names_this_version() -> None:
    assert list(wrong_names(ROOT, __version__, tag=None)) == []


@pytest.mark.parametrize(
    ("tag", "wrong"), [("v1.2.3", []), ("1.2.3", ["tag must be v1.2.3, got '1.2.3'"]), (None, [])]
)
def test_the_tag_must_name_the_version(tmp_path: Path, tag: str | None, wrong: list[str]) -> None:
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 1.2.3\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.3] - 2030-01-01\n")
    assert list(wrong_names(tmp_path, "1.2.3", tag)) == wrong


def test_a_version_that_is_nowhere(tmp_path: Path) -> None:
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 1.2.30\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n")
    wrong = ["CITATION.cff must name version 1.2.3", "CHANGELOG.md must have a section [1.2.3]"]
    assert list(wrong_names(tmp_path, "1.2.3", "v1.2.3")) == wrong


def test_a_python_that_is_missing_is_named_and_skipped() -> None:
    options = Namespace(pythons=["python0.1"], torches=["2.13.0"], with_cuda=False)
    reason = "python0.1, torch 2.13.0: not on this machine, or older than 3.10"
    assert list(trials(options, Path("none.whl"), "1.2.3", ["cli"])) == [("skipped", reason)]


@pytest.mark.parametrize(
    ("outcomes", "when_strict", "else_"),
    [
        ("passed", False, False),
        ("passed skipped", True, False),
        ("passed failed", True, True),
        ("skipped", True, True),  # a check that tried nothing has shown nothing
        ("", False, False),  # no Python was asked for: built alone
    ],
)
def test_what_refuses_a_release(outcomes: str, when_strict: bool, else_: bool) -> None:
    counts = Counter(outcomes.split())
    assert is_refused(counts, strict=True) == when_strict
    assert is_refused(counts, strict=False) == else_
