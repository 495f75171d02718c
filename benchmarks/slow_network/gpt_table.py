"""What the rows of the GPT's race say, in words and as a table."""

from typing import Any

from benchmarks.slow_network.results import Row
from regtopk.lab.plan.units import format_bandwidth, format_time

HEAD = (
    "method", "learning rate", "steps", "time", "dense takes", "how", "sent per step", "sent in all",
    "planned", "off",
)  # fmt: skip


def said(row: Row) -> str:
    """One line of progress."""
    words = f"{row['method']}, lr {row['lr']:g}: {format_time(row['step_s'])} per step"
    if "curve" in row:
        words += f", test loss {row['curve'][-1][2]:.4f} after {row['timed_steps']} steps, {how(row)}"
    return words


def how(row: Row) -> str:
    """How the time to the target was found."""
    if row["reached_s"] is None:
        in_record = " in the record" if row["needed_steps"] is None else ""
        return f"target not reached{in_record}; timed {row['timed_steps']} steps"
    if row["is_computed"]:
        return f"timed {row['timed_steps']} steps, {row['needed_steps']:.0f} needed"
    return "trained to the target"


def table(content: dict[str, Any]) -> str:
    """All methods, the soonest first, as Markdown."""
    settings, rows = content["settings"], content["race"]
    # the soonest of DDP's own
    dense_s = min((row["reached_s"] for row in rows if is_plain(row) and row["reached_s"]), default=None)
    link = (
        f"{format_bandwidth(settings['bandwidth_bits_per_s'])}, {format_time(settings['latency_s'])} one way"
    )
    lines = [
        f"{settings['num_workers']} ranks, {link}, to a test loss of {settings['target']:.4f}, "
        f"{settings['target_is']}:\n",
        f"| {' | '.join(HEAD)} |",
        "|---|" + "---:|" * 4 + "---|" + "---:|" * 4,
    ]
    for row in sorted(rows, key=lambda row: row["reached_s"] or float("inf")):
        lines.append(f"| {' | '.join(cells(row, dense_s))} |")
    return "\n".join([*lines, "", *(link_words(row) for row in content["link"])])


def cells(row: Row, dense_s: float | None) -> list[str]:
    """A method's row."""
    seconds, steps, planned_s = row["reached_s"], row["reached_steps"], row.get("predicted_s")
    return [
        row["method"],
        f"{row['lr']:g}",
        "" if steps is None else f"{steps:.0f}",
        "" if seconds is None else f"{seconds:,.1f} s",
        f"{dense_s / seconds:.2f} x" if seconds and dense_s else "",
        how(row),
        f"{row['sent_bytes_per_step'] / 1e3:,.1f} kB",
        "" if steps is None else f"{row['sent_bytes_per_step'] * steps / 1e6:,.1f} MB",
        "" if planned_s is None else f"{planned_s:,.1f} s",
        "" if planned_s is None or seconds is None else f"{planned_s / seconds - 1:+.0%}",
    ]


def is_plain(row: Row) -> bool:
    """Whether a row is DDP's, whose gradients are sent in bfloat16."""
    return row["words"].startswith("dense:") and "exchange=updates" not in row["words"]


def link_words(row: Row) -> str:
    """What the links carried while all ranks sent."""
    if row["bandwidth_bits_per_s"] is None:
        return f"A link carries {format_bandwidth(row['achieved_bits_per_s'])} of payload, unshaped."
    words = (
        f"A link carries {format_bandwidth(row['achieved_bits_per_s'])} of payload while all ranks send, "
        f"with headers {row['off']:+.1%} from {format_bandwidth(row['bandwidth_bits_per_s'])}. "
        f"A message of one byte takes {format_time(row['trip_s'])}."
    )
    if "relay_busy" in row:
        late = format_time(row["relay_late_s"])
        words += f" The relay took {row['relay_busy']:.0%} of a core and was {late} late at most."
    return words
