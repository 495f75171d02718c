"""What the rows of the GPT's race say: seconds to each loss on each link, and what latency costs."""

from typing import Any

from benchmarks.slow_network.gpt_methods import EVERY, WORDS
from benchmarks.slow_network.results import Row
from regtopk.plan.units import format_bandwidth, format_time


def summarise(content: dict[str, Any]) -> dict[str, Any]:
    """Steps and seconds of every method to every loss, and the step with latency over the one without."""
    plan = content["plan"]
    links = (plan["link"], plan["slow_link"])
    entries = []
    for row in content["race"]:
        for loss in (*plan["losses"], plan["target"]):
            reached = first_at(row, loss)
            if reached is None:
                continue
            steps, measured_s = reached
            entry = {"method": row["method"], "loss": loss, "steps": steps, "seconds": {}, "is_computed": {}}
            for link in links:
                is_computed = row["bandwidth_bits_per_s"] != link
                seconds = computed_s(row["method"], steps, link, content) if is_computed else measured_s
                name = format_bandwidth(link)
                entry["seconds"][name], entry["is_computed"][name] = seconds, is_computed
            entries.append(entry)
    step_s = {row["latency_s"]: row["step_s"] for row in content["latency"]}
    return {"to_losses": entries, "latency": _latency(step_s)}


def first_at(row: Row, loss: float) -> tuple[int, float] | None:
    """Steps and seconds until the first evaluation at or below a loss."""
    for number, (seconds, found) in enumerate(row["curve"], 1):
        if found <= loss:
            return number * row["stretch"], seconds
    return None


def computed_s(method: str, steps: int, link: float, content: dict[str, Any]) -> float | None:
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
        steps = f"not in {row['steps']}" if entry is None else str(entry["steps"])
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
    mark = "*" if entry["is_computed"][link] else ""
    ratio = "" if dense is None else f"{dense['seconds'][link] / seconds:.1f} x"
    return [f"{seconds:,.0f} s{mark}", ratio]


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
                "" if entry is None or seconds is None else f"{seconds:,.0f} s, {entry['steps']} steps"
            )
        rows.append(cells)
    return _markdown([f"at {link} to a test loss of", *(f"{loss:g}" for loss in losses)], rows)


def _in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: list(EVERY).index(row["method"]))


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    ruler = "|---|" + "---:|" * (len(head) - 1)
    return "\n".join([f"| {' | '.join(head)} |", ruler, *(f"| {' | '.join(cells)} |" for cells in rows)])
