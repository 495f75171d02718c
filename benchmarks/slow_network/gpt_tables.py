"""What the rows of the GPT's race say: seconds to each loss on each link, and what latency costs."""

from typing import Any

from benchmarks.slow_network.gpt_methods import EVERY, WORDS
from benchmarks.slow_network.results import Row
from regtopk.plan.units import format_bandwidth, format_time


def summarise(content: dict[str, Any]) -> dict[str, Any]:
    """Seconds of every method to every loss, measured and computed, and ratios of steps with latency."""
    plan = content["plan"]
    race = {row["method"]: row for row in content["race"]}
    slow = {
        row["method"]: row for row in content["steps"] if row["bandwidth_bits_per_s"] == plan["slow_link"]
    }
    to_losses = []
    for method, row in race.items():
        for loss in (*plan["losses"], plan["target"]):
            reached = steps_and_seconds_to(row, loss)
            if reached is None:
                continue
            steps, seconds = reached
            entry = {"method": method, "loss": loss, "steps": steps, "seconds": {_link(row): seconds}}
            if method in slow:
                computed_s = slow_seconds(steps, slow, method, plan["warm_up"])
                entry["seconds"][_link(slow[method])] = computed_s
            to_losses.append(entry)
    return {"to_losses": to_losses, "latency": _latency(content["steps"], plan["link"])}


def steps_and_seconds_to(row: Row, loss: float) -> tuple[int, float] | None:
    """Of the first evaluation at or below a loss."""
    for number, (seconds, found) in enumerate(row["curve"], 1):
        if found <= loss:
            return number * row["stretch"], seconds
    return None


def slow_seconds(steps: int, slow: dict[str, Row], method: str, warm_up: int) -> float:
    """Step time x steps; PowerSGD's first steps are dense ones."""
    num_dense = min(steps, warm_up) if method == "powersgd" else 0
    return num_dense * slow["dense"]["step_s"] + (steps - num_dense) * slow[method]["step_s"]


def _latency(rows: list[Row], link: float) -> dict[str, float]:
    """Step times by latency one way, in ms, and the longest over the one without."""
    found = {row["latency_s"]: row["step_s"] for row in rows if row["bandwidth_bits_per_s"] == link}
    if len(found) < 2 or 0.0 not in found:
        return {}
    longest = max(found)
    return {
        "latency_s": longest,
        "step_s": found[longest],
        "step_s_without": found[0.0],
        "ratio": found[longest] / found[0.0],
    }


def _link(row: Row) -> str:
    return format_bandwidth(row["bandwidth_bits_per_s"])


def tables(content: dict[str, Any]) -> str:
    """The summary as Markdown."""
    summary, plan = content["summary"], content["plan"]
    race = {row["method"]: row for row in content["race"]}
    links = [format_bandwidth(plan[name]) for name in ("link", "slow_link")]
    lines = [
        f"| to a test loss of {plan['target']} | learning rate | steps | sent a step | {links[0]} | over dense "
        f"| {links[1]} | over dense |",
        "|---|" + "---:|" * 7,
    ]
    final = {e["method"]: e for e in summary["to_losses"] if e["loss"] == plan["target"]}
    for method in [name for name in EVERY if name in race]:
        row, entry = race[method], final.get(method)
        cells = [WORDS[method], f"{row['lr']:g}"]
        if entry is None:
            cells += [f"not in {row['steps']}", f"{row['sent_bytes'] / 1e3:,.0f} kB", "", "", "", ""]
        else:
            cells += [str(entry["steps"]), f"{row['sent_bytes'] / 1e3:,.0f} kB"]
            for link in links:
                cells += _seconds_and_ratio(entry, final.get("dense"), link)
        lines.append(f"| {' | '.join(cells)} |")
    losses = [*plan["losses"], plan["target"]]
    lines += ["", f"| seconds at {links[0]} to a test loss of | " + " | ".join(map(str, losses)) + " |"]
    lines.append("|---|" + "---:|" * len(losses))
    for method in [name for name in EVERY if name in race]:
        own = {e["loss"]: e["seconds"][links[0]] for e in summary["to_losses"] if e["method"] == method}
        lines.append(
            f"| {WORDS[method]} | " + " | ".join(f"{own[x]:.1f}" if x in own else "" for x in losses) + " |"
        )
    if summary["latency"]:
        found = summary["latency"]
        lines += [
            "",
            f"A step with a latency of {format_time(found['latency_s'])} one way: {found['ratio']:.3f} times "
            f"one without ({format_time(found['step_s'])}, {format_time(found['step_s_without'])}).",
        ]
    return "\n".join(lines)


def _seconds_and_ratio(entry: dict[str, Any], dense: dict[str, Any] | None, link: str) -> list[str]:
    seconds = entry["seconds"].get(link)
    if seconds is None:
        return ["", ""]
    ratio = "" if dense is None else f"{dense['seconds'][link] / seconds:.1f} x"
    return [f"{seconds:,.0f} s", ratio]
