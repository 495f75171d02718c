"""The table of methods on a real text, one command per table: ours and its peers, searched alike.

    regtopk fetch enwik8
    python -m benchmarks.peers enwik8-8 --device cuda --out out/enwik8-8

runs `regtopk compare gpt` with the rows of a table (docs/comparisons.md), and prints that command first. What
stands behind the table's name is handed on. Started again, it goes on where it was stopped. `--rows A,B` runs
some rows alone, and `--dry-run` none. `--at-once 4` runs four rows side by side, each in a process and a
folder of its own, and then puts what has finished into the table's folder: one starts while others train.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import NamedTuple

from regtopk.lab.experiments.compare.search import SEARCH
from regtopk.lab.runs import CONFIG, RunWriter, read_header, read_object, read_records, write_json

SEARCH_RUNS = 10  # of every row
LR = "0.001,0.002,0.004,0.008,0.016"  # of rows that name none
PICKED = Path(__file__).parents[1] / "docs" / "results" / "enwik8-8"
UPDATES, BF16 = "exchange=updates", ":value_code=bfloat16:sum_code=bfloat16"
LOCO = f"dense:{UPDATES}:every={{}}:outer=nesterov:outer_lr=0.5|0.7|1:outer_momentum=0|0.5|0.9"
MULOCO = (
    f"dense:{UPDATES}:every={{}}:outer=nesterov:optimizer=muon:"
    "outer_lr=0.5|0.7|0.9|1:outer_momentum=0|0.6|0.8"
)
OURS = f"{UPDATES}:optimizer=muon"
LMO = "ef21:value_code=4bit:eta=0.05|0.1|0.3:optimizer=lmo:weight_decay=0|0.1"
DEMO_LR = "lr=0.00025|0.0005|0.001|0.002|0.004"


class Row(NamedTuple):
    """A method with what is searched, and what its authors use."""

    words: str
    authors: str = "–"


ROWS = {
    "dense AdamW": Row("dense:weight_decay=0|0.1"),
    "dense Muon": Row("dense:optimizer=muon:weight_decay=0.01|0.1"),
    "ours": Row(
        f"topk:value_code=2bit:{OURS}:every=8|4:fragments=every:outer=nesterov:outer_lr=0.9:"
        "impute=0.05|0.1|0.15:outer_momentum=0.1|0.2|0.4"
    ),
    "ours with returned": Row(
        f"topk:value_code=sign:index_code=rice:{OURS}:fragments=every:outer=nesterov:every=8:"
        "outer_lr=0.7|0.9|1:returned=0.25|0.3|0.35:outer_momentum=0.1|0.2|0.3"
    ),
    "ours with returned in 2 bits": Row(
        f"topk:value_code=2bit:{OURS}:fragments=every:outer=nesterov:every=8:outer_lr=0.7|0.9|1:"
        "returned=0.15|0.2|0.25:outer_momentum=0.2|0.3|0.4"
    ),
    "ours with returned in one piece": Row(  # for links with latency: no fragments
        f"topk:value_code=sign:index_code=rice:{OURS}:outer=nesterov:every=8|16:outer_lr=0.7|0.9:"
        "returned=0.25|0.3:outer_momentum=0.2|0.4"
    ),
    "DiLoCo": Row(LOCO.format("8|16|32") + BF16, "0.7, 0.9; every 30 to 500"),
    "MuLoCo": Row(MULOCO.format("8|16|32") + BF16, "0.7 to 0.9; 0.6 for one worker, 0.8 for 8; every=30"),
    "DiLoCo in 4 bits": Row(f"{LOCO.format('32|64')}:value_code=4bit:sum_code=4bit"),
    "MuLoCo in 4 bits": Row(
        f"{MULOCO.format('32|64')}:value_code=4bit:sum_code=4bit", "4 bits, residual times 0.9"
    ),
    "MuLoCo in 2 bits": Row(f"{MULOCO.format('16|32')}:value_code=2bit:sum_code=2bit", "2 bits lose more"),
    "streaming MuLoCo in 4 bits": Row(
        f"{MULOCO.format('32|64')}:fragments=every:value_code=4bit:sum_code=4bit", "Streaming DiLoCo: AdamW"
    ),
    "streaming MuLoCo in 2 bits": Row(
        f"{MULOCO.format('16|32')}:fragments=every:value_code=2bit:sum_code=2bit", "Streaming DiLoCo: 4 bits"
    ),
    "ours with returned and delay": Row(
        f"topk:value_code=sign:index_code=rice:{OURS}:fragments=every:outer=nesterov:every=8:delay=4:mix=0.5|1:"
        "outer_lr=0.7|0.9:returned=0.25|0.3:outer_momentum=0|0.2"
    ),
    "streaming MuLoCo in 2 bits and delay": Row(
        f"{MULOCO.format('16|32')}:fragments=every:delay=4:mix=0.5|1:value_code=2bit:sum_code=2bit",
        "Streaming DiLoCo: delay < 5, mix=0.5",
    ),
    "SparseLoCo": Row(
        f"sparseloco:value_code=2bit:{UPDATES}:every=2|4|8|16:optimizer=muon|adamw:decay=0.9|0.95|1",
        "AdamW, every=15, decay=0.95, 2 bits",
    ),
    "SparseLoCo as published": Row(
        f"sparseloco:density=0.03125:{UPDATES}:every=8|16|32:decay=0.9|0.95|1", "128 or 64 of 4,096"
    ),
    "DeMo": Row(
        f"demo:value_code=4bit:decay=0.99|0.995|0.999:optimizer=sgdw:weight_decay=0|0.1:{DEMO_LR}",
        "0.999, no weight decay",
    ),
    "DeMo as published": Row(
        f"demo:density=0.0078125:decay=0.99|0.995|0.999:optimizer=sgdw:weight_decay=0:{DEMO_LR}",
        "32 of 4,096, lr=0.0004",
    ),
    "EF21-Muon": Row(LMO, "equations without weight decay"),
    "EF21-Muon both ways": Row(f"{LMO}:returned=0.0025|0.005|0.01", "another way back"),
    "PowerSGD of rank 1": Row("powersgd:rank=1:value_code=bfloat16:optimizer=adamw|muon:weight_decay=0|0.1"),
}  # fmt: skip
ADVISED = {  # by docs/which-method.md, beside ours with returned: the learning rate alone is searched
    "advised with AdamW": Row(
        f"topk:value_code=4bit:{UPDATES}:every=2:fragments=every:density=0.01:impute=0.35"
    ),
}
BODIES = ("dense AdamW", "dense Muon", "DiLoCo", "MuLoCo", "ours with returned")
LARGE = ("dense AdamW", "dense Muon", "ours with returned", "streaming MuLoCo in 2 bits")


class Table(NamedTuple):
    """Rows that are run alike, on enwik8."""

    received_bytes: int  # per worker and step, of rows whose density is open: 1/100 of a ring, or 1/400
    options: str
    rows: tuple[str, ...] = tuple(ROWS)
    # times the lr that was picked for enwik8-8, with all else that was picked there; none: a search
    lr_shares: tuple[float, ...] = ()
    instead: Mapping[str, Mapping[str, float | str]] = {}  # of what was picked there, by row
    seeds: str = "1-3"
    search_runs: int = SEARCH_RUNS  # at most, of every row
    num_evaluations: int = 6  # of every run
    dense_is_alike: bool = False  # one global batch: dense rows keep the lr that was picked for enwik8-8


KINDS = ("dense", "ours", "DiLoCo", "SparseLoCo", "MuLoCo", "streaming MuLoCo")
FOR_LATENCY = ("in one piece", "and delay")
NEAR = tuple(name for name in ROWS if name.startswith(KINDS) and not name.endswith(FOR_LATENCY))
ROUNDS_OF_30 = {"DiLoCo": {"every": 30}, "MuLoCo": {"every": 30}}
FEW = {"ours": {}, "ours with returned": {"returned": 0.03}, "SparseLoCo": {}} | {
    name: {"every": 64} for name in ("MuLoCo in 2 bits", "streaming MuLoCo in 2 bits")
}
# the mean of more workers is less noisy, and smaller: the outer step may be longer
OUTER = {"outer_lr": "0.7|0.9|1.2"}
MANY = {
    "dense AdamW": {},
    "dense Muon": {},
    "ours with returned": OUTER | {"outer_momentum": "0.2|0.4|0.6"},
    "streaming MuLoCo in 2 bits": OUTER | {"outer_momentum": "0.4|0.6|0.8"},
    "MuLoCo in 2 bits": OUTER | {"outer_momentum": "0.4|0.6|0.8"},  # in one piece, for links with latency
    "SparseLoCo": {"every": "4|8|16", "decay": "0.9|0.95|1"},
}
SIZES = ("dense AdamW", "dense Muon", "ours with returned", *ADVISED)
SHARES = (0.5, 1, 2, 4, 8)  # of a learning rate: small networks take longer steps
GPT2 = "--tokens gpt2 --set num_layers=12 --set width=768 --set context=256 --set batch_size=8 --steps 384"
# rare tokens: Adam's second moments on a worker need a longer memory than those of dense training
BETAS = {name: {"beta2": "0.95|0.99" if name.startswith("dense") else "0.99|0.998"} for name in LARGE}
TABLES = {
    "enwik8-8": Table(168_000, "--tokens bytes"),
    "enwik8-8-again": Table(168_000, "--tokens bytes", NEAR, lr_shares=(1,), seeds="4-6"),
    "enwik8-8-beta2": Table(168_000, "--tokens bytes", LARGE, (1,), BETAS, seeds="4-6"),
    "enwik8-8-few": Table(42_000, "--tokens bytes", tuple(FEW), (0.5, 1), FEW),
    "enwik8-8-sorted": Table(168_000, "--tokens bytes --split sorted", LARGE, lr_shares=(1,)),
    "enwik8-32": Table(
        186_000,
        "--tokens bytes --workers 32 --set batch_size=4",
        tuple(MANY),
        (0.5, 1, 2),
        MANY,
        search_runs=5,
        dense_is_alike=True,
    ),
    "enwik8-8-advised": Table(168_000, "--tokens bytes", tuple(ADVISED)),
    "enwik8-8-2x64": Table(4_300, "--tokens bytes --set num_layers=2 --set width=64", SIZES, SHARES),
    "enwik8-8-4x128": Table(29_400, "--tokens bytes --set num_layers=4 --set width=128", SIZES, SHARES),
    "gpt2-12x768": Table(4_330_000, GPT2, LARGE, (0.5, 1), BETAS, search_runs=3, num_evaluations=2),
    "muloco-16": Table(
        180_000,
        "--tokens bytes --workers 16 --set batch_size=8 --steps 1560",
        BODIES,
        (0.5, 1, 2),
        ROUNDS_OF_30,
        dense_is_alike=True,
    ),
}


def words_for(table: Table, name: str, folder: Path = PICKED) -> str:
    """A row's words: all that is searched, or what was picked in a recorded table, with learning rates."""
    words = (ROWS | ADVISED)[name].words
    if not table.lr_shares or name in ADVISED:
        return words
    found = [record["search"]["picked"] for record in read_records(folder) if record["method"] == words]
    if not found:
        raise SystemExit(f"rows of this table must be recorded in {folder} first, which has no {name}")
    picked = found[-1] | table.instead.get(name, {})
    is_alike = table.dense_is_alike and name.startswith("dense")
    lrs = [f"{share * float(picked['lr']):g}" for share in ((1,) if is_alike else table.lr_shares)]
    algorithm, *options = words.split(":")
    kept = dict(option.split("=") for option in options) | picked | {"lr": "|".join(lrs)}
    return ":".join([algorithm, *(f"{key}={value}" for key, value in kept.items())])


def command_of(table: Table, names: Sequence[str], more: Sequence[str]) -> list[str]:
    """The comparison that runs some rows of a table."""
    rows = ",".join(words_for(table, name) for name in names)
    fixed = f"--data enwik8 --seeds {table.seeds} --lr {LR} --search-runs {table.search_runs} --resume"
    fixed += f" --set num_evaluations={table.num_evaluations} --set precision=bfloat16"
    fixed += f" --received-bytes-per-step {table.received_bytes} {table.options}"
    return ["compare", "gpt", *fixed.split(), "--algorithms", rows, *more]


def run(command: Sequence[str], log: Path | None = None) -> int:
    """A command of `regtopk`, printed first. What it says goes to a file if one is named."""
    print(shlex.join(["regtopk", *command]), flush=True)
    arguments = [sys.executable, "-m", "regtopk", *command]
    if log is None:
        return subprocess.run(arguments).returncode
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        return subprocess.run(arguments, stdout=file, stderr=subprocess.STDOUT).returncode


def run_side_by_side(
    table: Table, names: Sequence[str], out: Path, more: Sequence[str], *, at_once: int
) -> int:
    """Each row into a folder below `out`, then one folder of all that have finished.

    What `out` holds already is taken over.
    """
    places = {name: out / "rows" / name.replace(" ", "-") for name in names}
    for place in places.values():
        if (out / CONFIG).exists() and not place.exists():
            copytree(out, place, ignore=ignore_patterns("rows"))

    def run_row(name: str) -> int:
        command = command_of(table, [name], [*more, "--out", str(places[name])])
        return run(command, places[name].with_suffix(".log"))

    with ThreadPoolExecutor(at_once) as pool:
        codes = dict(zip(names, pool.map(run_row, names), strict=True))
    for name in (failed := [name for name in names if codes[name]]):
        print(f"{name} ended with {codes[name]}: {places[name].with_suffix('.log')}", file=sys.stderr)
    finished = [name for name in names if not codes[name]]
    if not finished:
        return 1
    gather([places[name] for name in finished], out)
    return run(command_of(table, finished, [*more, "--out", str(out)])) or bool(failed)


def gather(rows: Sequence[Path], out: Path) -> None:
    """Add the records and searches of several folders to one, which then can be resumed."""
    folders = [folder for folder in (out, *rows) if (folder / CONFIG).exists()]
    records = {
        (record["method"], record["density"], record["seed"], record["step"]): record
        for folder in folders
        for record in read_records(folder)
    }
    searches = [folder / SEARCH for folder in folders if (folder / SEARCH).exists()]
    searched = {key: run for path in searches for key, run in read_object(path).items()}
    with RunWriter(out, read_header(folders[0]), force=True) as writer:
        for record in records.values():
            writer.add(record)
    write_json(out / SEARCH, searched)


def main() -> int:
    """Run a table, or some of its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--rows", help="some of them, with commas between")
    parser.add_argument("--dry-run", action="store_true", help="print the command alone")
    parser.add_argument("--at-once", type=int, default=1, help="how many rows run side by side")
    parser.add_argument("--out", type=Path, help="where the table is kept; out/TABLE if not given")
    given, more = parser.parse_known_args()
    table, out = TABLES[given.table], given.out or Path("out") / given.table
    names = tuple(given.rows.split(",")) if given.rows else table.rows
    if unknown := set(names) - set(table.rows):
        parser.error(f"rows must be of {', '.join(table.rows)}, got {', '.join(sorted(unknown))}")
    if given.at_once > 1 and not given.dry_run:
        return run_side_by_side(table, names, out, more, at_once=given.at_once)
    command = command_of(table, names, [*more, "--out", str(out)])
    if given.dry_run:
        print(shlex.join(["regtopk", *command]))
        return 0
    return run(command)


if __name__ == "__main__":
    sys.exit(main())
