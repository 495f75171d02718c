"""What the rows of the GPT's race say: seconds to each loss on each link, and what latency costs."""

import math
import statistics
from itertools import product
from typing import Any

from benchmarks.slow_network.gpt_methods import EVERY, WORDS
from benchmarks.slow_network.results import Row
from regtopk.lab.plan.units import format_bandwidth, format_time


def summarise(content: dict[str, Any]) -> dict[str, Any]:
    """Steps and seconds of every method to every loss, and the step with latency over the one without.

    Steps are the median over seeds, one that does not reach the loss counting as the last; there are none if
    most do not. Seconds are these steps x the time of a step on the link; beside them is what the first seed
    took, where it trained on the link.
    """
    plan = content["plan"]
    entries = []
    for method, loss in product(EVERY, (*plan["losses"], plan["target"])):
        rows = [row for row in content["race"] if row["method"] == method]
        reached = [first_at(row, loss) for row in rows]
        steps_of_seeds = [None if pair is None else pair[0] for pair in reached]
        steps = statistics.median(math.inf if n is None else n for n in steps_of_seeds) if rows else math.inf
        if steps == math.inf:
            continue
        entry = {"method": method, "loss": loss, "steps": steps, "steps_of_seeds": steps_of_seeds}
        entry["seconds"] = {
            format_bandwidth(link): computed_s(method, steps, link, content)
            for link in (plan["link"], plan["slow_link"])
        }
        on_link = [
            pair for row, pair in zip(rows, reached, strict=True) if row["bandwidth_bits_per_s"] and pair
        ]
        entry["trained_on_link"] = {"steps": on_link[0][0], "seconds": on_link[0][1]} if on_link else None
        entries.append(entry)
    step_s = {row["latency_s"]: row["step_s"] for row in content["latency"]}
    return {"to_losses": entries, "latency": _latency(step_s)}


def first_at(row: Row, loss: float) -> tuple[int, float] | None:
    """Steps and seconds until the first evaluation at or below a loss."""
    for number, (seconds, found) in enumerate(row["curve"], 1):
        if found <= loss:
            return number * row["stretch"], seconds
    return None


def computed_s(method: str, steps: float, link: float, content: dict[str, Any]) -> float | None:
    """Steps x the time of a step on the link; PowerSGD's first steps are dense ones."""
    step_s = {row["method"]: row["step_s"] for row in content["steps"] if row["bandwidth_bits_per_s"] == link}
    if not {method, "dense"} <= set(step_s):
        return None
    num_dense = min(steps, content["plan"]["warm_up"]) if method == "powersgd" else 0
    seconds: float = num_dense * step_s["dense"] + (steps - num_dense) * step_s[method]
    return seconds


def _latency(step_s: dict[float, float]) -> dict[str, float]:
    if len(step_s) < 2:
        return {}
    none, longest = min(step_s), max(step_s)
    times = {"step_s": step_s[longest], "step_s_without": step_s[none]}
    return {"latency_s": longest, **times, "ratio": step_s[longest] / step_s[none]}


def tables(content: dict[str, Any]) -> str:
    """The summary as Markdown."""
    parts = [_table_of_target(content), _table_of_losses(content)]
    found = content["summary"]["latency"]
    if found:
        times = f"{format_time(found['step_s'])} and {format_time(found['step_s_without'])}"
        parts.append(
            f"{WORDS['updates:4']}: with a latency of {format_time(found['latency_s'])} one way a step takes "
            f"{found['ratio']:.3f} times as long as without ({times})."
        )
    return "\n\n".join(parts)


def _table_of_target(content: dict[str, Any]) -> str:
    plan = content["plan"]
    links = [format_bandwidth(plan[name]) for name in ("link", "slow_link")]
    head = [f"to a test loss of {plan['target']:g}", "learning rate", "steps", "sent a step"]
    rows = []
    final = {e["method"]: e for e in content["summary"]["to_losses"] if e["loss"] == plan["target"]}
    for row in _in_order(content["race"]):
        entry = final.get(row["method"])
        steps = f"not in {plan['num_steps']}" if entry is None else _of_seeds(entry)
        cells = [WORDS[row["method"]], f"{row['lr']:g}", steps, f"{row['sent_bytes'] / 1e3:,.0f} kB"]
        for link in links:
            cells += _seconds_and_ratio(entry, final.get("dense"), link)
        rows.append(cells)
    for link in links:
        head += [link, "dense takes"]
    return _markdown(head, rows)


def _seconds_and_ratio(entry: Row | None, dense: Row | None, link: str) -> list[str]:
    seconds = None if entry is None else entry["seconds"][link]
    if entry is None or seconds is None:
        return ["", ""]
    ratio = "" if dense is None else f"{dense['seconds'][link] / seconds:.1f} x"
    return [f"{seconds:,.0f} s", ratio]


def _of_seeds(entry: Row) -> str:
    """The median of the steps, and those of every seed."""
    seeds = ", ".join("not" if steps is None else str(steps) for steps in entry["steps_of_seeds"])
    return f"{entry['steps']:g} ({seeds})"


def _table_of_losses(content: dict[str, Any]) -> str:
    plan = content["plan"]
    losses, link = [*plan["losses"], plan["target"]], format_bandwidth(plan["link"])
    rows = []
    for row in _in_order(content["race"]):
        own = {e["loss"]: e for e in content["summary"]["to_losses"] if e["method"] == row["method"]}
        cells = [WORDS[row["method"]]]
        for loss in losses:
            entry = own.get(loss)
            seconds = None if entry is None else entry["seconds"][link]
            cells.append(
                "" if entry is None or seconds is None else f"{seconds:,.0f} s, {entry['steps']:g} steps"
            )
        rows.append(cells)
    return _markdown([f"at {link} to a test loss of", *(f"{loss:g}" for loss in losses)], rows)


def _in_order(rows: list[Row]) -> list[Row]:
    """One row of every method."""
    of_method = {row["method"]: row for row in rows}
    return [of_method[method] for method in EVERY if method in of_method]


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    ruler = "|---|" + "---:|" * (len(head) - 1)
    return "\n".join([f"| {' | '.join(head)} |", ruler, *(f"| {' | '.join(cells)} |" for cells in rows)])
