"""Write the numbers of the pages that come from records: python -m tools.recorded. `make docs` checks them.

A comment behind a number says where it comes from:

    0.897<!-- gpt-fragments: every=2 -->                docs/results/gpt-fragments: the mean over seeds
    0.008<!-- gpt-fragments: every=2 lr -->             another of the FIELDS
    0.909<!-- gpt-fragments: every=2 lr=0.004 -->       the loss when learning rates were searched
    0.017<!-- gpt-fragments: every=2 - gpt: dense -->   the difference of two; "/" divides;
                                                        of one run, "gpt: demo - dense"

A colon follows the run, then as many words of a method as tell its row from others. The page keeps its number
of decimals. A row of a table whose first cell ends in "<!-- row: ... -->" is written by its COLUMNS, and a
table behind "<!-- made: NAME -->" by `tools.tables`.

On the pages in CHECKED, a number that looks like a result needs such a comment, unless its paragraph says
"not recorded" or "run at commit ...", or it is one of the SETTINGS.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator
from difflib import unified_diff

from tools import tables
from tools.records import ROOT, Row, received_bytes, row_of

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
CHECKED = ("README", "which-method", "transformers", "returned", "imputation")

FIELDS: dict[str, Callable[[Row], float]] = {
    "mean": lambda row: row["mean"],
    "std": lambda row: row["std"],
    "lr": lambda row: row["lr"],
    "density": lambda row: row["density"],
    "payload": lambda row: row["payload_bytes_per_step"],
    "received": lambda row: received_bytes(row) or math.nan,
    "less": lambda row: row.get("bfloat16_ring_over_received") or math.nan,
    "ring": lambda row: (received_bytes(row) or math.nan) / 2,  # of dense: one of bfloat16
}
COLUMNS = {
    "lr": "{lr:g}",
    "payload per local step": "{payload:,.0f}",
    "received per local step": "{received:,.0f}",
    "test loss, nats per character": "{mean:.3f} ± {std:.3f}",
    "behind dense": "{behind:.3f}",
    "from dense AdamW": "{behind:+.3f}",
    "difference": "{behind:+.3f}",
}
SETTINGS = {  # why it is no result: what is then not looked at
    "a version": r"\b(?:Python|torch) \d\.\d+|Apache-2\.0",
    "learning rates": r"\((?:0\.\d+(?:, | and )?){3,}\)|\b(?:searched|lr) (?:[\d.]+(?:, |; | and | to )?)+",
    "of Muon": r"\(momentum 0\.95",
    "of an optimizer": r"betas 0\.9 and 0\.95|weight decay 0\.1|down to 10 %|\(0\.[79]\)",
    "rho": r"rho = [\d.]+|0 and 0\.5 were|up to 0\.\d+ with",
    "a budget": r"1/100\b|1/500\b|1/5000\b|1/50\b|0\.008 bytes per parameter|0\.1 % of gradients|0\.02 J",
    "a density": r"density 0\.\d+|0\.016 to 0\.031",
    "a formula": r"1/P\b|1/16 of float32's ring|of 4 bytes in float32|4 or 8 bytes|16 bytes of sizes|95 %",
    "a size or a target": r"24 MB of torch's|\b(?:4\.8|0\.12) M\b|a loss of 2\.6",
    "benchmarks/wire.py": r"about 1\.6 bytes, in float32 5\.1",
    "tools.check_records holds it": r"within 1\.2 points",
}
LOOKS = re.compile(
    r"(?<![\w./=])(?:\d[\d,]*\.\d+|1/\d+|\d[\d,]*(?= ?(?:%|nats\b|points\b|[kMG]B\b|bytes\b|times\b)))"
)
ADMITS = re.compile(r"not\s+recorded|run\s+at\s+commit")
HIDDEN = re.compile(  # blocks of code, tables that are made, code, links' targets and headings
    r"^```.*?^```$|<!-- made: .*?<!-- end -->|`[^`]*`|(?<=\])\([^)]*\)|^#.*?$", re.MULTILINE | re.DOTALL
)
ANCHORED = re.compile(r"(\d[\d,]*(?:\.\d+)?)(<!-- (?!row: )([\w/-]+: [^>]*?) -->)")
NAMED_ROW = re.compile(r"^(\|[^|\n]*<!-- row: ([^>]*?) --> \|)(.*)\|$", re.MULTILINE)


def value_of(source: str) -> float:
    """What a comment says: a field of a row, or the difference or quotient of two."""
    for sign in (" - ", " / "):
        if sign in source:
            own, other = source.split(sign)
            other = other if ": " in other else f"{own.partition(': ')[0]}: {other}"
            first, second = value_of(own), value_of(other)
            return first - second if sign == " - " else first / second
    run, _, rest = source.partition(": ")
    words, _, field = rest.partition(" ")
    row = row_of(run, words)
    if field.startswith("lr="):
        return float(row["tuning"][field[3:]])
    return FIELDS[field or "mean"](row)


def written(page: str) -> str:
    """The page with its numbers and tables as the records have them."""

    def number(found: re.Match[str]) -> str:
        num_decimals = len(found[1].partition(".")[2])
        comma = "," if "," in found[1] else ""
        return f"{value_of(found[3]):{comma}.{num_decimals}f}{found[2]}"

    return NAMED_ROW.sub(_row, ANCHORED.sub(number, tables.with_tables(page)))


def _row(found: re.Match[str]) -> str:
    """A row of a table, by the headings above it; what was bold stays so."""
    top = found.string[: found.start()].rpartition("\n\n")[2].splitlines()[0]
    headings = [cell.strip() for cell in top.split("|")[2:-1]]
    own, _, base = found[2].partition(" - ")
    run, _, words = own.partition(": ")
    row = row_of(run, words)
    values = {name: field(row) for name, field in FIELDS.items()}
    values["behind"] = value_of(found[2]) if base else math.nan
    cells = []
    for heading, before in zip(headings, found[3].split("|"), strict=True):
        cell = COLUMNS[heading].format(**values).replace("+nan", "–").replace("nan", "–")
        cells.append(f" **{cell}** |" if "**" in before else f" {cell} |")
    return found[1] + "".join(cells)


def unnamed(page: str) -> Iterator[str]:
    """Numbers that look like results and come from nowhere, with what stands around them."""
    for block in re.split(r"\n\s*\n|\n(?=\s*- )", HIDDEN.sub("`", page)):
        if ADMITS.search(block):
            continue
        open_text = re.sub(r"(?:1/)?" + ANCHORED.pattern, "", NAMED_ROW.sub("", block))
        text = re.sub("|".join(SETTINGS.values()), "", " ".join(re.sub("<!--.*?-->", "", open_text).split()))
        for found in LOOKS.finditer(text):
            yield f"{found[0]} in {text[max(0, found.start() - 40) : found.end() + 40]!r}"


def problems() -> Iterator[str]:
    """What the pages say that the records do not."""
    for path in PAGES:
        name, page = path.relative_to(ROOT), path.read_text("utf-8")
        for line in unified_diff(page.splitlines(), written(page).splitlines(), n=0, lineterm=""):
            if re.match(r"[+-](?![+-]{2} $)", line):
                yield f"{name}, after python -m tools.recorded: {line}"
        if path.stem in CHECKED:
            for number in unnamed(page):
                yield f"{name} has a number without a record: {number}"


def main() -> int:
    """Write the pages anew, and say which numbers come from nowhere."""
    for path in PAGES:
        page = path.read_text("utf-8")
        path.write_text(written(page), encoding="utf-8")
    found = list(problems())
    print("\n".join(found) or f"{len(PAGES)} pages say what was recorded")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
