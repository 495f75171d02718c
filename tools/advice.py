"""Tables of advice, on README and docs/which-method.md: what to use, and what the record of a line says."""

from collections.abc import Sequence
from typing import NamedTuple

from regtopk.core.options import counted
from regtopk.lab.runs.reading import read_records
from tools.records import ROOT, Row, line_of, planned_bytes, received_bytes, row_of

ENWIK8, SOURCES, CIFAR = "GPT, enwik8", "GPT, torch's sources", "ResNet-18, CIFAR-10"


class Line(NamedTuple):
    """Who trains what with what, and the record that says what came of it."""

    trained: str
    use: str
    network: str
    run: str
    words: str
    beside: dict[str, str]  # what else ended where: words of the same run, or "run: words"; dense first


def _beside(muon: str, adamw: str) -> dict[str, str]:
    return {"dense Muon": muon, "dense AdamW": adamw}


SIGNS = '`TopK(density=0.24, value_code="sign", returned=0.3)`, `every=8, fragments=8`, and more'
MULOCO = 'MuLoCo: `Dense(value_code="2bit", sum_code="2bit")`, `every=16`, and more'
IMPUTED = '`TopK(density=0.01, value_code="4bit", impute=0.35)`, `every=2, fragments=2`'
CONSENSUS = '`Consensus(density=0.01, value_code="4bit")`'
DGC = '`DGC(density=0.005, value_code="4bit")`, SGD without momentum'
PICKED = _beside("dense:optimizer=muon", "dense:weight_decay=0|0.1")
ALIKE = _beside("dense:optimizer=muon", "dense:weight_decay=0.1")
OF_ADAMW = {"dense AdamW": "gpt: dense"}
EVENLY = {"dense": "dense:value_code=float32:lr=0.1", "Top-k in as many bytes": "topk:lr=0.1"}
MUON = Line("a transformer with Muon", SIGNS, ENWIK8, "enwik8-8", "fragments=every:value_code=sign", PICKED)
LATENCY = Line(
    "the same over a link with latency", MULOCO, ENWIK8, "enwik8-8", "every=16|32:value_code=2bit", PICKED
)
ADVICE = [
    MUON,
    LATENCY,
    Line("a transformer with AdamW", IMPUTED, SOURCES, "gpt-fragments", "every=2", OF_ADAMW),
    Line("with SGD, data spread evenly", CONSENSUS, CIFAR, "fig3-paper-bytes", "consensus:lr=0.1", EVENLY),
    Line(
        "with SGD, workers with different data", CONSENSUS, f"{CIFAR}, few classes each",
        "fig3-non-iid-bytes", "consensus",
        {"dense": "dense:value_code=float32:lr=0.1", "Top-k in as many bytes": "topk"},
    ),
    Line(
        "with SGD and momentum, data spread evenly", DGC, CIFAR, "fig3-paper-bytes", "dgc:lr=0.1",
        {"dense without momentum": EVENLY["dense"]},
    ),
]  # fmt: skip
LRS = "lr=0.008|0.016|0.032"
WITH_MUON = [
    Line(
        "", "", ENWIK8, "files/iid", "value_code=sign",
        _beside(f"dense:optimizer=muon:{LRS}", f"dense:{LRS}"),
    ),
    MUON,
    Line("", "", f"{ENWIK8}, other text on each worker", "enwik8-8-sorted", "value_code=sign", ALIKE),
    Line("", "", ENWIK8, "muloco-16", "value_code=sign", ALIKE),
    Line("", "", ENWIK8, "enwik8-32", "value_code=sign", ALIKE),
    Line(
        "", "", f"{ENWIK8} in GPT-2's tokens", "gpt2-12x768", "value_code=sign:beta2=0.99|0.998",
        _beside("dense:optimizer=muon:beta2=0.95|0.99", "dense:weight_decay=0.1:beta2=0.95|0.99"),
    ),
    LATENCY._replace(network=f"MuLoCo: {ENWIK8}"),
]  # fmt: skip
BYTES = "received per step, of a ring"


def advice_table() -> str:
    """What to use."""
    heads = ["you train", "use", "network, parameters", "ends at", "beside", BYTES]
    return _table(heads, [[line.trained, line.use, *_cells(line)] for line in ADVICE])


def muon_table() -> str:
    """What came of our advice with Muon."""
    heads = ["network, parameters", "ends at", *PICKED, BYTES]
    return _table(heads, [_cells(line, has_columns=True) for line in WITH_MUON])


def sgd_table() -> str:
    """What came of our advice with SGD."""
    heads = ["", "network, parameters", "ends at", "beside", BYTES]
    return _table(heads, [[line.trained, *_cells(line)] for line in ADVICE[3:]])


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(map(line_of, (heads, ["---"] * len(heads), *rows))) + "\n"


def _cells(line: Line, *, has_columns: bool = False) -> list[str]:
    """The network, the end, what stands beside it, in one cell or each in its column, and the bytes."""
    row, records = row_of(line.run, line.words), read_records(ROOT / "docs" / "results" / line.run)
    found = [words.split(": ") if ": " in words else (line.run, words) for words in line.beside.values()]
    others = dict(zip(line.beside, (row_of(*each) for each in found), strict=True))
    num_steps, num_workers = max(record["step"] for record in records), row["num_workers"]
    dense = received_bytes(next(iter(others.values())))  # by a ring all_reduce of float32
    assert dense is not None
    numel = round(dense * num_workers / (num_workers - 1) / 8)
    received = received_bytes(row) or planned_bytes(row["method"], num_workers, numel, row["density"])
    unit, num_seeds = "%" if line.network.startswith(CIFAR) else "nats", len(row["seeds"])
    ends = {name: _end(other, unit) + _seeds(other, num_seeds) for name, other in others.items()}
    size = f"{received / 1e6:.1f} MB" if received > 1e6 else f"{received / 1e3:.3g} kB"
    millions = f"{numel / 1e6:.0f}" if numel > 1e7 else f"{numel / 1e6:.2g}"
    return [
        f"{line.network}, {millions} M; {num_workers} workers, {num_steps:,} steps",
        f"**{_end(row, unit)}** {unit}, {num_seeds} seeds",
        *(ends.values() if has_columns else [", ".join(map(" ".join, ends.items()))]),
        f"{size}, 1/{dense / 2 / received:.0f}",
    ]


def _seeds(row: Row, num_usual: int) -> str:
    return "" if len(row["seeds"]) == num_usual else f" ({counted(len(row['seeds']), 'seed')})"


def _end(row: Row, unit: str) -> str:
    """The mean over seeds, and how far they spread."""
    digits = 1 if unit == "%" else 3
    spread = "" if row["std"] is None else f" ± {row['std']:.{digits}f}"
    return f"{row['mean']:.{digits}f}{spread}"
