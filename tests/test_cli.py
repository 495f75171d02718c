import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from regtopk import ALGORITHMS, __version__
from regtopk.__main__ import main
from regtopk.cli import app
from regtopk.cli.parts import show
from regtopk.lab.experiments.ranks.config import DEFAULTS
from tests.processes import ended

QUICK = "--set", "num_iterations=5"


def invoke(*words: str | Path) -> tuple[int, str, str]:
    answer = CliRunner().invoke(app, [str(word) for word in words])
    return answer.exit_code, answer.stdout, answer.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of figure 1, to be copied."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    code, _, err = invoke("reproduce", "fig1", "--out", folder, *QUICK)
    assert (code, err) == (0, "")
    return folder


def test_version() -> None:
    assert invoke("--version") == (0, f"regtopk {__version__}\n", "")


def test_an_ascii_stdout_shows_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys, "argv", ["regtopk", "list"])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    sys.stdout.flush()
    assert b"adaptive" in printed.getvalue() and b"?" in printed.getvalue()


def test_list_as_json() -> None:
    rows = {row["name"]: row for row in json.loads(invoke("list", "--json")[1])}
    assert list(rows) == list(ALGORITHMS)
    assert rows["regtopk"]["class"] == "RegTopK"
    assert rows["regtopk"]["options"] | {"mu": 4.0, "q": "inf", "k": None} == rows["regtopk"]["options"]
    assert all(row["summary"] for row in rows.values())


def test_reproduce_writes_a_whole_run(tmp_path: Path) -> None:
    out = tmp_path / "fig1"
    code, printed, err = invoke("reproduce", "fig1", "--out", out)
    assert code == 0 and err == ""
    files = "config.json figure.png figure.svg index.html metrics.jsonl summary.json"
    assert sorted(path.name for path in out.iterdir()) == files.split()
    assert "off published points" in printed and "regtopk-current" in printed
    assert str(out / "index.html") in printed.replace("\n", "")
    assert json.loads((out / "config.json").read_text())["command"] == "regtopk reproduce fig1"


@pytest.mark.usefixtures("undrawn")
def test_reproduce_as_json(tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, printed, _ = invoke("reproduce", "fig2", "--out", out, "--seeds", "2", "--json", *QUICK)
    assert code == 0
    summary = json.loads(printed)
    assert summary == json.loads((out / "summary.json").read_text())
    seeds = [own for by_density in summary["final_distance"].values() for own in by_density.values()]
    assert {len(own) for own in seeds} == {2}
    config = json.loads((out / "config.json").read_text())
    assert config["command"] == "regtopk reproduce fig2 --seeds 2 --set num_iterations=5"
    assert config["config"]["seeds"] == "2" and config["config"]["num_iterations"] == 5


@pytest.mark.parametrize(
    ("words", "own", "others"),
    [
        ("reproduce fig1", "--device num_iterations w_1", "curvature --seeds --algorithms --preset"),
        ("reproduce fig2", "--seeds --device num_points", "--algorithms --preset"),
        ("reproduce fig3", "--preset --algorithms --like --data --seeds", "num_points"),
        ("compare", "--split --density fragments delay mix outer_momentum", "--preset collective"),
        ("plan", "0.001,0.01,0.1; of updates 0.01,0.025,0.05", "--split"),
        ("train", " ".join(each["algorithms"] for each in DEFAULTS.values()), "--split"),
    ],
)
def test_help_shows_what_a_command_takes(words: str, own: str, others: str) -> None:
    shown = invoke(*words.split(), "--help")[1]
    assert [word for word in own.split() if word not in shown] == []
    assert [word for word in others.split() if word in shown] == []


@pytest.mark.usefixtures("undrawn")
def test_default_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run has a new one; --resume takes the last, which is finished here, and --force the first."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert invoke("reproduce", "scaling", *QUICK)[0] == 0
    folders = [tmp_path / "out" / name for name in ("scaling", "scaling-2")]
    assert sorted((tmp_path / "out").iterdir()) == folders
    before = [(folder / "metrics.jsonl").stat().st_mtime_ns for folder in folders]
    code, printed, _ = invoke("reproduce", "scaling", *QUICK, "--resume")
    assert code == 0 and "out/scaling-2/index.html" in printed
    assert [(folder / "metrics.jsonl").stat().st_mtime_ns for folder in folders] == before
    assert invoke("reproduce", "scaling", *QUICK, "--force")[0] == 0
    assert sorted((tmp_path / "out").iterdir()) == folders
    assert (folders[0] / "metrics.jsonl").stat().st_mtime_ns > before[0]
    code, _, err = invoke("reproduce", "scaling", "--resume")
    assert code == 2 and "num_iterations must be 5 as in the run that out/scaling-2 holds, got 100" in err


@pytest.mark.usefixtures("undrawn")
def test_a_run_is_not_replaced_unasked(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    code, _, err = invoke("reproduce", "fig1", "--out", tmp_path / "run")
    advice = "holds config.json: choose another --out, go on with --resume, or replace it with --force\n"
    assert code == 2 and err.endswith(advice) and err.startswith("regtopk: output folder must not hold a run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert invoke("reproduce", "fig1", "--out", tmp_path / "run", "--force")[0] == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_text() != before
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "config.json").write_text("{")
    assert invoke("reproduce", "fig1", "--out", tmp_path / "run", "--resume")[0] == 2
    assert (tmp_path / "run" / "config.json").read_text() == "{"


MANY = "1" + 400 * "0"
SEEDS = "seeds must be a number, or different ones like 3,4,5 or 2-6, got '0'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("reproduce fig1 --set devise=cpu", "got 'devise' (did you mean 'device'?)"),
        ("reproduce fig2 --seeds 0", SEEDS),
        ("reproduce fig2 --seeds 2 --set seeds=3", "each setting must be given once, got seeds twice"),
        ("reproduce fig2 --set lr=1e3 --set record_every=9999", "grads of worker 0 must be finite"),
        ("reproduce fig2 --set lr=1e300 --set record_every=1", "the run diverged"),
        ("reproduce fig3 --preset papr", "preset must be one of"),
        ("reproduce fig3 --set task=digits", "task must be given as the command's own argument"),
        ("reproduce fig3", "data must be given for cifar10"),
        ("reproduce fig1 --set algorithms=topk", "num_iterations, lr, mu, w_1, device, got 'algorithms'"),
        ("compare toy --set task=digits", "task must be given as the command's own argument"),
        ("train --workers 1", "regtopk: --workers must be an integer of at least 2, got 1"),
        ("train --workers 0", "regtopk: --workers must be at least 1, got 0"),
        ("train --set num_workers=1", "regtopk: num_workers must be an integer of at least 2, got 1"),
        ("compare toy --algorithms=", "regtopk: --algorithms must be given with a value, got ''"),
        ("compare toy --resume --force", "give one of --resume and --force, got both"),
        (
            "compare digits --density 0.01 --like topk:0.1:raw32:float32",
            "regtopk: --density must not stand with a budget of bytes, got 0.01",
        ),
        ("train --workers 257", "regtopk: --workers must be at most 256, got 257"),
        ("train --set num_evaluations=-1", "num_evaluations must be an integer of at least 1, got -1"),
        (f"train --seeds {MANY}", f"seeds must be at most 10000, got '{MANY}'"),
        (f"compare toy --steps {MANY}", f"--steps must be at most 2147483647, got {MANY}"),
        ("compare toy --steps １２", "--steps must be like its default, 0, got '１２'"),
        (
            "compare digits --steps 2147483647",
            "--steps * num_workers * batch_size must be at most 1073741824",
        ),
        ("reproduce fig2 --set numel=2147483647", "num_points * seeds must be at most 2147483648, got "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, words: str, message: str) -> None:
    code, out, err = invoke(*words.split(), "--out", tmp_path / "run")
    assert (code, out) == (2, "")
    assert err.startswith("regtopk: ") and message in err and err.count("\n") == 1
    assert not (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run").exists() == (" --set lr=" in words)  # which begin


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("record", "how"),
    [
        ({"method": ["topk"]}, "continued"),
        ({"seed": [1]}, "continued"),
        ({"tuning_seed": [3]}, "continued"),
        ({"method": "topk"}, "summarised"),
    ],
)
def test_records_that_were_made_up_are_one_line(tmp_path: Path, record: dict[str, object], how: str) -> None:
    words = "compare", "toy", "--algorithms", "topk", "--steps", "4", "--out", tmp_path
    assert invoke(*words)[0] == 0
    whole = {"method": "topk", "seed": 0, "step": 4, "density": 0.01, **record}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(whole)}\n")
    code, _, err = invoke(*words, "--resume")
    assert code == 2 and f"folder must hold a run that can be {how}, got {tmp_path}: " in err


def test_report_draws_again(finished: Path, tmp_path: Path) -> None:
    assert invoke("report", tmp_path)[0] == 2  # there is nothing to draw
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    (tmp_path / "index.html").unlink()
    assert invoke("report", tmp_path) == (0, f"{tmp_path / 'index.html'}\n", "")
    assert (tmp_path / "index.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_demo_runs_again_but_spares_other_runs(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {name: ["num_iterations=5"] for name in ("fig1", "scaling")}
    monkeypatch.setattr("regtopk.cli.DEMO_PARTS", parts)
    for _ in range(2):
        code, printed, err = invoke("demo", "--out", tmp_path / "demo")
        assert code == 0 and err == ""
    assert printed.count("fig1") == printed.count("scaling") == 1 and printed.count("final risk") == 2
    assert "<figure" in (tmp_path / "demo" / "index.html").read_text(encoding="utf-8")
    assert set(json.loads((tmp_path / "demo" / "summary.json").read_text())) == {"fig1", "scaling"}
    shutil.copytree(finished, tmp_path / "mine" / "fig1")
    code, _, err = invoke("demo", "--out", tmp_path / "mine")
    assert code == 2 and "--force" in err


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_and_the_progress_bar(tmp_path: Path) -> None:
    words = ["reproduce", "fig2", "--out", str(tmp_path / "run"), "--set", "num_iterations=1000000"]
    words += ["--set", "record_every=1"]  # so that there soon is something to interrupt
    terminal, stderr = pty.openpty()
    command = [sys.executable, "-m", "regtopk", *words]
    with ended(subprocess.Popen(command, stderr=stderr, stdout=subprocess.PIPE, text=True)) as process:
        os.close(stderr)
        metrics = tmp_path / "run" / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size > 20_000):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        shown = ""
        with suppress(OSError):  # how Linux says that the other end of a terminal is closed
            while piece := os.read(terminal, 1 << 16):
                shown += piece.decode(errors="replace")
        os.close(terminal)
        assert process.wait(timeout=60) == 130
        assert process.stdout is not None and process.stdout.read() == ""
    assert "fig2" in shown and "Traceback" not in shown
    assert shown.rstrip().endswith("regtopk: interrupted")
    assert all(json.loads(line) for line in metrics.read_text().splitlines())


def test_a_narrow_terminal_cuts_no_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    row = {"measure": "topk:value_code=4bit", "payload per step": 1234567, "95 % interval": "+11.49 … +13.26"}
    for columns in ("30", "70", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        show({}, {"run": {"table": [row]}}, Path("page"), as_json=False)
        words = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).split()
        assert {"1,234,567", "+11.49", "+13.26", "interval", "payload", "topk:value_code=4bit"} <= set(words)
