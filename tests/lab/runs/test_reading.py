"""What can be read back from a folder, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from regtopk.errors import OutputError
from regtopk.lab.runs import (
    CONFIG,
    METRICS,
    SUMMARY,
    Panel,
    RunWriter,
    make_header,
    merge_seeds,
    parts_of,
    read_header,
    read_records,
    read_run,
)

PANEL = Panel(title="t", x="step", y="loss", x_label="step", y_label="loss", where={"density": 0.1})
HEADER = make_header("e", title="T", about="A", command="c", config={}, panels=[PANEL])


def write_run(folder: Path) -> None:
    with RunWriter(folder, HEADER) as writer:
        writer.add({"method": "topk", "step": 0, "loss": 1.0, "density": 0.1})
        writer.finish({"final": 0.5})


def test_what_is_no_finished_run(tmp_path: Path) -> None:
    with pytest.raises(
        OutputError, match=r"must hold a finished run, but .*config.json cannot be read: No such"
    ):
        read_run(tmp_path)
    with RunWriter(tmp_path, HEADER) as writer:
        writer.add({"step": 0})
    with pytest.raises(OutputError, match=r"summary.json cannot be read"):
        read_run(tmp_path)


def test_a_damaged_run_to_read(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text('{"experiment": ')
    with pytest.raises(OutputError, match=r"config.json cannot be read: not JSON, Expecting value"):
        read_header(tmp_path)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / METRICS).write_text('{"a": 1}\n{"a": \n{"a": 2}\n')
    with pytest.raises(OutputError, match=r"must hold a run, but .* cannot be read: not JSON, record 2: "):
        read_records(tmp_path)


@pytest.mark.parametrize("name", [CONFIG, SUMMARY, METRICS])
def test_what_is_no_object_is_refused(tmp_path: Path, name: str) -> None:
    write_run(tmp_path)
    (tmp_path / name).write_text("[1, 2]\n")
    with pytest.raises(OutputError, match=rf"{name} cannot be read: .*an object is expected, got '\[1, 2\]'"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"), [("title", None), ("versions", []), ("config", "x"), ("panels", {}), ("command", 1)]
)
def test_a_header_that_lacks_a_field(tmp_path: Path, name: str, value: Any) -> None:
    write_run(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({**HEADER, name: value}))
    with pytest.raises(OutputError, match=f"config.json must have '{name}' of type .*, got "):
        read_run(tmp_path)


@pytest.mark.parametrize("parts", [["."], [".."], ["a/b"], ["/"], ["a", "away"], [1], "a"])
def test_parts_are_subfolders(tmp_path: Path, parts: Any) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "away").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match=r"parts in .*config.json must be subfolders of .*, got "):
        parts_of(tmp_path / "run", {"parts": parts})


def test_seeds_are_merged_by_method_and_step() -> None:
    def record(seed: int, **measured: float | None) -> dict[str, Any]:
        return {"method": "topk", "step": 1, "seed": seed, "lr": 0.1, **measured}

    records = [
        record(2, risk=3.0, loss=None, gap=None),
        record(0, risk=9.0, loss=5.0, gap=None),
        record(0, risk=1.0, loss=4.0, gap=None),  # again, after a run was resumed
        record(1, risk=2.0, loss=4.0, gap=None),
        {"method": "dense", "step": 1, "seed": 0, "risk": 7.0},
    ]
    assert merge_seeds(records) == [
        {**record(0, risk=None, loss=4.0, gap=None), "seed": [0, 1, 2], "risk": [1.0, 2.0, 3.0]},
        {"method": "dense", "step": 1, "seed": 0, "risk": 7.0},
    ]
