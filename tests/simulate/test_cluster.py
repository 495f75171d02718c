"""What a cluster refuses, and that refusing costs nothing; saving and loading."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from regtopk.algorithms import DGC, RegTopK, TopK
from regtopk.algorithms.posterior import PosteriorScore
from regtopk.core.algorithm import Algorithm, Conversation
from regtopk.core.link import Link
from regtopk.core.requests import DenseSum
from regtopk.core.state import NoState
from regtopk.core.worker import Layout, Worker
from regtopk.errors import ArgumentError, GradientError
from regtopk.simulate import Cluster
from tests.algorithms.cases import assert_same, saved_tensors
from tests.refusals import refusal


@pytest.mark.parametrize("num_workers", [0, -1, 2.0, "2", None, True])
def test_num_workers_must_be_a_count(num_workers: Any) -> None:
    text = f"num_workers must be an integer of at least 1, got {num_workers!r}"
    assert refusal(lambda: Cluster(TopK(k=1), num_workers=num_workers)) == ("ArgumentError", text)


def test_weights_and_index_code_are_checked() -> None:
    with pytest.raises(ArgumentError, match="weights must sum to 1"):
        Cluster(TopK(k=1), num_workers=2, weights=[0.5, 0.25])
    with pytest.raises(ArgumentError, match=r"index_code must be one of .*, got 'huffman'"):
        Cluster(TopK(k=1), num_workers=2, index_code="huffman")


WRONG = [
    ([[1.0, 2.0]] * 2, "grads must be a floating point tensor, got list"),
    (torch.ones(2, 3, dtype=torch.int64), "grads must be a floating point tensor, got torch.int64"),
    (torch.ones(2, 3, dtype=torch.bool), "grads must be a floating point tensor, got torch.bool"),
    (torch.ones(2, 3, dtype=torch.complex64), "grads must be a floating point tensor, got torch.complex64"),
    (torch.ones(3, 3), "grads must have shape (N, J) = (2, J) with J >= 1, got (3, 3)"),
    (torch.ones(3), "grads must have shape (N, J) = (2, J) with J >= 1, got (3,)"),
    (torch.ones(2, 0), "grads must have shape (N, J) = (2, J) with J >= 1, got (2, 0)"),
    (torch.ones(1, 1, 2, 3), "grads must have shape (N, J) = (2, J) with J >= 1, got (1, 1, 2, 3)"),
    (torch.ones(0, 2, 3), "grads must have shape (N, J) = (2, J) with J >= 1, got (0, 2, 3)"),
    (torch.tensor([[1.0], [torch.nan]]), "grads of worker 1 must be finite, got NaN or inf"),
    (torch.tensor([[torch.inf], [torch.nan]]), "grads of worker 0 must be finite, got NaN or inf"),
    (
        torch.tensor([[[1.0], [1.0]], [[1.0], [-torch.inf]]]),
        "grads of worker 1 must be finite, got NaN or inf",
    ),
]


@pytest.mark.parametrize(("grads", "message"), WRONG, ids=[message for _, message in WRONG])
def test_gradients_that_do_not_fit_are_refused(grads: Any, message: str) -> None:
    cluster = Cluster(RegTopK(k=1), num_workers=2)
    assert refusal(lambda: cluster.step(grads)) == ("GradientError", message)
    # a first step that was refused has bound the cluster to nothing
    assert cluster.state is None and cluster.num_steps == 0
    assert cluster.step(torch.ones(2, 5, dtype=torch.float64)).shape == (5,)


@pytest.mark.parametrize(
    "grads",
    [torch.ones(2, 4), torch.ones(2, 3).double(), torch.ones(1, 2, 3)],
    ids=["J", "dtype", "replicas"],
)
def test_gradients_must_stay_of_one_kind(grads: torch.Tensor) -> None:
    cluster = Cluster(RegTopK(k=1), num_workers=2)
    cluster.step(torch.ones(2, 3))
    before = saved_tensors(cluster)
    sums = "torch.float64" if grads.dtype == torch.float64 else "torch.float32"
    text = "grads must stay of shape (2, 3) with sums in torch.float32 on cpu, got"
    told = f"{text} {tuple(grads.shape)}, {sums}, cpu"
    assert refusal(lambda: cluster.step(grads)) == ("GradientError", told)
    assert_same(before, saved_tensors(cluster))
    cluster.step(torch.ones(2, 3).bfloat16())  # its sums are float32 too


def test_a_layout_fixes_the_number_of_entries() -> None:
    cluster = Cluster(TopK(k=1), num_workers=2, layout=Layout.anonymous(3))
    with pytest.raises(GradientError, match="grads must have the layout's J = 3 entries, got 4"):
        cluster.step(torch.ones(2, 4))
    assert cluster.step(torch.ones(2, 3)).shape == (3,)


def saved(**changes: Any) -> dict[str, Any]:
    cluster = Cluster(TopK(k=1), num_workers=2)
    cluster.step(torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 4.0]]))
    state_dict = cluster.state_dict()
    return {**state_dict, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "regtopk"}, "algorithm must be that of the saved state, 'regtopk', got 'topk'"),
        ({"num_workers": 3}, "num_workers must be that of the saved state, 3, got 2"),
        (
            {"weights": torch.tensor([0.25, 0.75]).double()},
            "weights of the saved state must be [0.5, 0.5], got [0.25, 0.75]",
        ),
        ({"state": {}}, "state must have the fields ['residual'], got []"),
        (
            {"state": {"residual": torch.zeros(2, 4)}},
            "state field 'residual' must have shape (2, 3), got (2, 4)",
        ),
        ({"loss": 1.0}, "a saved cluster must hold ["),
    ],
)
def test_a_saved_state_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    cluster = Cluster(TopK(k=1), num_workers=2)
    cluster.step(torch.ones(2, 3))
    before = saved_tensors(cluster)
    kind, text = refusal(lambda: cluster.load_state_dict(saved(**changes)))
    assert kind == "StateError" and text.startswith(message)
    assert_same(before, saved_tensors(cluster))


def test_a_cluster_that_never_ran_can_be_saved_and_loaded() -> None:
    fresh, used = Cluster(RegTopK(k=1), num_workers=2), Cluster(RegTopK(k=1), num_workers=2)
    used.step(torch.ones(2, 3))
    used.load_state_dict(fresh.state_dict())
    assert used.state is None and used.num_steps == 0
    assert used.last_step.payload_bytes.tolist() == [0, 0] == used.total.payload_bytes.tolist()
    assert used.step(torch.ones(2, 7)).shape == (7,)  # free to choose J again


@dataclass(frozen=True, kw_only=True)
class Listens(Algorithm[NoState]):
    """Answers with what training reported."""

    name: ClassVar[str] = "listens"
    promises = frozenset()

    def init(self, worker: Worker) -> NoState:
        return NoState()

    def exchange(self, grad: Tensor, state: NoState, worker: Worker) -> Conversation:
        yield from DenseSum(grad, worker.weight)
        report = worker.report
        return torch.tensor([0.0, 0.0] if report is None else [report.loss, report.time_s])


def test_a_report_reaches_the_next_step_only_and_survives_saving() -> None:
    link = Link(bandwidth=8e3, latency_s=1.0)  # 1,000 bytes a second, and two rounds of a DenseSum
    cluster, other = (Cluster(Listens(), num_workers=2, link=link) for _ in range(2))
    grads = torch.ones(2, 2)
    assert cluster.step(grads).tolist() == [0.0, 0.0]
    time_s = 2 + float(cluster.last_step.sent_bytes.max()) / 1000
    other.load_state_dict(cluster.state_dict())
    for known in (cluster, other):
        known.report(loss=3.0)  # the time is that of the last step, also after loading
    other.load_state_dict(cluster.state_dict())
    for known in (cluster, other):
        assert known.step(grads).tolist() == pytest.approx([3.0, time_s])
        assert known.step(grads).tolist() == [0.0, 0.0]


def test_a_report_without_a_time_or_a_link_is_refused() -> None:
    cluster, text = Cluster(TopK(k=1), num_workers=2), "report needs time_s, or a cluster with a link model"
    with pytest.raises(ArgumentError, match=f"^{text}, got neither$"):
        cluster.report(loss=1.0)


@pytest.mark.parametrize("kind", [RegTopK, partial(DGC, score=PosteriorScore())])
def test_an_idle_worker_whose_selection_grows(kind: Callable[..., Any]) -> None:
    cluster = Cluster(kind(density=lambda step: 0.05 * (1 + step)), num_workers=3, weights=[0.5, 0.5, 0.0])
    for step in range(5):
        aggregate = cluster.step(torch.randn(3, 100, generator=torch.Generator().manual_seed(step)))
        assert aggregate.isfinite().all()
    state: Any = cluster.state
    assert not state.residual[2].any()
