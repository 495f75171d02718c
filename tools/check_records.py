"""Do the recorded measurements still hold what the pages say of them? Nothing is run or timed here.

    python -m tools.check_records

prints what does not hold, and then exits with 1. `make docs` runs it.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import fmean, median
from typing import Any

from benchmarks import peers, steps_to_target
from benchmarks.slow_network import against_plan, delays_against_plan
from benchmarks.slow_network.methods import ACCURACY_METHODS, STEP_METHODS
from benchmarks.slow_network.methods import Method as Measured
from benchmarks.slow_network.results import with_headers
from regtopk import recipes
from regtopk.lab.method import SCORE_OPTIONS, Method
from regtopk.lab.plan.costs import Calibration
from regtopk.lab.runs.reading import read_records
from tools import tables
from tools.records import ROOT, row_of, rows_in

RESULTS = ROOT / "benchmarks" / "results"
NUMEL = 11_173_962
SMALL_FRAMES_BYTES = 500  # a collective and worker, beside the messages: gloo announces each
NUM_BUCKETS = 3
NUM_COLLECTIVES = {"dense": NUM_BUCKETS, "fp16": NUM_BUCKETS, "powersgd": 3, "peer-topk": 2 * NUM_BUCKETS}
NUM_COLLECTIVES |= dict.fromkeys(("topk", "regtopk", "dgc"), 2)  # an agreement, and the messages
WITHIN = 0.3  # of a measured step, that a predicted one must lie
NEAR_POINTS = 1.2  # of accuracy
NEAR_NATS = 0.01  # of test loss

Failures = Iterator[str]
Rows = list[dict[str, Any]]


def check_learned() -> Failures:
    """learned.json is what the records of training say."""
    if json.loads(steps_to_target.LEARNED.read_text()) != steps_to_target.make():
        yield "learned.json must be what the records say: python -m benchmarks.steps_to_target"


def check_plan() -> Failures:
    """The planner's steps are near the measured ones, and the pages show both."""
    rows = against_plan.compare()
    for row in rows:
        if row["is_planned"] and abs(row["off"]) > WITHIN:
            yield f"a predicted step must be within {WITHIN:.0%}, got {row['off']:+.0%}: {_named(row)}"
    page = (ROOT / "docs" / "when-it-pays.md").read_text(encoding="utf-8")
    made = against_plan.tables(rows)
    for name in {found[1] for found in against_plan.BLOCK.finditer(page)} - {*made, *tables.OTHERS}:
        yield f"docs/when-it-pays.md must name a table that is made, got {name}"
    if against_plan.put_into(page, made) != page:
        command = "python -m benchmarks.slow_network.against_plan --into docs/when-it-pays.md"
        yield f"docs/when-it-pays.md must show the records: {command}"
    steps = json.loads((RESULTS / "slow-network-delays.json").read_text())["steps"]
    costs = Calibration.read(RESULTS / "slow-network-delays-calibration.json")
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    for line in delays_against_plan.table(steps, costs).splitlines()[2:]:
        if line.split(" | ")[0] in page and line not in page:
            yield f"docs/planning.md must show the records, got another line than {line}"


def check_steps() -> Failures:
    """All methods were measured on all links, and the kernel counted the bytes that they say they send."""
    rows = json.loads((RESULTS / "slow-network.json").read_text(encoding="utf-8"))["steps"]
    for workers in (2, 4):
        for bandwidth in (10e6, 100e6, 1e9, None):
            for text in STEP_METHODS:
                if len(_find(rows, text, bandwidth, workers)) != 1:
                    yield f"steps must have one row of {text}, {workers} workers, {bandwidth}"
    for row in rows:
        times = row["step_s_all"]
        if row["params"] == NUMEL and not min(times) <= row["step_s"] <= max(times):
            yield f"step_s must lie among the steps: {_named(row)}"
        if not 0 < row["compute_s"] < row["step_s"]:
            yield f"compute_s must be less than step_s: {_named(row)}"
        num_collectives = NUM_COLLECTIVES[row["method"]] + 3 * (row["collective"] == "split")
        for way, other in (("sent", "received"), ("received", "sent")):
            said, counted = row[f"{way}_bytes"], row[f"interface_{way}_bytes"]
            most = 1.05 * with_headers(said, row[f"{other}_bytes"])
            if not said <= counted <= most + SMALL_FRAMES_BYTES * row["workers"] * num_collectives:
                yield f"{way}_bytes must be what the kernel counted, {counted}, got {said}: {_named(row)}"
    dense, fp16, ours = (_find(rows, name, 100e6)[0]["step_s"] for name in ("dense", "fp16", "regtopk:0.001"))
    if dense < 20 * ours or fp16 < 8 * ours:
        yield f"at 100 Mbit/s regtopk must be 20 times as fast as dense, 8 times as fp16: {dense, fp16, ours}"
    for text in ("regtopk:0.001", "regtopk:0.001:4bit"):
        shaped, unshaped = (_find(rows, text, bandwidth)[0] for bandwidth in (100e6, None))
        on_link_s = 2 * 8 * shaped["sent_bytes"] / 100e6 + 2 * 5e-3  # 5 ms a round, of which there are two
        if shaped["step_s"] - unshaped["step_s"] > on_link_s:
            yield f"a link must cost at most twice its bytes: {text}"


def check_accuracy() -> Failures:
    """RegTop-k reaches the accuracy five times as soon as dense, with learning rates searched alike."""
    rows = json.loads((RESULTS / "slow-network.json").read_text(encoding="utf-8"))["time_to_accuracy"]
    raced = [row for row in rows if row["bandwidth_bits_per_s"] is not None]
    if {(row["target"], row["bandwidth_bits_per_s"]) for row in raced} != {(raced[0]["target"], 100e6)}:
        yield "all methods must race to one target, at 100 Mbit/s"
    reached = {(row["method"], row["value_code"]): row["reached_s"] for row in raced}
    for code in ("float32", "4bit"):
        if reached["dense", None] < 5 * reached["regtopk", code]:
            yield f"regtopk, {code}, must be five times as soon as dense"
    tried: dict[tuple[str, str | None], set[float]] = defaultdict(set)
    for row in rows:
        tried[row["method"], row["value_code"]].add(row["lr"])
    methods = [Measured.parse(text) for text in ACCURACY_METHODS]
    if tried != {(method.name, method.value_code): {0.1, 0.2, 0.4, 0.8} for method in methods}:
        yield "all methods must have tried the same learning rates"


def check_larger() -> Failures:
    """How many times dense Muon's steps our recipe took with 124 M parameters, to dense's loss at half."""
    folder, muon = ROOT / "docs" / "results" / "gpt2-12x768", steps_to_target.TASKS["muon"]
    found = {key.method: runs for key, runs in steps_to_target.curves(folder, muon).items()}
    dense = next(found[name] for name in found if name.startswith("dense:beta2"))
    signs = next(found[name] for name in found if "returned" in name)
    half = max(step for curve in dense.values() for step, _ in curve) / 2
    target = fmean(dict(curve)[half] for curve in dense.values())
    ratio = median(steps_to_target.crossing(curve, target) for curve in signs.values()) / half
    counted = f"where {recipes.transformer(8).steps:.2f} are counted"
    for path, told in (("src/regtopk/lab/plan/page.py", ""), ("docs/planning.md", counted)):
        text = (ROOT / path).read_text(encoding="utf-8")
        if f"{ratio:.1f} times dense Muon's" not in text or told not in text:
            yield f"{path} must say that signs took {ratio:.1f} times dense Muon's steps, {told}"


def check_race() -> Failures:
    """What the pages say of the race of a GPT: ours beats dense by far, MuLoCo in one piece beats ours."""
    rows = tables.race_rows()
    names = ("dense Muon", "ours", "MuLoCo in 2 bits", "ours with returned", "streaming MuLoCo in 2 bits")
    dense_s, ours_s, whole_s, returned_s, _ = (rows[name]["reached_s"] for name in names)
    ratios = dense_s / ours_s, ours_s / whole_s, returned_s / whole_s
    if any(abs(ratio / told - 1) > 0.1 for ratio, told in zip(ratios, (10, 2, 3), strict=True)):
        yield f"ours must take a tenth of dense's time, MuLoCo half or a third of ours, got {ratios}"
    (alone,) = json.loads(tables.RACE.with_stem(f"{tables.RACE.stem}-one-piece").read_text())["race"]
    one_s, planned_s = alone["reached_s"], alone["predicted_s"]
    told = (
        f"took {one_s:.0f} s",
        f"{100 * (one_s / whole_s - 1):.0f} % more",
        f"Planned: {planned_s:.0f} s",
    )
    if any(text not in (ROOT / "docs" / "when-it-pays.md").read_text(encoding="utf-8") for text in told):
        yield f"docs/when-it-pays.md must say of ours in one piece: {told}"
    page = (ROOT / "docs" / "comparisons.md").read_text(encoding="utf-8")
    for name in (names[0], *names[3:]):
        counted = row_of("enwik8-8", peers.ROWS[name].words)["received_bytes_per_step"]
        itemsize = 2 if name == names[0] else 1  # the race's DDP sends bfloat16, the record's float32
        more = 100 * (itemsize * rows[name]["received_bytes_per_step"] / counted - 1)
        if f"{more:.0f} %" not in page:
            yield f"docs/comparisons.md must say that {name} moves {more:.0f} % more than is counted"
    for row in rows.values():
        planned_s = row["predicted_s"] or row["reached_s"]
        if abs(planned_s / row["reached_s"] - 1) > WITHIN:
            yield f"a predicted time must be within {WITHIN:.0%}, got {planned_s} s: {row['words']}"


def check_regtopk() -> Failures:
    """README.md and docs/which-method.md say that RegTop-k is near Top-k in all deep networks."""
    results = ROOT / "docs" / "results"
    for file in [*results.glob("fig3-*/summary.json"), *results.glob("fashion-mnist/*/summary.json")]:
        rows = rows_in(file.parent)
        for label, row in rows.items():
            words = Method.read(label)
            alike = ":".join(["topk", *(f"{k}={v}" for k, v in words.words if k not in SCORE_OPTIONS)])
            if words.algorithm == "regtopk" and alike in rows:
                points = row["mean"] - rows[alike]["mean"]
                if abs(points) > NEAR_POINTS:
                    yield f"{label} must be within {NEAR_POINTS} points of Top-k, got {points:+.2f}: {file}"


def check_momentum() -> Failures:
    """What docs/deep-networks.md says of momentum in the optimizer, on seed 0: the last five evaluations."""
    results = ROOT / "docs" / "results"
    searched = json.loads((results / "fig3-paper-momentum" / "search.json").read_text())
    found = {}
    for text, run in searched.items():
        label, picked, *_ = json.loads(text)
        found[label.partition(":")[0], picked["lr"]] = run["final"]
    curves: dict[str, list[float]] = defaultdict(list)
    for record in read_records(results / "fig3-paper-bytes"):
        if record["seed"] == 0:
            curves[record["method"]].append(record["accuracy"])
    names = ("dgc:lr=0.1", "dense:value_code=float32:lr=0.1", "topk:lr=0.1")
    dgc, dense, topk = (fmean(curves[name][-5:]) for name in names)
    told = (
        f"dense SGD ends at {found['dense', 0.03]:.1f} (lr 0.03) and {found['dense', 0.1]:.1f} (0.1)",
        f"Top-k in 4 bits at {found['topk', 0.03]:.1f} and {found['topk', 0.1]:.1f};",
        f"DGC has {dgc:.1f}, and without momentum dense SGD {dense:.1f}, Top-k in 4 bits {topk:.1f}.",
        f"On one seed, at least {found['topk', 0.03] - topk:.1f} of them are momentum's.",
    )
    page = " ".join((ROOT / "docs" / "deep-networks.md").read_text(encoding="utf-8").split())
    for text in told:
        if text not in page:
            yield f"docs/deep-networks.md must say: {text}"


def check_ranks() -> Failures:
    """docs/training.md says what a rank costs that is slow or bad."""
    fewer, waiting = (
        row_of("slow-rank", f"{late}:every=4")["mean"] for late in ("one-makes-fewer", "one-always")
    )
    if fewer < 2.5 * waiting:
        yield f"fewer steps on the slow rank must make 2.5 times as many in all, got {fewer / waiting:.2f}"
    alike, slow = row_of("unequal/alike", "topk"), row_of("unequal/one-slow", "every=4/4/4/1")
    if slow["mean"] > alike["mean"] + NEAR_NATS:
        yield f"a slow rank must cost at most {NEAR_NATS} nats, got {slow['mean'] - alike['mean']:+.4f}"


CHECKS: list[Callable[[], Failures]] = [
    *(check_learned, check_larger, check_plan, check_steps),
    *(check_accuracy, check_race, check_regtopk, check_momentum, check_ranks),
]


def _find(rows: Rows, method: str, bandwidth: float | None, workers: int = 4) -> Rows:
    wanted = vars(Measured.parse(method)) | {"workers": workers, "bandwidth_bits_per_s": bandwidth}
    wanted["method"] = wanted.pop("name")
    return [row for row in rows if row.items() >= wanted.items() and row["latency_s"] == 0]


def _named(row: dict[str, Any]) -> str:
    keys = ("workers", "bandwidth_bits_per_s", "method", "value_code", "collective")
    return ", ".join(f"{key} {row[key]}" for key in keys)


def main() -> int:
    """Say what does not hold."""
    failures = [failure for check in CHECKS for failure in check()]
    for failure in failures:
        print(f"check_records: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
