"""Figure 3: deep networks trained by simulated workers, as the paper did it and on workers that differ.

Every preset is a comparison (see `regtopk compare`). `--set like=topk:0.001:raw32:float32` compares at equal
bytes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from regtopk.lab.experiments.compare.comparison import Comparison
from regtopk.lab.experiments.compare.config import CompareConfig
from regtopk.lab.experiments.published import published_figure
from regtopk.lab.method import Method
from regtopk.lab.runs import Panel, Record

PUBLISHED = {"topk": "topk", "regtopk:mu=5": "regtopk"}  # of our methods, in the paper's figure
FREE = ("precision", "device", "deterministic", "num_evaluations")  # how it is computed, not what
REGTOPK = "regtopk:mu=1,regtopk:mu=5,regtopk:mu=1:reference=current,regtopk:mu=5:reference=current"
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "task": "resnet18",
        "algorithms": f"dense,topk,{REGTOPK},dgc,dgc:score=regtopk:mu=5,ef21:eta=0.1,global-topk",
        "densities": (0.001,),
        "precision": "bfloat16",
        "num_evaluations": 42,
        "seeds": "3",
    },
    "non-iid": {
        "task": "resnet18-gn",
        "algorithms": f"dense,topk,{REGTOPK},dgc:lr=0.005,dgc:score=regtopk:mu=5:lr=0.005,ef21:eta=0.1,"
        "global-topk,consensus,sketch",
        "densities": (0.001,),
        "split": "sorted:2",
        "lr": (0.05,),
        "num_steps": 1260,
        "precision": "bfloat16",
        "num_evaluations": 21,
        "seeds": "3",
    },
    "smoke": {
        "task": "small-cnn",
        "algorithms": "dense,topk,regtopk:mu=1",
        "num_workers": 4,
        "num_steps": 150,
        "lr": (0.2,),
        "num_evaluations": 10,
        "seeds": "2",
    },
}


def is_as_published(config: CompareConfig) -> bool:
    """Whether this is the paper's protocol, however it is computed."""
    paper, own = CompareConfig(**PRESETS["paper"]).shared, config.shared
    return all(own[key] == value for key, value in paper.items() if key not in FREE)


def published_accuracy(config: CompareConfig, method: Method, step: int) -> Record:
    """The paper's accuracy after a step, for the protocol and the methods it was published for."""
    if method.label not in PUBLISHED or not is_as_published(config):
        return {}
    figure = published_figure(3)
    curve = dict(zip(figure["iteration"], figure[PUBLISHED[method.label]], strict=True))
    return {"published": curve[step]} if step in curve else {}


def panels(config: CompareConfig) -> Sequence[Panel]:
    """Accuracy and loss by step (beside the published curves), and accuracy by bytes."""
    accuracy = Panel("Accuracy, by steps", "step", "accuracy", "step", "test accuracy, %")
    loss = Panel("Training loss", "step", "loss", "step", "training loss")
    contributed: dict[str, Any] = {"x": "payload_bytes", "x_label": "bytes a worker has contributed"}
    by_bytes = replace(accuracy, title="Accuracy, by bytes", log_x=True, **contributed)
    if is_as_published(config):
        accuracy = replace(accuracy, title=f"{accuracy.title}; published as circles", dots="published")
    return accuracy, loss, by_bytes


FIG3 = Comparison(
    name="fig3", title="Figure 3: deep networks", presets=PRESETS, extras=published_accuracy, panels=panels
)
