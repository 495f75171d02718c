"""Figure 1: on the toy problem Top-1 stands still, and RegTop-1 follows training without sparsification."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from regtopk.lab.experiments.experiment import ShowProgress, Summary, WholeExperiment, by_method
from regtopk.lab.experiments.paper.toy import ToyConfig, descend
from regtopk.lab.experiments.published import published_figure
from regtopk.lab.experiments.tasks import toy
from regtopk.lab.runs import Panel, Record

# the curve of the paper that each method is held against
PUBLISHED_AS = {
    "dense": "no_sparsification",
    "topk": "topk",
    "regtopk": "regtopk",
    "regtopk-cap": "regtopk",
    "regtopk-current": "regtopk",
}


def run(config: ToyConfig, progress: ShowProgress) -> Iterator[Record]:
    """Yield the empirical risk of every method at every iteration, beside the published one."""
    points = published_figure(1)
    num_iterations = config.num_iterations + 1  # the last w is looked at too
    for method, iteration, w, _ in descend(config, toy.grads, num_iterations, progress):
        record: Record = {"method": method, "iteration": iteration, "risk": float(toy.risk(w))}
        curve = points[PUBLISHED_AS[method]]
        if iteration < len(curve):
            record["published"] = curve[iteration]
        yield record


def summarise(config: ToyConfig, records: Sequence[Record]) -> Summary:
    """The largest distance of each curve from the published points, and where it ends."""
    difference = {
        method: max(abs(r["risk"] - r["published"]) for r in own if "published" in r)
        for method, own in by_method(records).items()
    }
    final = {method: own[-1]["risk"] for method, own in by_method(records).items()}
    as_printed = "regtopk-current"  # Algorithm 1 as printed is none of the published curves
    return {
        "max_abs_difference": {method: x for method, x in difference.items() if method != as_printed},
        "difference_as_printed": difference[as_printed],
        "final_risk": final,
        "source": published_figure(1)["source"],
        "table": [
            {"measure": "off published points", **difference},
            {"measure": "final risk", **final},
        ],
    }


def panels(config: ToyConfig) -> Sequence[Panel]:
    """Risk against iterations with the published points as circles, whole and at its beginning."""
    title = "Training loss, published points as circles"
    whole = Panel(
        title, "iteration", "risk", "iteration", "empirical risk F(w)", log_y=True, dots="published"
    )
    return whole, replace(whole, title="The first 20 iterations", x_max=20)


FIG1 = WholeExperiment(
    name="fig1",
    title="Figure 1: Top-1 stands still, RegTop-1 moves",
    about=(
        "Two workers whose large gradient entries cancel. Top-1 keeps sending them and aggregates zero; "
        "RegTop-1 sees that they cancelled and sends the entry that matters. Circles are the paper's own "
        "points. Algorithm 1 as printed (RegTop-k, current) does not give the published curve; the "
        "distortion of the previous step does."
    ),
    config=ToyConfig,
    run=run,
    summarise=summarise,
    panels=panels,
)
