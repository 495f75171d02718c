import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from regtopk.errors import MissingExtraError, OutputError
from regtopk.lab.report import write_report
from regtopk.lab.report.style import METHODS, styles_of
from regtopk.lab.runs import CONFIG, METRICS, SUMMARY, Panel, Record, RunWriter, make_header, write_json

LINES = Panel("Lines < & >", "iteration", "loss", "iteration", "loss", {"density": 0.5}, log_y=True)
PANELS = (
    replace(LINES, dots="published", x_max=8),
    Panel("Steps", "iteration", "step", "iteration", "length", log_y=True, marks="stems", y_min=0.1),
)
WORDS = {"title": "A <title>", "about": "What & why.", "command": "regtopk reproduce e"}
HEADER = make_header("e", **WORDS, config={"lr": 0.1}, panels=PANELS)
POINT: Record = {"iteration": 0, "density": 0.5, "loss": 1.0, "step": 1}


def write_run(folder: Path) -> None:
    with RunWriter(folder, HEADER) as writer:
        for method in ("topk", "regtopk", "brand-new"):
            for t in range(10):
                measured = {"loss": [2.0**-t, 3.0**-t], "step": t % 2, "published": 2.0**-t}
                for density in (0.5, 0.6):
                    writer.add({"method": method, "iteration": t, "density": density, **measured})
        writer.finish({"table": [{"measure": "final loss", "topk": 1.34e-9, "regtopk": 0.5}]})


def page_of(folder: Path, header: Any, summary: Any, records: list[Record] | None = None) -> str:
    """The page of a run, with one point of Top-k unless told."""
    with RunWriter(folder, header) as writer:
        for record in records or [{"method": "topk", **POINT}]:
            writer.add(record)
        writer.finish(summary)
    return write_report(folder).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    assert write_report(folder) == folder / "index.html"
    return folder


@pytest.fixture(scope="module")
def page(run_folder: Path) -> str:
    return (run_folder / "index.html").read_text(encoding="utf-8")


def test_figures_are_written(run_folder: Path) -> None:
    assert (run_folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    figure = ElementTree.fromstring((run_folder / "figure.svg").read_text(encoding="utf-8"))
    assert (figure.get("role"), figure.get("aria-label")) == ("img", "A <title>")
    assert (figure[0].text or "").startswith("Lines < & >: loss against iter")


def test_page_needs_nothing_else(page: str) -> None:
    assert not re.search(r"<(script|link|img|iframe)\b|@import|src=", page)
    outside = re.findall(r'(?:href|url)\s*[=(]\s*"?([^")]*)', page)
    assert outside and all(target.startswith("#") for target in outside)


def test_page_shows_the_run(page: str) -> None:
    said = ("<h1>A &lt;title&gt;</h1>", "What &amp; why.", "<pre>regtopk reproduce e</pre>")
    for part in (*said, "<h3>Lines &lt; &amp; &gt;</h3>", "<td>1.3e-9</td>", "<td>0.5</td>", "RegTop-k"):
        assert part in page


def test_drawings_follow_the_readers_colours(page: str) -> None:
    assert "prefers-color-scheme:dark" in page
    drawings = re.findall(r"<figure>.*?</figure>", page, flags=re.DOTALL)
    assert len(drawings) == len(PANELS)
    clips = [set(re.findall(r'clipPath id="(\w+)"', drawing)) for drawing in drawings]
    assert all(clips) and not clips[0] & clips[1]  # inner names do not clash
    for drawing in drawings:
        ElementTree.fromstring(drawing)
        assert METHODS["topk"].light not in drawing
        for method in ("topk", "brand-new"):
            assert f"var(--c{styles_of([method])[method].light[1:]})" in drawing
        assert "var(--ink)" in drawing and "var(--grid)" in drawing


def test_drawing_again_gives_the_same_bytes(run_folder: Path) -> None:
    names = ("index.html", "figure.svg", "figure.png")
    before = [(run_folder / name).read_bytes() for name in names]
    write_report(run_folder)
    assert [(run_folder / name).read_bytes() for name in names] == before


def test_page_of_several_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    write_run(tmp_path / "two")
    together = {"title": "Both", "about": "Two runs.", "command": "regtopk demo", "versions": {"torch": "2"}}
    write_json(tmp_path / CONFIG, {**together, "parts": ["one", "two"]})
    write_json(tmp_path / SUMMARY, {})
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert page.count("<h2>A &lt;title&gt;</h2>") == 2
    assert page.count("<figure>") == 2 * len(PANELS)
    assert (tmp_path / "two" / "figure.png").exists()


def test_drawings_are_labelled(page: str) -> None:
    labels = re.findall(r'<svg role="img" aria-label="([^"]*)"', page)
    assert labels == ["Lines &lt; &amp; &gt;", "Steps"]
    ends = "; ".join(f"{method}: 0.00203" for method in ("Top-k", "RegTop-k", "brand-new"))
    assert f"<desc>loss against iteration. Where each method ends: {ends}.</desc>" in page


def test_a_place_is_marked(tmp_path: Path) -> None:
    panels = [replace(PANELS[1], mark=4.0, mark_label="you are here")]
    header = make_header("e", **WORDS, config={}, panels=panels)
    page = page_of(tmp_path, header, {"table": [{"measure": "topk"}], "notes": ["Note <this>."]})
    assert "you are here" in page and "<p>Note &lt;this&gt;.</p>" in page


def test_a_method_named_like_a_formula(tmp_path: Path) -> None:
    records = [{"method": method, **POINT} for method in ("$\\frac$", "$a$")]
    assert "$\\frac$" in page_of(tmp_path, HEADER, {"table": []}, records)
    assert "$a$" in (tmp_path / "figure.svg").read_text(encoding="utf-8")


@pytest.mark.usefixtures("undrawn")
def test_several_commands_stand_with_the_settings(tmp_path: Path) -> None:
    page = page_of(tmp_path, {**HEADER, "command": "first\nsecond"}, {"table": []})
    assert page.count("<pre>first\nsecond</pre>") == 1


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        (CONFIG, json.dumps({**HEADER, "panels": [{"colour": "red"}]}), "TypeError: .*'colour'"),
        (METRICS, '{"method": "topk", "iteration": 0}\n', "KeyError: 'density'"),
        (SUMMARY, "{}", "KeyError: 'table'"),
        (SUMMARY, '{"table": [{"measure": "topk"}], "hardware": ["a CPU"]}', "KeyError: 'minutes'"),
    ],
)
def test_a_run_that_cannot_be_drawn(tmp_path: Path, name: str, text: str, reason: str) -> None:
    write_run(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(OutputError, match=f"folder must hold a run that can be drawn, got .*: {reason}"):
        write_report(tmp_path)


@pytest.mark.usefixtures("undrawn")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "index.html").mkdir()  # in the way
    with pytest.raises(OutputError, match=r"output folder must be writable, got .*: Is a directory"):
        write_report(tmp_path)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    message = r"figures need matplotlib: pip install 'regtopk\[plots\]', then regtopk report DIR"
    with pytest.raises(MissingExtraError, match=message):
        write_report(tmp_path)


@pytest.mark.usefixtures("undrawn")
def test_the_page_says_what_it_ran_on_and_has_the_answers_first(tmp_path: Path) -> None:
    dense = {"measure": "dense", "density": None, "lr": 1.0}
    row = {"measure": "topk", "density": 0.5, "lr": 1.0, "payload per step": 3, "accuracy": 9.0, "± std": 1.0}
    page = page_of(tmp_path, HEADER, {"table": [dense, row], "hardware": ["A <GPU>"], "minutes": 2.6})
    assert "A &lt;GPU&gt;; 2.6 minutes of finished runs." in page
    expected = ["", "accuracy", "± std", "density", "lr", "payload per step"]
    assert re.findall(r"<th>([^<]*)</th>", page) == expected
