"""Settings of a deep training, and the protocols that have a name."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from regtopk.core.options import check_choice, check_integer, check_positive
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.compare.protocol import Plan, Protocol, parse_methods
from regtopk.lab.experiments.data.examples import DATA_SETS
from regtopk.lab.experiments.networks import NETWORKS
from regtopk.lab.experiments.settings import format_seeds, parse_seeds

SENDS = ("mean-gradient", "last-gradient", "difference")
PUBLISHED = "published"
PRECISIONS = ("float32", "bfloat16")
HOW = ("preset", "weights", "device", "precision", "compiled", "deterministic", "evaluate_every")


@dataclass(frozen=True)
class DeepConfig(Protocol):
    """Settings of a deep training.

    Args:
        preset: the protocol that the other settings started from; see `PRESETS`.
        methods: NAME[:OPTION=VALUE]..., with commas between them. Options are the algorithm's own, lr and
            index_code.
        seeds: how many, from 0 on: 3. Or which: 3,4,5 or 2-6, and 3-3 for seed 3 alone.
        network: one of `NETWORKS`.
        data_set: cifar10, digits or text.
        weights: file of weights to start from; the last layer is new. "published" stands for the weights
            of efficientnet-lite0 that the extra [pretrained] brings. Empty: start from scratch.
        uniform_weights: all workers weigh w_n = 1/N, instead of w_n = D_n / D by the sizes of their shards.
        num_rounds: how many exchanges, T.
        local_steps: how many steps of SGD every worker takes by itself before an exchange, H.
        sends: what a worker sends after them: mean-gradient, last-gradient, or difference (of parameters).
        lr: learning rate of local steps and of the aggregate. Differences are applied with 1.
        density: k / J, for methods whose words name none.
        evaluate_every: rounds between evaluations.
        image_size: images are resized to this width; 0: they stay as they are.
        double_softmax: take softmax before cross-entropy, which takes it again.
        batch_statistics: evaluate batch norm with the statistics of each test batch, not with those of
            2,000 training images.
        precision: of convolutions and linear layers: float32 (TF32 if the GPU has it) or bfloat16.
        num_branches: how many workers run side by side in one CUDA graph; 0: no graph, one after another.
        compiled: let torch.compile fuse the network's small operations on a GPU. It takes half a minute at
            the start, and group norm is then twice as fast.
        side_by_side: how many seeds of a method are trained at once.
    """

    preset: str = "paper"
    methods: str = "dense,topk,regtopk:mu=5"
    seeds: str = "3"
    network: str = "resnet18"
    data_set: str = "cifar10"
    weights: str = ""
    uniform_weights: bool = False
    num_rounds: int = 2520
    local_steps: int = 1
    sends: str = "mean-gradient"
    lr: float = 0.01
    density: float = 0.001
    evaluate_every: int = 60
    image_size: int = 0
    double_softmax: bool = False
    batch_statistics: bool = False
    precision: str = "float32"
    num_branches: int = 8
    compiled: bool = False
    side_by_side: int = 3

    free: ClassVar[tuple[str, ...]] = ("data", "methods", "seeds", "side_by_side", "num_branches")

    def __post_init__(self) -> None:
        """Check the settings."""
        check_choice("preset", self.preset, PRESETS)
        check_choice("network", self.network, NETWORKS)
        check_choice("data_set", self.data_set, DATA_SETS)
        check_choice("sends", self.sends, SENDS)
        check_choice("precision", self.precision, PRECISIONS)
        check_positive("lr", self.lr)
        for name in ("num_rounds", "local_steps", "evaluate_every", "side_by_side"):
            check_integer(name, getattr(self, name), at_least=1)
        super().__post_init__()
        for name in ("image_size", "num_branches"):
            check_integer(name, getattr(self, name), at_least=0)
        if self.weights == PUBLISHED and self.network != "efficientnet-lite0":
            raise ArgumentError(
                f"weights 'published' are of efficientnet-lite0, got network {self.network!r}"
            )
        if self.data_set == "text" and self.split.startswith("dirichlet"):
            raise ArgumentError(
                f"split must be iid, sorted or unequal for text, which has no classes, got {self.split!r}"
            )
        for method in self.plan.methods:
            if method.rounds.has_updates:
                raise ArgumentError(
                    "methods must exchange gradients here (local_steps and sends say what travels), "
                    f"got {method.label!r}"
                )
            optimizer = self.optimizer_of(method)
            if self.sends == "difference" and optimizer not in ("sgd", "momentum"):
                raise ArgumentError(
                    "optimizer must be sgd or momentum where differences are sent (they are taken with lr 1, "
                    f"and adam would make steps of 1), got {optimizer!r}"
                )

    @cached_property
    def plan(self) -> Plan:
        """What is run, and how it is judged: at equal bytes, against the method that `like` names."""
        every, last = self.evaluate_every, self.num_rounds
        return Plan(
            methods=parse_methods(self.methods),
            seeds=parse_seeds(self.seeds),
            num_at_once=self.side_by_side,
            densities=(self.density,),
            lrs=(self.lr,),
            stops=[*range(every, last, every), last],
            num_last=5,
            is_against_like=bool(self.like),
        )

    def with_slices(self, labels: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
        """The settings that name these methods and seeds."""
        return {"methods": ",".join(labels), "seeds": format_seeds(seeds)}

    @property
    def is_as_published(self) -> bool:
        """Whether this is the paper's protocol, however it is computed."""
        preset, own = DeepConfig(**PRESETS["paper"]).shared, self.shared
        return all(own[key] == value for key, value in preset.items() if key not in HOW)


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "methods": (
            "dense,topk,regtopk:mu=1,regtopk:mu=5,regtopk:mu=1:reference=current,"
            "regtopk:mu=5:reference=current,dgc,dgc:score=regtopk:mu=5,ef21:eta=0.1,global-topk"
        ),
        "precision": "bfloat16",
    },
    "non-iid": {
        "methods": (
            "dense,topk,regtopk:mu=1,regtopk:mu=5,regtopk:mu=1:reference=current,"
            "regtopk:mu=5:reference=current,dgc:lr=0.005,dgc:score=regtopk:mu=5:lr=0.005,ef21:eta=0.1,global-topk,"
            "consensus,sketch"
        ),
        "network": "resnet18-gn",
        "split": "sorted:2",
        "lr": 0.05,
        "num_rounds": 1260,
        "precision": "bfloat16",
        "compiled": True,
    },
    "authors-script": {
        "methods": "topk,regtopk:mu=5",
        "split": "unequal",
        "uniform_weights": True,
        "num_rounds": 100,
        "local_steps": 40,
        "sends": "last-gradient",
        "density": 1e-4,
        "evaluate_every": 5,
        "double_softmax": True,
        "batch_statistics": True,
        "precision": "bfloat16",
    },
    "finetune": {
        "methods": "dense,topk,regtopk:mu=5",
        "network": "efficientnet-lite0",
        "weights": PUBLISHED,
        "precision": "bfloat16",
        "num_rounds": 800,
        "image_size": 160,
        "evaluate_every": 40,
    },
    "gpt": {
        "methods": "dense,topk,regtopk:mu=5",
        "network": "gpt",
        "data_set": "text",
        "optimizer": "adam",
        "lr": 1e-3,
        "num_rounds": 1000,
        "evaluate_every": 50,
        "density": 0.01,
    },
    "smoke": {
        "methods": "dense,topk,regtopk:mu=1",
        "seeds": "2",
        "network": "small-cnn",
        "data_set": "digits",
        "num_workers": 4,
        "num_rounds": 150,
        "lr": 0.2,
        "density": 0.01,
        "evaluate_every": 15,
    },
}
