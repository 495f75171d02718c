import time
from itertools import islice
from pathlib import Path

import pytest
import torch

from regtopk.errors import OutputError, StateError
from regtopk.lab.plan import cases
from regtopk.lab.plan.bench import Bench, typical
from regtopk.lab.plan.calibrate import Machine, calibrate, measurement_of
from regtopk.lab.plan.costs import Calibration, fit
from regtopk.lab.plan.exchange import Work
from regtopk.lab.plan.methods import Method, exchange_of
from regtopk.lab.plan.workload import Workload
from tests.lab.plan.made_up import all_lines

HERE = Bench(torch.device("cpu"))


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
    found = fit([({"calls": 1, "entries": 10, "numel": 1e6}, 1e-3)])
    assert found == {"calls": 0.0, "entries": 0.0, "numel": pytest.approx(1e-9)}


def test_seconds_of_units() -> None:
    costs = Calibration({}, {"encode": {"calls": 1.0, "entries": 0.5}})
    assert costs.seconds(Work("encode", {"calls": 2, "entries": 4, "unknown": 9})) == 4.0


def test_calibrations_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine = Machine(local_workers=3)
    assert machine.path.is_relative_to(tmp_path / "cache" / "regtopk")
    assert machine.path != Machine(local_workers=2).path
    kept = Calibration(machine.describe(), {"exchange": {"numel": 1e-9}})
    kept.write(machine.path)
    assert Calibration.read(machine.path) == kept


def test_what_is_no_calibration(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    with pytest.raises(StateError, match=r"calibration must be readable, but .*bad\.json is not: No such"):
        Calibration.read(path)
    costs = [
        f'{{"machine": {{}}, "lines": {{"ddp": {cost}}}}}'
        for cost in ("3", '{"numel": NaN}', '{"numel": -1}')
    ]
    for text in ("{", "[]", *costs):
        path.write_text(text)
        with pytest.raises(StateError, match="calibration must be what `regtopk plan` writes, but"):
            Calibration.read(path)
    with pytest.raises(OutputError, match=r"output folder must be writable, got .*bad\.json"):
        Calibration({}, {}).write(path / "below-a-file")


def test_bad_machines() -> None:
    with pytest.raises(ValueError, match="local_workers must be an integer of at least 1, got 0"):
        Machine(local_workers=0)
    with pytest.raises(ValueError, match="num_threads must be an integer of at least 0, got -1"):
        Machine(num_threads=-1)
    with pytest.raises(ValueError, match=r"device must be one of cpu.*, got 'abacus'"):
        Machine(device="abacus")


def test_workers_of_one_machine_calibrate_together() -> None:
    seen: list[float] = []
    found = calibrate(Machine(local_workers=2, num_threads=1), ["quantise 4bit", "exchange"], seen.append)
    assert seen == [1 / 2, 1] and set(found) == {"quantise 4bit", "exchange"}
    assert found["exchange"]["numel"] > 0
    assert all(cost >= 0 for line in found.values() for cost in line.values())


@pytest.mark.parametrize("line", ["decode float32", "split decode 4bit", "dense decode 4bit", "decode none"])
def test_messages_are_timed_in_the_units_that_are_planned(line: str) -> None:
    measure, of = measurement_of(line)
    points = list(islice(measure(HERE, *of), 2))
    assert [work.line for work, _ in points] == [line.replace("decode", "encode"), line]
    assert all(work.units["entries"] >= 2**10 and seconds > 0 for work, seconds in points)


def test_algorithms_are_timed_in_the_units_that_are_planned() -> None:
    work, _ = next(cases.algorithm_points(HERE, "randomk"))
    method = Method("randomk", 0.01, "float32", "split")
    planned = dict(exchange_of(method, Workload.of_size(10**6), 2).work)
    assert set(work.units) == set(planned[work.line])


def test_every_cost_has_a_measurement() -> None:
    found: dict[str, set[str]] = {}
    for line in all_lines():
        measure, of = measurement_of(line)
        found.setdefault(" ".join((measure.__name__, *of)), set()).add(line)
    assert found["hook_points"] == {"ddp", "fp16", "powersgd"}
    kinds = ("all_reduce", "all_reduce half", "broadcast", "all_to_all", "all_gather")
    assert found["collective_points"] == {f"move {kind}" for kind in kinds}
    assert found["message_points split 4bit"] == {"split encode 4bit", "split decode 4bit"}
    assert found["message_points gather none"] == {"encode none", "decode none"}
    assert found["algorithm_points sketch"] == {"select sketch"}


def test_shared_processors_are_counted_by_the_work_they_do() -> None:
    assert Bench.of("cpu", num_workers=1, num_threads=2, num_cores=2).now is time.perf_counter
    for workers, threads, cores, factor in ((4, 1, 2, 2.0), (2, 1, 8, 1.0), (2, 4, 8, 0.25)):
        bench = Bench.of("cpu", workers, threads, cores)
        before, now, after = time.process_time(), bench.now(), time.process_time()
        assert factor * before <= now <= factor * after


def test_a_typical_time_is_a_median_without_the_first() -> None:
    times = iter([9.0, 0.01, 0.03, 0.02, 0.01, 0.01, 5.0, 0.02])
    assert typical(lambda: {"work": next(times)}) == {"work": 0.015}
    assert next(times) == 0.02  # six took more than enough
