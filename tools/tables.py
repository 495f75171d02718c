"""Tables of pages that are made from recorded runs, or counted: `tools.recorded` writes them.

A table stands between "<!-- made: NAME -->" and "<!-- end -->". NAME is one of OTHERS or a run in
docs/results, of which "NAME 5" has the first five rows. Of the learning rates that a method ran with, a table
has the best.
"""

import json
import re
from collections.abc import Callable
from math import isfinite
from typing import Any

from benchmarks import peers
from benchmarks.slow_network.gpt_picked import read_picked
from regtopk.core.traffic import all_reduce_bytes
from regtopk.lab.plan.methods import words_of
from regtopk.recipes import transformer
from tools import advice
from tools.records import ROOT, line_of, planned_bytes

RACE = ROOT / "benchmarks/results/slow-network-gpt-race.json"
BLOCK = re.compile(r"(<!-- made: ([\w-]+) ?(\d*) -->\n).*?<!-- end -->", re.DOTALL)
NUMEL = 124_000_000  # of the model whose bytes are counted
DENSE = "dense Muon"  # whose losses are raced to
UPDATES = "exchange=updates"
EDGE = "at the grid's edge"
COUNTED = {  # as the page calls it: a method
    "`TopK(density=0.01, impute=0.35)`, every=2": (
        f"topk:density=0.01:impute=0.35:{UPDATES}:every=2:fragments=2"
    ),
    "`TopK(density=0.24, returned=0.3)`, every=8": words_of(transformer(8)),
    "`Consensus(density=0.01)`": "consensus:density=0.01",
    "`DGC(density=0.005)`": "dgc:density=0.005",
}
IMPUTED = ("dense", "topk", *(f"topk:impute={rho}" for rho in ("0.2", "0.35", "0.5", "0.7", "1")))


def table_of(name: str, num_rows: int) -> str:
    """One row per method, best first: accuracy in percent, with its standard deviation over seeds."""
    rows = _table(name)
    base = "from base" if "from base" in rows[0] else "from Top-k"
    lines = [
        f"| method | lr | payload per step | accuracy | seeds | {base}, 95 % interval |",
        "|---|---:|---:|---:|---:|---|",
    ]
    shown = set()
    for row in sorted(rows, key=lambda row: -row["accuracy"]):
        method = re.sub(":lr=[^:]+", "", row["measure"])
        if method not in shown:
            shown.add(method)
            size, seeds = f"{row['payload per step']:,.0f}", row["seeds"]
            lines.append(line_of([f"`{method}`", row["lr"], size, _accuracy(row), seeds, _gain(row, base)]))
    return "\n".join(lines[: 2 + num_rows]) + "\n"


def losses_table(name: str, num_rows: int) -> str:
    """One row per method of a text, best first: what was picked, bytes received, and the loss."""
    table = peers.TABLES.get(name, peers.TABLES["enwik8-8"])
    names = {peers.words_for(table, called): called for called in table.rows}
    headings = [
        "row",
        "picked",
        "received per step",
        "bfloat16 ring / received",
        "bits per byte",
        "nats per token",
    ]
    lines = [line_of(headings), "|---|---|---:|---:|---:|---:|"]
    for row in sorted(_table(name), key=lambda row: row["test_loss"]):
        called, less = names.get(row["measure"], _fixed(row["measure"])), row["bfloat16 ring / received"]
        loss = f"{row['test_loss']:.4f}" + (f" ± {row['± std']:.4f}" if row["± std"] is not None else "")
        edge = f"; at the edge: {row[EDGE]}" if row[EDGE] else ""
        cells = (
            called,
            f"{row['picked']} ({row['search runs']} runs{edge})" if row["picked"] else "not searched",
            f"{row['received per step']:,.0f}",
        )
        lines.append(line_of([*cells, f"{less:.3g}", f"{row['bits per byte']:.3f}", loss]))
    return "\n".join(lines[: 2 + num_rows]) + "\n"


def imputation_table() -> str:
    """Accuracies with data spread evenly and sorted by label, for each rho."""
    iid, by_label = ({row["measure"]: row for row in _table(f"imputation/{s}")} for s in ("iid", "sorted"))
    headings = ["method", "accuracy, spread evenly", "sorted", "sorted, against Top-k (95 %)"]
    lines = [line_of(headings), "|---|---|---|---|"]
    for method in IMPUTED:
        interval = by_label[method]["95 % interval"] or "–"
        lines.append(line_of([method, _accuracy(iid[method]), _accuracy(by_label[method]), interval]))
    return "\n".join(lines) + "\n"


def bytes_table() -> str:
    """What a rank receives per step, as a part of a ring all_reduce of bfloat16."""
    lines = [line_of(["workers", "ring, bfloat16", *COUNTED]), f"|---:|---:{len(COUNTED) * '|---:'}|"]
    for num_workers in (2, 8, 32, 64, 512):
        ring = all_reduce_bytes(2 * NUMEL, num_workers)
        received = [planned_bytes(words, num_workers, NUMEL) for words in COUNTED.values()]
        parts = [f"1/{ring / each:.0f}" if ring > 1.5 * each else "1" for each in received]
        cells = [f"{_megabytes(each)}, {part}" for each, part in zip(received, parts, strict=True)]
        lines.append(line_of([num_workers, _megabytes(ring), *cells]))
    return "\n".join(lines) + "\n"


def peers_table() -> str:
    """What the rows of the comparison on a real text search, and what their authors use."""
    lines = [line_of(["row", "searched beside lr", "its authors' settings"]), "|---|---|---|"]
    for name, row in peers.ROWS.items():
        searched = [option for option in row.words.split(":") if "|" in option]
        lines.append(line_of([name, ", ".join(searched), row.authors]))
    return "\n".join(lines) + "\n"


def race_rows() -> dict[str, dict[str, Any]]:
    """What real ranks took on a slow link, by the names of the comparison's rows."""
    names = {row.words: name for name, row in peers.ROWS.items()}
    return {names[row["method"]]: row for row in json.loads(RACE.read_text(encoding="utf-8"))["race"]}


def race_table() -> str:
    """Real ranks on a slow link: the time to three losses, the soonest first, and what was planned."""
    settings, rows = json.loads(RACE.read_text(encoding="utf-8"))["settings"], race_rows()
    recorded = read_picked([ROOT / folder for folder in settings["picked"]])
    methods = {method.label: method for method in recorded.methods}
    targets = [recorded.target(peers.ROWS[DENSE].words, share) for share in (0.8, 0.85)]
    later = [f"to {target:.3f}" for target in targets]
    first = f"to {settings['target']:.3f}"
    lines = [line_of(["row", first, "sooner", *later, "planned"]), "|---|---:|---:|---:|---:|---:|"]
    for name in sorted(rows, key=lambda name: rows[name]["reached_s"]):
        row, seconds = rows[name], rows[name]["reached_s"]
        cells = [name, f"{seconds:,.0f} s", f"{rows[DENSE]['reached_s'] / seconds:.1f}"]
        for target in targets:
            needed = methods[row["method"]].steps_to(target, settings["seed"])
            cells.append(f"{row['step_s'] * needed:,.0f} s" if isfinite(needed) else "never")
        cells.append(f"{row['predicted_s'] / seconds - 1:+.0%}" if row["predicted_s"] else "–")
        lines.append(line_of(cells))
    return "\n".join(lines) + "\n"


def _fixed(words: str) -> str:
    """What is not searched of a method's words, with spaces, so that a narrow page can break the line."""
    return " ".join(option for option in words.split(":") if "|" not in option)


OTHERS: dict[str, Callable[[], str]] = {
    "advice": advice.advice_table,
    "advice-with-muon": advice.muon_table,
    "advice-with-sgd": advice.sgd_table,
    "imputation": imputation_table,
    "peers": peers_table,
    "race": race_table,
    "bytes": bytes_table,
}


def with_tables(page: str) -> str:
    """The page with its tables written anew; a page may have tables that others make."""

    def write(block: re.Match[str]) -> str:
        name, num_rows = block[2], int(block[3] or 100)
        if name in OTHERS:
            made = OTHERS[name]()
        elif (ROOT / "docs" / "results" / name).exists():
            made = (losses_table if "test_loss" in _table(name)[0] else table_of)(name, num_rows)
        else:
            return block[0]
        return f"{block[1]}\n{made}\n<!-- end -->"

    return BLOCK.sub(write, page)


def _table(run: str) -> list[dict[str, Any]]:
    file = ROOT / "docs" / "results" / run / "summary.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["table"]
    return rows


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.{1 if num_bytes < 1e7 else 0}f} MB"


def _accuracy(row: dict[str, Any]) -> str:
    spread = row.get("± std")
    return f"{row['accuracy']:.1f}" + (f" ± {spread:.1f}" if spread is not None else "")


def _gain(row: dict[str, Any], base: str) -> str:
    if row.get(base) is None:
        return "–"
    interval = row.get("95 % interval")
    return f"{row[base]:+.1f}" + (f" ({interval})" if interval else "")
