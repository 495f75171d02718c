"""The rows of the comparison on a real text: all can be built, and are searched alike."""

import json
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import peers
from regtopk.lab.experiments.compare.config import CompareConfig
from regtopk.lab.experiments.compare.search import SEARCH
from regtopk.lab.runs import RunWriter, read_object, read_records, write_json


@pytest.fixture(params=peers.TABLES)
def table(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> peers.Table:
    """With a record of what was picked: the first value of each list."""
    records = []
    for row in peers.ROWS.values():
        lists = (option.split("=") for option in row.words.split(":")[1:] if "|" in option)
        picked = {"lr": 0.004, **{key: values.split("|")[0] for key, values in lists}}
        records.append(json.dumps({"method": row.words, "search": {"picked": picked}}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(records) + "\n")
    monkeypatch.setattr(peers.words_for, "__defaults__", (tmp_path,))
    return peers.TABLES[request.param]


def test_every_row_of_a_table_can_be_built_and_searched(table: peers.Table) -> None:
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
    least = len(table.lr_shares) or peers.SEARCH_RUNS - 2  # dense has 10 points in all
    for name, grid in zip(table.rows, config.grids, strict=True):
        if table.dense_is_alike and name.startswith("dense"):
            assert len(grid.methods) == 1
        else:
            assert len(grid.methods) >= (len(peers.LR.split(",")) if name in peers.ADVISED else least)


def test_a_table_takes_what_another_picked(table: peers.Table) -> None:
    words = peers.words_for(table, "MuLoCo")
    if not table.lr_shares:
        assert words == peers.ROWS["MuLoCo"].words
    else:
        assert (
            f"every={table.instead.get('MuLoCo', {}).get('every', 8)}:" in words
            and "outer_lr=0.5:outer_momentum=0:" in words
        )
        assert words.endswith(f"lr={'|'.join(f'{0.004 * share:g}' for share in table.lr_shares)}")


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


@pytest.mark.parametrize("name", peers.TABLES)
def test_all_that_a_table_takes_is_recorded(name: str) -> None:
    table = peers.TABLES[name]
    assert all(peers.words_for(table, row) for row in table.rows)


def test_rows_that_ran_side_by_side_become_one_folder(tmp_path: Path) -> None:
    header = {"title": "", "about": "", "command": "", "versions": {}}
    for row, hardware in (("one", "a GPU"), ("other", None)):
        with RunWriter(tmp_path / row, header) as writer:
            for step in (1, 2):
                found = {"method": row, "density": 0.1, "seed": 1, "step": step, "hardware": hardware}
                writer.add(found)
        write_json(tmp_path / row / SEARCH, {row: {"final": 1.0}})
    for row in ("one", "other", "one"):  # what the folder holds stays, and is not there twice
        peers.gather([tmp_path / row], tmp_path / "all")
    assert read_object(tmp_path / "all" / SEARCH).keys() == {"one", "other"}
    kept = [(r["method"], r["step"], r.get("hardware")) for r in read_records(tmp_path / "all")]
    assert kept == [("one", 1, "a GPU"), ("one", 2, "a GPU"), ("other", 1, None), ("other", 2, None)]
