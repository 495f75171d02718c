"""docs/algorithms.md, made from the table: python -m regtopk.report.catalogue > docs/algorithms.md.

What an algorithm sends and keeps is not written down a second time: it is asked, on a small cluster.
"""

import inspect
import sys
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from regtopk.algorithms import ALGORITHMS
from regtopk.core.algorithm import Algorithm, converse
from regtopk.core.requests import Request
from regtopk.core.worker import Layout, Worker
from regtopk.simulate.driver import SimulatedDriver

NUM_WORKERS, LAYER, NUM_LAYERS, DENSITY = 8, 100, 10, 0.001

WHEN = {
    "dense": "the yardstick, and the right choice on a fast link",
    "topk": "the plain baseline of every comparison",
    "regtopk": "workers whose large entries cancel, at densities of about one half and more",
    "adaptive": "a byte budget or an error to hold, without knowing the density",
    "consensus": "workers whose data differ, at a small byte budget: first in our equal-bytes comparisons",
    "dgc": "data spread evenly, plain SGD, and momentum wanted",
    "ef21": "full or large batches that must converge exactly at small densities",
    "gtopk": "a comparison with what Ok-Topk and gTop-k send; it loses much where workers differ",
    "scalecom": "many workers whose gradients look alike",
    "fair-topk": "loss and time can be reported, and the best k is not known",
    "sketch": "many workers and few large entries of the aggregate",
    "mipd": "layers of very different importance",
    "chunked-topk": "rare exchanges of model differences (local steps), and selection within fixed chunks",
    "strom": "a historical baseline; tau must be tuned to the gradients",
    "dryden": "one bit a value, with the density given",
    "gradient-dropping": "a historical baseline with a sampled threshold",
    "adacomp": "a density that follows the gradients, with nothing to tune",
    "hard-threshold": "a fixed threshold for all of training, so a density that falls as gradients do",
    "sidco": "very long vectors where even a fast selection is too slow",
    "atomo": "unbiased estimates without a residual",
    "atomo-svd": "unbiased estimates of matrices of low rank",
    "randomk": "no index and no selection at all; good with low-bit values",
    "random-candidates": "cheap indices: selection within a shared random part of the vector",
    "global-topk": "the oracle, in the simulator: how much a better selection could gain",
}


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


def describe(name: str) -> str:
    """One algorithm's section."""
    has_density = any(field.name == "density" for field in fields(ALGORITHMS[name]))
    algorithm = ALGORITHMS[name](**({"density": DENSITY} if has_density else {}))
    facts = ask(algorithm)
    doc = inspect.cleandoc(type(algorithm).__doc__ or "")
    summary, _, rest = doc.partition("\n\n")
    equations, _, after = rest.partition("\n\nArgs:\n")
    differs = after[after.index("Differs from") :] if "Differs from" in after else ""
    kept = (
        ", ".join(f"{field} ({rule.replace('_', ' ')})" for field, rule in facts.fields.items()) or "nothing"
    )
    return "\n".join(
        [
            f"## {name}",
            "",
            f"{summary} Class `{type(algorithm).__name__}`.",
            "",
            "```text",
            equations,
            "```",
            "",
            f"- **Sends**: {' then '.join(facts.requests)}; rounds of messages: {facts.num_rounds}; "
            f"{facts.payload_bytes:,.0f} bytes a worker in the first step of the cluster above.",
            f"- **Keeps**: {kept}.",
            f"- **Promises**: {', '.join(sorted(type(algorithm).promises)).replace('_', ' ') or 'nothing'}.",
            f"- **Use it for**: {WHEN[name]}.",
            *([f"- {' '.join(differs.split())}"] if differs else []),
            "",
        ]
    )


def catalogue() -> str:
    """The whole page."""
    numel = NUM_LAYERS * LAYER * LAYER
    head = f"""# Algorithms

Made from the table of algorithms by `python -m regtopk.report.catalogue > docs/algorithms.md`; a test holds
that it is up to date. Bytes are those of one step on random gradients: N = {NUM_WORKERS} workers,
J = {numel:,} entries in {NUM_LAYERS} matrices, density {DENSITY:g} where there is one, default options,
frames included. A field of the state that is a *weighted sum* is conserved when the number of ranks changes,
a *reset* one starts anew, a *shared* one is the same on all ranks. How to write one:
[add-an-algorithm.md](add-an-algorithm.md).

PowerSGD and fp16 are not here: torch ships them as hooks, and the benchmarks measure those.

"""
    index = "".join(f"- [{name}](#{name}): {WHEN[name]}\n" for name in ALGORITHMS)
    return head + index + "\n" + "\n".join(describe(name) for name in ALGORITHMS)


if __name__ == "__main__":
    sys.stdout.write(catalogue())
