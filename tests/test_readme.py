"""The commands of the README and the Python code of the guides run, and print what they say."""

import contextlib
import io
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from regtopk.cli import app
from regtopk.lab.experiments.experiment import Experiment
from regtopk.lab.plan.costs import cache_path
from tests.lab.plan.made_up import calibration

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```(python|text)\n(.*?)```", flags=re.DOTALL)
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = "\n".join(re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL))
COMMANDS = [*filter(None, SHELL.splitlines()), *re.findall(r"`(regtopk [^`]*)`", README)]
LONG = ("--seeds 10", "--preset paper")  # minutes, or a GPU: these are taken to where they would begin


class BegunError(Exception):
    """An experiment would run now."""


def commands(program: str) -> list[list[str]]:
    """The words behind a program's name, of each of its commands in the README."""
    return [shlex.split(each, comments=True)[1:] for each in COMMANDS if each.split()[0] == program]


def test_every_command_has_a_test() -> None:
    """torchrun's are in tests/distributed/test_example.py."""
    assert {command.split()[0] for command in COMMANDS} == {"make", "pip", "torchrun", "regtopk"}
    assert [words[2] for words in commands("torchrun")] == ["examples/train_ddp.py", "examples/train_gpt.py"]


@pytest.mark.parametrize("words", commands("regtopk"), ids=" ".join)
@pytest.mark.usefixtures("undrawn")
def test_regtopks_commands_run_as_printed(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibration().write(cache_path("cpu"))

    def begin(*_: Any, **__: Any) -> None:
        raise BegunError

    is_long = any(part in " ".join(words) for part in LONG)
    if is_long:
        monkeypatch.setattr(Experiment, "record", begin)
    answer = CliRunner().invoke(app, words)
    assert isinstance(answer.exception, BegunError) if is_long else answer.exit_code == 0, answer.output


def test_what_make_and_pip_are_asked_for_is_there() -> None:
    for words in commands("make"):
        assert subprocess.run(["make", "--dry-run", *words], cwd=ROOT, capture_output=True).returncode == 0
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for action, what in commands("pip"):
        extra = re.fullmatch(r"\.(?:\[(\w+)\])?", what)
        assert action == "install" and extra and (extra[1] is None or f"\n{extra[1]} = [" in project)


def run_page(page: Path) -> list[tuple[str, str]]:
    """Run the page's Python blocks in order, in one namespace: what they printed, and what is shown."""
    names: dict[str, Any] = {"__name__": "page"}
    pairs = []
    printed = ""
    for language, content in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "text":
            pairs.append((printed, content))
            continue
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            exec(compile(content, str(page), "exec"), names)
        printed = stdout.getvalue()
    return pairs


@pytest.mark.parametrize("page", ["paper-vs-code.md", "add-an-algorithm.md"])
def test_code_prints_what_the_page_shows(page: str) -> None:
    pairs = run_page(ROOT / "docs" / page)
    assert pairs
    for printed, shown in pairs:
        assert printed == shown


def test_a_page_that_is_wrong_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    assert run_page(page) == [("1\n", "2\n")]
