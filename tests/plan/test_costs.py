import json
import time
from pathlib import Path

import pytest
import torch

from regtopk.errors import OutputError, StateError
from regtopk.plan import cache, cases
from regtopk.plan.calibrate import Machine, calibrate
from regtopk.plan.clock import Clock, typical
from regtopk.plan.costs import Calibration, fit


def test_fit_finds_the_line_that_made_the_times() -> None:
    line = {"calls": 1e-3, "numel": 2e-9, "entries": 5e-8}
    points = [
        ({"calls": 1.0, "numel": numel, "entries": entries}, 1e-3 + 2e-9 * numel + 5e-8 * entries)
        for numel, entries in ((1e6, 1e3), (1e6, 1e5), (4e6, 1e3), (4e6, 1e5))
    ]
    assert fit(points) == pytest.approx(line)


def test_no_cost_is_negative() -> None:
    found = fit([({"calls": 1, "numel": 1e6}, 1e-3), ({"calls": 1, "numel": 4e6}, 8e-3)])  # convex
    assert found["calls"] == 0 and found["numel"] > 0


def test_a_single_time_is_explained_by_the_size() -> None:
    assert fit([({"calls": 1, "entries": 10, "numel": 1e6}, 1e-3)]) == {
        "calls": 0.0,
        "entries": 0.0,
        "numel": pytest.approx(1e-9),
    }


def test_seconds_of_units() -> None:
    costs = Calibration({}, {"encode": {"calls": 1.0, "entries": 0.5}})
    assert costs.seconds("encode", {"calls": 2, "entries": 4, "unknown": 9}) == 4.0


def test_calibrations_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine = Machine(local_workers=3)
    path = cache.cache_path(machine)
    assert path.is_relative_to(tmp_path / "cache" / "regtopk")
    assert path != cache.cache_path(Machine(local_workers=2))
    kept = Calibration(machine.describe(), {"exchange": {"numel": 1e-9}})
    cache.write(kept, path)
    seen: list[float] = []
    assert cache.calibration_of(machine, path, again=False, progress=seen.append) == kept
    assert seen == []


def test_what_is_no_calibration(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    with pytest.raises(StateError, match=r"calibration must be readable, but .*bad\.json is not: No such"):
        cache.read(path)
    for text in ("{", "[]", '{"machine": {}, "lines": {"a": 3}}'):
        path.write_text(text)
        with pytest.raises(StateError, match="calibration must be what `regtopk plan` writes, but"):
            cache.read(path)
    with pytest.raises(OutputError, match="calibration must be writable, but"):
        cache.write(Calibration({}, {}), path / "below-a-file")


def test_bad_machines() -> None:
    with pytest.raises(ValueError, match="local_workers must be an integer of at least 1, got 0"):
        Machine(local_workers=0)
    with pytest.raises(ValueError, match="num_threads must be an integer of at least 0, got -1"):
        Machine(num_threads=-1)
    with pytest.raises(ValueError, match=r"device must be one of cpu.*, got 'abacus'"):
        Machine(device="abacus")


def test_workers_of_one_machine_calibrate_together() -> None:
    seen: list[float] = []
    names = ("quantise 4bit", "exchange", "collectives")
    found = calibrate(Machine(local_workers=2, num_threads=1), seen.append, only=names)
    assert found.machine["local_workers"] == 2 and seen == pytest.approx([1 / 3, 2 / 3, 1])
    kinds = ("all_reduce", "all_reduce half", "all_gather", "all_to_all", "broadcast")
    assert set(found.lines) == {"quantise 4bit", "exchange", *(f"move {kind}" for kind in kinds)}
    assert all(cost >= 0 for line in found.lines.values() for cost in line.values())
    assert found.seconds("exchange", {"numel": 1e6}) > 0
    assert Calibration.from_json(json.dumps(found.to_json()), "itself") == found


@pytest.mark.parametrize("kind", cases.MESSAGES)
def test_messages_are_timed_in_the_units_that_are_planned(kind: str) -> None:
    from regtopk.plan.rounds import Asked, work_of

    points = list(cases.message_points(kind, "float32", Clock(torch.device("cpu"))))
    asked = Asked("dense" if kind == "dense" else "sparse", 10, 100)
    planned = {w.line: set(w.units) for w in work_of(asked, 2, "split" if kind == "split" else "all_gather")}
    assert {line: set(units) for line, units, _ in points} == planned
    assert all(seconds > 0 for _, _, seconds in points)


def test_algorithms_are_timed_in_the_units_that_are_planned() -> None:
    points = list(cases.algorithm_points("randomk", Clock(torch.device("cpu"))))
    assert {line for line, _, _ in points} == {"select randomk"}
    assert all(set(units) == {"calls", "entries", *cases.numel_units(1)} for _, units, _ in points)


def test_clocks() -> None:
    assert Clock.of("cpu", num_workers=1, num_threads=2, num_cores=2).stretch is None
    assert Clock.of("cpu", num_workers=4, num_threads=1, num_cores=2).stretch == 2
    assert Clock.of("cpu", num_workers=2, num_threads=1, num_cores=8).stretch == 1
    assert Clock.of("cpu", num_workers=2, num_threads=4, num_cores=8).stretch == 0.25
    by_processor = Clock(torch.device("cpu"), stretch=1.0)
    assert (
        by_processor.time(lambda: time.sleep(0.01))
        < 0.005
        < Clock(torch.device("cpu")).time(lambda: time.sleep(0.01))
    )


def test_a_typical_time_is_a_median_without_the_first() -> None:
    times = iter([9.0, 0.01, 0.03, 0.02, 0.01, 0.01, 5.0, 0.02])
    assert typical(lambda: next(times)) == 0.015
    assert next(times) == 0.02  # six took more than enough
