"""Check the pages of the documentation; `make docs` runs it: python -m tools.check_pages.

The index names every page, the reference every public name, and links lead somewhere. A link to a Python file
whose text is a name, such as [`TopK`](../src/regtopk/algorithms/topk.py), finds that name in the file. The
pages that are made from the code or from records are up to date.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import mean, stdev

import regtopk
from tools import catalogue, notebook, recorded

ROOT = Path(__file__).parents[1]
INDEX, REFERENCE = ROOT / "docs" / "README.md", ROOT / "docs" / "api.md"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*/*.md"), notebook.TUTORIAL]
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
IN_THE_TEXT = {
    "recipes",
    "__version__",
    "ALGORITHMS",
    "RegtopkError",
}  # without an entry of their own


def text_of(page: Path) -> str:
    """A page without its blocks of code, which may hold what looks like headings and links."""
    text = page.read_text(encoding="utf-8")
    return CODE.sub("", notebook.as_markdown(text) if page == notebook.TUTORIAL else text)


def anchors_of(page: Path) -> set[str]:
    """The names that GitHub and the site give to headings: in lower case, without signs, with hyphens."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    names = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    before = [names[:place].count(name) for place, name in enumerate(names)]
    return {f"{name}-{count}" if count else name for name, count in zip(names, before, strict=True)}


def broken_links(page: Path) -> Iterator[str]:
    """Relative links whose file or heading does not exist."""
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", text_of(page)):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        if not linked.exists() or (anchor and anchor not in anchors_of(linked)):
            yield target


@cache
def names_in(file: Path) -> set[str]:
    """What a Python file defines: classes, functions and constants; methods and fields as `Class.name`."""
    names: set[str] = set()

    def add(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    add(ast.parse(file.read_text(encoding="utf-8")).body, "")
    return names


def unknown_names(page: Path) -> Iterator[str]:
    """Links whose text is a name that their Python file does not define."""
    for name, target in re.findall(r"\[`([\w.]+)`\]\(([^)\s]+\.py)\)", text_of(page)):
        file = page.parent / target
        if not name.endswith(".py") and file.exists() and name not in names_in(file):
            yield f"{name} in {target}"


def federated_rows() -> Iterator[str]:
    """How docs/federated.md must show the accuracies that were recorded."""
    results = ROOT / "benchmarks" / "results"
    runs = json.loads((results / "federated.json").read_text(encoding="utf-8"))["claiming"]
    for method in {run["method"] for run in runs}:
        found = [run["test"] for run in runs if run["method"] == method]
        lr = next(run["lr"] for run in runs if run["method"] == method)
        extent = f"{min(found):.1f} to {max(found):.1f}"
        yield f"| {method} | {lr} | {mean(found):.1f} ± {stdev(found):.1f} ({extent}) |"
    for num_rounds in (28, 6):
        file = results / f"federated-fedavg-{num_rounds}-rounds.json"
        found = [run["test"] for run in json.loads(file.read_text(encoding="utf-8"))["claiming"]]
        yield f"| {mean(found):.1f} ± {stdev(found):.1f} in {num_rounds} rounds |"


def problems() -> Iterator[str]:
    """What is wrong, one sentence each."""
    for page in PAGES:
        for target in broken_links(page):
            yield f"{page.relative_to(ROOT)}: the link {target} leads nowhere"
        for name in unknown_names(page):
            yield f"{page.relative_to(ROOT)}: there is no {name}"
    linked = {
        (INDEX.parent / path).resolve()
        for path in re.findall(r"\]\(([\w/.-]+\.(?:md|ipynb))\)", text_of(INDEX))
    }
    for page in sorted(set(PAGES) - {INDEX} - linked):
        yield f"docs/README.md does not name {page.relative_to(ROOT)}"
    shown = set(
        re.findall(r":: (?:regtopk\.)?(?:algorithms\.)?(\w+)$", REFERENCE.read_text("utf-8"), re.MULTILINE)
    )
    for name in sorted(set(regtopk.__all__) - IN_THE_TEXT - shown):
        yield f"docs/api.md does not name {name}"
    if catalogue.PAGE.read_text(encoding="utf-8") != catalogue.catalogue():
        yield "docs/algorithms.md is not that of the classes: run python tools/catalogue.py"
    federated = (ROOT / "docs" / "federated.md").read_text(encoding="utf-8")
    for row in federated_rows():
        if row not in federated:
            yield f"docs/federated.md lacks what was recorded: {row}"
    yield from recorded.problems()


if __name__ == "__main__":
    found = list(problems())
    print("\n".join(found) or f"{len(PAGES)} pages are in order")
    sys.exit(bool(found))
