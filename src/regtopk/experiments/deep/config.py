"""Settings of a deep training, and the protocols that have a name."""

from dataclasses import asdict, dataclass
from typing import Any

from regtopk.core.algorithm import check_density
from regtopk.core.codes import check_value_code
from regtopk.errors import ArgumentError
from regtopk.experiments.compare_config import parse_like
from regtopk.experiments.deep.examples import DATA_SETS
from regtopk.experiments.deep.method import Method
from regtopk.experiments.deep.networks import NETWORKS
from regtopk.experiments.fleet import OPTIMIZERS
from regtopk.experiments.settings import check_count, check_positive, check_word
from regtopk.experiments.splits import check_split

SENDS = ("mean-gradient", "last-gradient", "difference")
PUBLISHED = "published"
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class DeepConfig:
    """Settings of a deep training.

    Args:
        preset: the protocol that the other settings started from; see `PRESETS`.
        methods: with commas, NAME[:OPTION=VALUE]...; beside an algorithm's options, lr and index_code.
        seeds: how many, from 0; or which: 3,4,5 or 2-6, and of one alone: 3, (with the comma) or 3-3.
        network: one of `NETWORKS`.
        data_set: cifar10, digits or text.
        data: where it is.
        weights: file of weights to start from, with a new last layer; published: those that the extra
            [pretrained] brings, of efficientnet-lite0; empty: from scratch.
        split: iid, sorted[:SHARDS], dirichlet[:ALPHA] or unequal.
        uniform_weights: w_n = 1/N whatever the shards' sizes are, instead of w_n = D_n / D.
        num_workers: N.
        batch_size: B, examples a worker and local step.
        num_rounds: T, exchanges.
        local_steps: H, of SGD that every worker takes by itself before an exchange.
        sends: what of them is sent: mean-gradient, last-gradient, or difference (of the parameters).
        optimizer: of the aggregate: sgd, momentum or adam.
        lr: learning step length, of local steps and of the aggregate (of differences: 1).
        density: k / J, of methods whose words do not say.
        like: instead of it, the bytes a step of NAME:DENSITY:INDEX_CODE:VALUE_CODE.
        value_code: of methods whose words do not say.
        evaluate_every: rounds between evaluations.
        image_size: images are resized to it; 0: as they are.
        double_softmax: the loss takes softmax before cross-entropy, which takes it again.
        batch_statistics: evaluate batch norm by the test batch's own statistics; otherwise by those of
            2,000 training images under the evaluated weights.
        precision: of convolutions and linear layers: float32 (TF32 where the GPU has it) or bfloat16.
        num_branches: workers side by side in one CUDA graph; 0: one after another, without a graph.
        compiled: let torch.compile fuse the network's small operations on a GPU (half a minute at the start;
            group norm is then twice as fast).
        side_by_side: seeds of a method that are trained at once.
        deterministic: only bit-reproducible kernels; runs can then be resumed in the middle on a GPU too.
        device: cpu or cuda.
    """

    preset: str = "paper"
    methods: str = "dense,topk,regtopk:mu=5"
    seeds: str = "3"
    network: str = "resnet18"
    data_set: str = "cifar10"
    data: str = ""
    weights: str = ""
    split: str = "iid"
    uniform_weights: bool = False
    num_workers: int = 8
    batch_size: int = 20
    num_rounds: int = 2520
    local_steps: int = 1
    sends: str = "mean-gradient"
    optimizer: str = "sgd"
    lr: float = 0.01
    density: float = 0.001
    like: str = ""
    value_code: str = "float32"
    evaluate_every: int = 60
    image_size: int = 0
    double_softmax: bool = False
    batch_statistics: bool = False
    precision: str = "float32"
    num_branches: int = 8
    compiled: bool = False
    side_by_side: int = 3
    deterministic: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check the settings."""
        check_word("preset", self.preset, PRESETS)
        check_word("network", self.network, NETWORKS)
        check_word("data_set", self.data_set, DATA_SETS)
        check_word("optimizer", self.optimizer, OPTIMIZERS)
        check_word("sends", self.sends, SENDS)
        check_word("precision", self.precision, PRECISIONS)
        methods = self.parsed_methods
        self.parsed_seeds  # noqa: B018 -- refused here, before anything runs
        check_split(self.split)
        for name in (
            "num_workers",
            "batch_size",
            "num_rounds",
            "local_steps",
            "evaluate_every",
            "side_by_side",
        ):
            check_count(name, getattr(self, name))
        for name in ("image_size", "num_branches"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.weights == PUBLISHED and self.network != "efficientnet-lite0":
            raise ArgumentError(
                f"weights 'published' are of efficientnet-lite0, got network {self.network!r}"
            )
        check_positive("lr", self.lr)
        check_density(self.density)
        check_value_code(self.value_code)
        if not methods or len({self._identity(method) for method in methods}) < len(methods):
            raise ArgumentError(f"methods must be different and at least one, got {self.methods!r}")
        if self.like:
            parse_like(self.like)
        if self.data_set == "text" and self.split.startswith("dirichlet"):
            raise ArgumentError(
                f"split must be iid, sorted or unequal for text, which has no classes, got {self.split!r}"
            )
        if self.sends == "difference" and self.optimizer == "adam":
            raise ArgumentError(
                "optimizer must be sgd or momentum where differences are sent (they are taken with lr 1, and "
                f"adam would make steps of 1), got {self.optimizer!r}"
            )

    @property
    def parsed_methods(self) -> list[Method]:
        """The methods, with their own learning step lengths and index codes."""
        words = [word.strip() for word in self.methods.split(",")]
        return [Method.parse(word, lr=self.lr) for word in words if word]

    def _identity(self, method: Method) -> tuple[Any, ...]:
        """What two spellings of a method share; at equal bytes an open density is no number yet."""
        is_open = bool(self.like) and method.takes_density
        return method.algorithm(self.density, self.value_code), method.lr, method.index_code, is_open

    @property
    def parsed_seeds(self) -> list[int]:
        """The seeds."""
        try:
            if "," in self.seeds:
                seeds = [int(word) for word in self.seeds.rstrip(",").split(",")]
            elif "-" in self.seeds:
                first, _, last = self.seeds.partition("-")
                seeds = list(range(int(first), int(last) + 1))
            else:
                seeds = list(range(int(self.seeds)))
        except ValueError:
            seeds = []
        if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
            raise ArgumentError(
                f"seeds must be a number of them, or different ones like 3,4,5 or 2-6, got {self.seeds!r}"
            )
        return seeds

    @property
    def is_as_published(self) -> bool:
        """Whether this is the paper's protocol, whatever it is computed with."""
        free = {"preset", "weights", "device", "precision", "compiled", "deterministic", "evaluate_every"}
        preset = DeepConfig(**PRESETS["paper"]).protocol
        own = {key: value for key, value in self.protocol.items() if key not in free}
        return own == {key: value for key, value in preset.items() if key not in free}

    @property
    def protocol(self) -> dict[str, Any]:
        """All settings that every run of a results folder shares."""
        free = ("methods", "seeds", "data", "side_by_side", "num_branches")
        return {key: value for key, value in asdict(self).items() if key not in free}


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
