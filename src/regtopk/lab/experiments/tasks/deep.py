"""A GPT that learns the characters of a text, as a task of `regtopk compare`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from regtopk.core.options import check_choice, check_integer
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.compare.protocol import Protocol
from regtopk.lab.experiments.data.examples import Examples, of_text
from regtopk.lab.experiments.data.splits import batch_order, divide, weights_of
from regtopk.lab.experiments.data.text import load_text, torch_sources
from regtopk.lab.experiments.networks.engine import Engine
from regtopk.lab.experiments.networks.flat import flatten
from regtopk.lab.experiments.networks.gpt import GPT
from regtopk.lab.experiments.tasks.compared_task import ComparedTask, Defaults

HEAD = 64  # width of an attention head; a narrower network has one head
MOST_TESTED = 4096  # windows of the test part that are evaluated, evenly spread over it
NUM_BRANCHES = 8  # workers of a seed that run side by side in a CUDA graph
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class GptSettings(Protocol):
    """Settings of the task gpt; the other tasks have none of them.

    Args:
        num_layers: blocks of gpt.
        width: of gpt's stream between blocks. Heads of the attention are 64 wide.
        context: characters that gpt sees at once; an example is so many, and the one that follows.
        precision: of gpt's matrix products: float32 or bfloat16. Parameters and sums are float32.
    """

    num_layers: int = 0
    width: int = 0
    context: int = 0
    precision: str = "float32"

    def check_network(self) -> None:
        """Refuse sizes that make no network."""
        for name in ("num_layers", "width", "context"):
            check_integer(name, getattr(self, name), at_least=1)
        check_choice("precision", self.precision, DTYPES)
        if self.width > HEAD and self.width % HEAD:
            raise ArgumentError(f"width must be a multiple of {HEAD}, or smaller, got {self.width}")
        if self.split.startswith("dirichlet"):
            raise ArgumentError(
                f"split must be iid, sorted or unequal for gpt, whose text has no classes, got {self.split!r}"
            )


class Gpt(ComparedTask):
    """The next character of a text: the test loss in nats per character.

    Args:
        config: sizes, split and device.
        seeds: of the first weights, the shards and the batches.
        examples: windows of a text.
    """

    config: GptSettings
    metric = "test_loss"
    metric_words = "test loss, nats per character"
    is_better_higher = False
    is_loss_averaged: ClassVar[bool] = True
    has_own_models = True
    base = "dense"
    defaults = Defaults(
        num_workers=8, num_steps=1536, batch_size=16, lr=0.004, optimizer="adamw",
        num_layers=6, width=256, context=128,
    )  # fmt: skip

    def __init__(self, config: GptSettings, seeds: Sequence[int], examples: Examples) -> None:
        super().__init__(config, seeds)
        self.examples = examples
        shards = [shards_of(config, examples, seed) for seed in seeds]
        orders = [order_of(config, own, seed) for own, seed in zip(shards, seeds, strict=True)]
        self.order = torch.stack(orders, 1).to(config.device)  # (T, R, N, B)
        self.weights = [weights_of(own, config.split) for own in shards]
        self._weights = torch.tensor(self.weights, device=config.device)
        self._start = torch.stack([flatten(make_network(config, examples, seed)) for seed in seeds])
        self.engine = Engine(
            make_network(config, examples, seed=0),
            examples,
            num_models=len(seeds),
            num_workers=config.num_workers,
            batch_size=config.batch_size,
            dtype=DTYPES[config.precision],
            has_own_weights=True,
            num_branches=NUM_BRANCHES * len(seeds),
        )
        self.layout = self.engine.layout

    @classmethod
    def load(cls, config: GptSettings) -> Examples:
        """Windows of the text, those of the test thinned out."""
        window = config.context + 1
        path = Path(config.data) if config.data else None
        text = load_text(path, sources=torch_sources, window=window)
        examples = of_text(text, config.device, window)._replace(fingerprint=text.sha256)
        stride = -(-len(examples.test) // MOST_TESTED)
        tested = examples.test[::stride], examples.test_targets[::stride]
        return examples._replace(test=tested[0].contiguous(), test_targets=tested[1].contiguous())

    @classmethod
    def contents_of(cls, examples: Examples) -> Mapping[str, str]:
        """The hash of the text."""
        return {"text_sha256": examples.fingerprint}

    def start(self) -> Tensor:
        """GPT-2's initialisation, by seed."""
        return self._start.to(self.config.device, copy=True)

    def grads(self, models: Tensor, step: int, lr: float) -> tuple[Tensor, Tensor]:
        """Of each worker's own mini-batch, at the seed's model or at its own."""
        own = models if models.dim() == 3 else models.unsqueeze(1).expand(-1, self.num_workers, -1)
        grads, losses = self.engine.grads(own, self.order[step])
        return grads, (self._weights * losses).sum(-1)

    def evaluate(self, models: Tensor) -> list[dict[str, float]]:
        """The test loss, and the share of characters that are guessed right, in percent."""
        return self.engine.evaluate(models)


def shards_of(config: GptSettings, examples: Examples, seed: int) -> list[Tensor]:
    """Which windows each worker has."""
    return divide(examples.labels, config.num_workers, config.split, seed)


def order_of(config: GptSettings, shards: list[Tensor], seed: int) -> Tensor:
    """The windows of every step, (T, N, B)."""
    return batch_order(shards, config.batch_size, config.plan.stops[-1], seed)


def make_network(config: GptSettings, examples: Examples, seed: int) -> GPT:
    """The network as it starts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(
            examples.num_classes,
            context=config.context,
            width=config.width,
            num_layers=config.num_layers,
            num_heads=max(1, config.width // HEAD),
        )
