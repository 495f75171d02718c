"""A plan as a recorded run: speed-up against bandwidth and against workers, for `report` to draw."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regtopk.plan.costs import Calibration
from regtopk.plan.methods import DENSE, FP16, PEER, POWERSGD, Method, Prediction, Situation, predict
from regtopk.plan.predict import Plan
from regtopk.plan.units import format_bandwidth, format_size, format_time
from regtopk.runs import Panel, Record, RunWriter, make_header

BANDWIDTHS = [10 ** (6 + n / 8) for n in range(37)]  # 1 Mbit/s to 30 Gbit/s and more
WORKERS = [2**n for n in range(1, 13)]


def write_run(
    folder: Path, plan: Plan, costs: Calibration, summary: dict[str, Any], *, command: str, force: bool
) -> None:
    """Write the plan's curves and its table into a folder.

    Raises:
        OutputError: the folder cannot be written, or holds a run.
    """
    situation = plan.situation
    density = min(p.method.density for p in plan.predictions)
    header = make_header(
        "plan",
        title="Is compression worth it on this link?",
        about=f"{verdict(plan)} Curves: speed-up over DDP without a hook, sending {100 * density:g} %.",
        command=command,
        config=summary["inputs"],
        panels=panels(situation),
    )
    with RunWriter(folder, header, force=force) as writer:
        for record in curves(situation, costs, density):
            writer.add(record)
        writer.finish({**summary, "table": table(plan, plan.fastest_by_name())})


def shown_methods(density: float) -> dict[str, Method]:
    """The curves of the page: those that `report` has a look for by their name, the others by a label."""
    return {
        "dense": DENSE,
        "torch fp16": FP16,
        "torch PowerSGD": POWERSGD,
        "Top-k as others send it": Method(PEER, density, "float32", "all_gather"),
        "regtopk": Method("regtopk", density, "float32", "all_gather"),
        "RegTop-k, 4 bits": Method("regtopk", density, "4bit", "all_gather"),
        "RegTop-k, 4 bits, split": Method("regtopk", density, "4bit", "split"),
        "consensus, 4 bits": Method("consensus", density, "4bit", "split"),
    }


def curves(situation: Situation, costs: Calibration, density: float) -> list[Record]:
    """Speed-ups over dense, on links of all bandwidths and with all numbers of workers."""
    records: list[Record] = []
    for label, method in shown_methods(density).items():
        for bandwidth in BANDWIDTHS:
            there = situation.at(bandwidth=bandwidth)
            records.append({"method": label, "against": "bandwidth", "mbit_per_s": bandwidth / 1e6})
            records[-1]["speedup"] = _speedup(method, there, costs)
        for num_workers in WORKERS:
            there = situation.at(num_workers=num_workers)
            records.append({"method": label, "against": "workers", "num_workers": num_workers})
            records[-1]["speedup"] = _speedup(method, there, costs)
    return records


def _speedup(method: Method, situation: Situation, costs: Calibration) -> float:
    dense_s = predict(DENSE, situation, costs).step_time_s
    return dense_s / predict(method, situation, costs).step_time_s


def panels(situation: Situation) -> Sequence[Panel]:
    """Two: against bandwidth, and against workers."""
    link = situation.link
    return (
        Panel(
            title=f"{situation.num_workers} workers, links of any bandwidth",
            x="mbit_per_s",
            y="speedup",
            x_label="bandwidth of a link, Mbit/s",
            y_label="speed-up over dense",
            where={"against": "bandwidth"},
            log_x=True,
            log_y=True,
        ),
        Panel(
            title=f"{format_bandwidth(link.bandwidth)}, any number of workers",
            x="num_workers",
            y="speedup",
            x_label="workers",
            y_label="speed-up over dense",
            where={"against": "workers"},
            log_x=True,
            log_y=True,
        ),
    )


def table(plan: Plan, predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """One row a prediction, for people."""
    return [
        {
            "measure": prediction.method.name,
            "density": f"{prediction.method.density:g}",
            "values": prediction.method.value_code,
            "collective": prediction.method.collective,
            "payload": format_size(prediction.payload_bytes),
            "step": format_time(prediction.step_time_s),
            "speed-up": f"{plan.speedup(prediction):.3g}",
        }
        for prediction in predictions
    ]


def verdict(plan: Plan) -> str:
    """The answer, in a few plain sentences."""
    where = f"{plan.situation.num_workers} workers at {format_bandwidth(plan.situation.link.bandwidth)}"
    best = plan.best
    name = f"{best.method.name}, density {best.method.density:g}, {best.method.value_code} values"
    if plan.pays:
        said = f"Compression pays with {where}: {name} by {best.method.collective} makes a step "
        said += f"{plan.speedup(best):.3g} times as fast as dense, {format_time(best.step_time_s)}."
    else:
        said = f"Compression does not pay with {where}: {best.method.name} takes the fastest step, "
        said += f"{format_time(best.step_time_s)}."
    if plan.break_even_bits_per_s is not None:
        return f"{said} Below {format_bandwidth(plan.break_even_bits_per_s)} it pays, above it does not."
    return f"{said} So it does at every bandwidth." if plan.pays else f"{said} It pays at no bandwidth."
