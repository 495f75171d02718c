"""What the slow network cannot do, it says before it does anything."""

from pathlib import Path

import pytest

from benchmarks.slow_network import __main__ as command_line
from benchmarks.slow_network import memory, namespaces
from benchmarks.slow_network.methods import Method
from benchmarks.slow_network.options import parser
from regtopk.errors import ArgumentError


@pytest.mark.parametrize(
    ("replaced", "value", "message"),
    [
        ("os.geteuid", 1000, "needs root: run the same command with sudo"),
        ("shutil.which", None, "there is no ip and no tc: apt install iproute2"),
        ("os.path.isdir", False, "network namespaces need Linux"),
    ],
)
def test_where_no_namespaces_can_be_made(
    replaced: str, value: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr("os.path.isdir", lambda path: True)
    monkeypatch.setattr(replaced, lambda *_: value)
    with pytest.raises(namespaces.NetworkError, match=message):
        namespaces.check_possible()


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--links fast", "bandwidth must be"),
        ("--latency soon", "latency must be"),
        ("--workers 1", "workers must be a whole number in 2..64, got '1'"),
        ("--methods dense:0.1", "method must be dense, fp16, powersgd, peer-topk"),
        ("--methods topk:2", "density of a method must be in (0, 1], got 'topk:2'"),
        ("--seconds -1", "must be a number above 0, got '-1'"),
        ("--least-steps 0", "must be a whole number of at least 1, got '0'"),
    ],
)
def test_nonsense_is_refused(words: str, rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser("").parse_args(["steps", *words.split()])
    assert rule in " ".join(capsys.readouterr().err.split())


def test_more_workers_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 3_000_000_000)
    memory.check_memory(3, "resnet18")
    with pytest.raises(ArgumentError, match=r"workers must fit into memory: 64 need about .* enough for 3"):
        memory.check_memory(64, "resnet18")


def test_races_that_cannot_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["accuracy", "--steps", "25", "--evaluate-every", "10"]) == 1
    assert "steps must be a multiple of evaluate-every, got 25 and 10" in capsys.readouterr().err
    assert command_line.main(["accuracy", "--data", str(tmp_path)]) == 1
    assert "data must be an IDX file of Fashion-MNIST" in capsys.readouterr().err


def test_links_and_methods_as_text() -> None:
    options = parser("").parse_args(["steps", "--links", "100mbit", "1.5G", "unshaped"])
    assert options.links == [1e8, 1.5e9, None]
    assert Method.parse("dgc:0.01:4bit:split") == Method("dgc", 0.01, "4bit", "split")
