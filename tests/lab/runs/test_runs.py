"""What a folder holds of a run, at every moment; what can be read back, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from regtopk.errors import OutputError, RunExistsError
from regtopk.lab.runs import CONFIG, METRICS, SUMMARY, Panel, Record, RunWriter, make_header
from regtopk.lab.runs.reading import merge_seeds, parts_of, read_header, read_records, read_run
from tests.processes import no_file_longer_than

PANEL = Panel(title="t", x="iteration", y="loss", x_label="iteration", y_label="loss", where={"a": 1})
HEADER = make_header("e", title="T", about="A", command="c", config={"lr": 0.1}, panels=[PANEL])
RECORDS: list[Record] = [
    {"method": "topk", "a": 1, "iteration": 0, "loss": [1.0, 2.0]},
    {"method": "topk", "a": 1, "iteration": 1, "loss": [0.5, 1.0]},
]


def write_run(folder: Path, *, force: bool = False) -> None:
    with RunWriter(folder, HEADER, force=force) as writer:
        writer.add(RECORDS[0])
        writer.add(RECORDS[1])
        writer.finish({"final": 0.5})


def test_a_run_reads_back(tmp_path: Path) -> None:
    write_run(tmp_path / "deep" / "run")
    run = read_run(tmp_path / "deep" / "run")
    assert (run.header, run.panels, run.records) == (HEADER, [PANEL], RECORDS)
    assert run.summary == {"final": 0.5}


def test_a_run_that_diverged(tmp_path: Path) -> None:
    with RunWriter(tmp_path, HEADER) as writer:
        writer.add({"loss": 1.0})
        with pytest.raises(OutputError, match=r"records must be finite, got {'loss': inf}: the run diverged"):
            writer.add({"loss": float("inf")})
    assert (tmp_path / METRICS).read_text() == '{"loss": 1.0}\n'


@pytest.mark.parametrize("name", [CONFIG, METRICS, "index.html"])
def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    with pytest.raises(RunExistsError, match=f"^output folder must not hold a run, but .* holds {name}$"):
        write_run(tmp_path)
    assert (tmp_path / name).read_text() == "precious"


def test_force_replaces_a_run_and_nothing_else(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "index.html").write_text("stale")
    with RunWriter(tmp_path, HEADER, force=True):
        assert not (tmp_path / SUMMARY).exists()
        assert not (tmp_path / "index.html").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_run_that_is_being_written_is_not_replaced(tmp_path: Path) -> None:
    with RunWriter(tmp_path, HEADER) as writer:
        writer.add({"loss": 1.0})
        with pytest.raises(OutputError, match="must not be written by another process"):
            RunWriter(tmp_path, HEADER, force=True)
        writer.add({"loss": 2.0})
        assert len((tmp_path / METRICS).read_text().splitlines()) == 2  # on disk at once
    before = (tmp_path / METRICS).stat().st_ino
    write_run(tmp_path, force=True)
    assert (tmp_path / METRICS).stat().st_ino == before  # the file that holds the lock is never replaced
    assert read_records(tmp_path) == RECORDS


def test_records_that_never_began_are_no_run(tmp_path: Path) -> None:
    (tmp_path / METRICS).touch()  # what a kill leaves before the settings are written
    with RunWriter(tmp_path, HEADER, resume=True) as writer:
        assert not writer.is_continued
    assert read_header(tmp_path) == HEADER


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match=r"output folder must be writable, got .*file/run: "):
        write_run(tmp_path / "file" / "run")
    with pytest.raises(OutputError, match=r"output folder must be writable, got .*file: "):
        write_run(tmp_path / "file")


def test_a_full_disk_ends_the_run_and_keeps_the_records(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"output folder must be writable, got .*: File too large"),
        no_file_longer_than(2500),
        RunWriter(tmp_path, HEADER) as writer,  # closing fails too
    ):
        for step in range(10):
            writer.add({"step": step, "text": "x" * 600})
    with RunWriter(tmp_path, HEADER, resume=True):
        assert [record["step"] for record in read_records(tmp_path)] == [0, 1, 2, 3]


def test_a_full_disk_leaves_the_old_settings(tmp_path: Path) -> None:
    write_run(tmp_path)
    with RunWriter(tmp_path, HEADER, resume=True) as writer:
        with pytest.raises(OutputError, match="File too large"), no_file_longer_than(10):
            writer.configure({"lr": 1.0})
        with pytest.raises(OutputError, match="File too large"), no_file_longer_than(10):
            writer.finish({"final": 1.0})
        assert read_header(tmp_path)["config"] == {"lr": 0.1}
    with RunWriter(tmp_path, HEADER, resume=True) as writer:
        writer.configure({"seeds": 3})
    assert read_run(tmp_path).summary == {"final": 0.5}
    assert read_header(tmp_path)["config"] == {"lr": 0.1, "seeds": 3}


def test_hardware_software_and_search_are_written_where_they_change(tmp_path: Path) -> None:
    first = {"hardware": "a GPU", "software": "torch"}
    records: list[Record] = [{"step": 0, **first}, {"step": 1, **first}]
    records += [{"step": 2, **first, "hardware": "a CPU"}, {"step": 3}, {"step": 4}]
    for some in (records, records[:2]):  # as a run that is resumed writes them
        with RunWriter(tmp_path, HEADER, resume=True) as writer:
            for record in some:
                writer.add(record)
    assert read_records(tmp_path) == records + records[:2]
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert lines[1] == {"step": 1} and lines[2] == {"step": 2, "hardware": "a CPU"}
    assert lines[5] == {**records[0], "search": None} and lines[6] == {"step": 1}
    with RunWriter(tmp_path, HEADER, resume=True) as writer:
        writer.add({"step": 2})
    assert read_records(tmp_path)[-1] == {"step": 2}  # it does not inherit those of the run before


def test_what_is_no_finished_run(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"must hold a finished run, but .*config.json cannot be .*: No"):
        read_run(tmp_path)
    with RunWriter(tmp_path, HEADER) as writer:
        writer.add({"step": 0})
    with pytest.raises(OutputError, match=r"summary.json cannot be read"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        (CONFIG, '{"experiment": ', "config.json cannot be read: not JSON, Expecting value"),
        (SUMMARY, "[" * 100_000, "summary.json cannot be read: not JSON, lists and objects are nested"),
        (METRICS, "[1]\n", "metrics.jsonl cannot be read: not JSON, record 1: an object is expected, got "),
        (METRICS, '{"a": 1}\n{"a": \n{"a": 2}\n', "metrics.jsonl cannot be read: not JSON, record 2: "),
        *(
            (name, "[1, 2]\n", rf"{name} .*an object is expected, got '\[1, 2\]'")
            for name in (CONFIG, SUMMARY)
        ),
    ],
)
def test_a_damaged_run(tmp_path: Path, name: str, text: str, reason: str) -> None:
    write_run(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(OutputError, match=f"must hold a finished run, but .*{reason}"):
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
