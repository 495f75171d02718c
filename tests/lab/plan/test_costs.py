from pathlib import Path

import pytest
import torch

from regtopk.errors import OutputError, StateError
from regtopk.lab.plan import calibrate as cases
from regtopk.lab.plan.calibrate import calibrate
from regtopk.lab.plan.costs import RECORDED, Calibration, cache_path, describe_machine, fit
from regtopk.lab.plan.exchange import Work
from tests.lab.plan.made_up import LINES

HERE = torch.device("cpu")


def test_fit_finds_the_line_that_made_the_times_and_no_negative_cost() -> None:
    line = {"calls": 1e-3, "numel": 2e-9, "entries": 5e-8}
    points = [
        ({"calls": 1.0, "numel": numel, "entries": entries}, 1e-3 + 2e-9 * numel + 5e-8 * entries)
        for numel, entries in ((1e6, 1e3), (1e6, 1e5), (4e6, 1e3), (4e6, 1e5))
    ]
    assert fit(points) == pytest.approx(line)
    found = fit([({"calls": 1, "numel": 1e6}, 1e-3), ({"calls": 1, "numel": 4e6}, 8e-3)])  # convex
    assert found["calls"] == 0 and found["numel"] > 0


def test_a_calibration_is_kept_and_tells_the_seconds_of_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = cache_path("cpu")
    assert path.is_relative_to(tmp_path / "cache" / "regtopk")
    Calibration({"device": "cpu"}, {"pass": {"calls": 1.0, "entries": 0.5}}).write(path)
    costs = Calibration.read(path)
    assert costs.machine == {"device": "cpu"}
    assert costs.seconds(Work("pass", {"calls": 2, "entries": 4, "unknown": 9})) == 4.0
    with pytest.raises(StateError, match=r"calibration must hold the costs of 'ddp', got \['pass'\]"):
        costs.seconds(Work("ddp", {"numel": 1}))


def test_what_is_no_calibration(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    with pytest.raises(StateError, match=r"calibration must be readable, but .*bad\.json is not: No such"):
        Calibration.read(path)
    costs = ("3", '{"numel": NaN}', '{"numel": -1}', '{"numel": "1"}')
    for text in ("{", "[]", *(f'{{"machine": {{}}, "lines": {{"ddp": {cost}}}}}' for cost in costs)):
        path.write_text(text)
        with pytest.raises(StateError, match="calibration must be what `regtopk plan` writes, but"):
            Calibration.read(path)
    with pytest.raises(OutputError, match=r"bad\.json"):
        Calibration({}, {}).write(path / "below-a-file")


@pytest.mark.parametrize("case", cases.CASES[:-1])
def test_work_is_timed_in_the_units_that_are_planned(case: cases.Case) -> None:
    work, seconds = next(iter(case(HERE)))
    assert work.line in LINES and seconds > 0 and max(work.units.values()) >= 2**10


def test_the_recorded_costs_of_a_gpu_are_all_that_is_planned_for_one() -> None:
    costs = Calibration.read(RECORDED)
    assert costs.lines.keys() == {line for line in LINES if not line.startswith("move ")}
    assert costs.machine["device"] != "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
def test_a_gpu_calibrates() -> None:
    found = calibrate("cuda", lambda _: None)
    assert found.lines.keys() == Calibration.read(RECORDED).lines.keys()
    assert found.machine == describe_machine("cuda")


@pytest.mark.usefixtures("forked")
def test_two_processes_calibrate() -> None:
    seen: list[float] = []
    found = calibrate("cpu", seen.append, [cases.pass_points])
    moves = {line for line in LINES if line.startswith("move ")}
    assert found.lines.keys() == {"pass", *moves} and found.lines["pass"]["numel"] > 0
    assert seen == sorted(seen) and seen[-1] == 1 and found.machine == describe_machine("cpu")
