"""Write docs/algorithms.md from the table of algorithms: python tools/catalogue.py.

Nothing about an algorithm is written down a second time. Its class docstring has the words, and a small
cluster is asked what the algorithm sends and keeps.
"""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regtopk.algorithms import ALGORITHMS
from regtopk.core import Algorithm, Layout, Request, Worker, converse
from regtopk.simulate.driver import SimulatedDriver

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"
NUM_WORKERS, LAYER, NUM_LAYERS, DENSITY = 8, 100, 10, 0.001
USE = "Use it for: "
PAGE_NAME, LINK = re.compile(r"docs/([\w-]+\.md)"), r"[\1](\1)"  # pages that docstrings name
NOTES = re.compile("(Differs from|Checked against).*", re.DOTALL)  # the end of a class docstring


class Facts(NamedTuple):
    """What a small cluster of the algorithm showed."""

    requests: list[str]
    num_rounds: int
    payload_bytes: float
    fields: dict[str, str]


def ask(algorithm: Algorithm[Any]) -> Facts:
    """Run one step on random gradients, and look at what is asked, sent and kept."""
    layout = Layout.of_shapes((f"layer{i}", (LAYER, LAYER), "linear") for i in range(NUM_LAYERS))
    worker = Worker(
        weight=torch.full((NUM_WORKERS, 1), 1 / NUM_WORKERS),
        index=torch.arange(NUM_WORKERS).unsqueeze(-1),
        num_workers=NUM_WORKERS,
        step=0,
        layout=layout,
        batch_shape=(NUM_WORKERS,),
    )
    driver = SimulatedDriver(worker)
    requests: list[str] = []

    def answer(request: Request) -> Any:
        requests.append(type(request).__name__)
        return driver.answer(request)

    grads = torch.randn(NUM_WORKERS, layout.numel, generator=torch.Generator().manual_seed(0))
    state = algorithm.init(worker)
    converse(algorithm.exchange(grads, state, worker), answer)
    payload = float(driver.traffic.payload_bytes.double().mean())
    return Facts(requests, driver.num_rounds, payload, dict(state.rules()))


def use_of(kind: type[Algorithm[Any]]) -> str:
    """What the class docstring says after "Use it for: ", without the full stop."""
    for paragraph in inspect.cleandoc(kind.__doc__ or "").split("\n\n"):
        if paragraph.startswith(USE):
            return " ".join(paragraph.removeprefix(USE).split()).removesuffix(".")
    raise ValueError(f"the docstring of {kind.__name__} must have a paragraph '{USE}...'")


def describe(name: str) -> str:
    """One algorithm's section."""
    kind = ALGORITHMS[name]
    has_density = any(field.name == "density" for field in fields(kind))
    algorithm = kind(**({"density": DENSITY} if has_density else {}))
    facts = ask(algorithm)
    summary, _, rest = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
    equations, _, after = rest.partition("\n\nArgs:\n")
    equations = "\n\n".join(part for part in equations.split("\n\n") if not part.startswith(USE))
    found = NOTES.search(after)
    notes = found[0].split("\n\n") if found else []
    kept = ", ".join(f"{field} ({rule.replace('_', ' ')})" for field, rule in facts.fields.items())
    promised = ", ".join(sorted(algorithm.promises)).replace("_", " ")
    return "\n".join(
        [
            f"## {name}",
            "",
            f"{summary} Class `{kind.__name__}`.",
            "",
            "```text",
            equations,
            "```",
            "",
            f"- **Sends**: {' then '.join(facts.requests)}; rounds of messages: {facts.num_rounds}; "
            f"{facts.payload_bytes:,.0f} bytes per worker in the first step of the cluster above.",
            f"- **Keeps**: {kept or 'nothing'}.",
            f"- **Promises**: {promised or 'nothing'}.",
            f"- **Use it for**: {use_of(kind)}.",
            *(f"- {PAGE_NAME.sub(LINK, ' '.join(note.split()))}" for note in notes),
            "",
        ]
    )


def catalogue() -> str:
    """The whole page."""
    numel = NUM_LAYERS * LAYER * LAYER
    head = f"""# Algorithms

Every class is importable from `regtopk`: `regtopk.attach(model, regtopk.DGC(density=0.001))`.
[which-method.md](which-method.md) says which to try first, and
[add-an-algorithm.md](add-an-algorithm.md) how to write one.

How to read the sections:

- *Sends* counts the bytes of one step on random gradients, frames included: N = {NUM_WORKERS} workers,
  J = {numel:,} entries in {NUM_LAYERS} matrices, density {DENSITY:g} where there is one, default options.
- *Keeps* names the state. When the number of ranks changes, a *weighted sum* is conserved, a *reset* field
  starts anew, and a *shared* one, which is the same on all ranks, is copied.
- *Promises* are those of the default options; other options may break one.

`python tools/catalogue.py` writes this page from the classes, and a test holds that it is up to date.
PowerSGD and fp16 are not here: torch ships them as hooks, and the benchmarks measure those.

"""
    index = "".join(f"- [{name}](#{name}): {use_of(kind)}\n" for name, kind in ALGORITHMS.items())
    return head + index + "\n" + "\n".join(describe(name) for name in ALGORITHMS)


if __name__ == "__main__":
    PAGE.write_text(catalogue(), encoding="utf-8")
