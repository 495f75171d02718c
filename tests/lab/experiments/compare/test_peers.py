"""The rows of the comparison on a real text: all can be built, and are searched alike."""

import shlex
from itertools import pairwise

import pytest

from benchmarks import peers
from regtopk.lab.experiments.compare.config import CompareConfig


@pytest.mark.parametrize("name", [name for name, table in peers.TABLES.items() if not table.around])
def test_every_row_of_a_table_can_be_built_and_searched(name: str) -> None:
    table = peers.TABLES[name]
    command = peers.command_of(table, table.rows, ["--device", "cuda"])
    told = dict(pairwise(command))
    config = CompareConfig(
        task="gpt",
        num_steps=int(told.get("--steps", 1536)),
        lr=tuple(float(lr) for lr in told["--lr"].split(",")),
        received_bytes_per_step=float(told["--received-bytes-per-step"]),
        algorithms=told["--algorithms"],
    )
    assert len(config.grids) == len(table.rows) and command[-2:] == ["--device", "cuda"]
    assert all(len(grid.methods) >= 10 for grid in config.grids)


def test_the_command_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        "sys.argv", ["peers", "enwik8-8", "--dry-run", "--out", "here", "--rows", "dense Muon"]
    )
    assert peers.main() == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:3] == ["regtopk", "compare", "gpt"] and words[-2:] == ["--out", "here"]
    assert peers.ROWS["dense Muon"].words in words
    monkeypatch.setattr("sys.argv", ["peers", "enwik8-8", "--out", "here", "--rows", "mine"])
    with pytest.raises(SystemExit):
        peers.main()
    assert "rows must be of dense AdamW, dense Muon, ours, ours with returned," in capsys.readouterr().err
