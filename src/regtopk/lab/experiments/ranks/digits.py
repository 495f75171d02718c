"""scikit-learn's digits, as ranks learn them."""

from collections.abc import Iterator
from itertools import islice, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from regtopk.lab.experiments.data.images import Images, load_images
from regtopk.lab.experiments.ranks.config import TrainConfig
from regtopk.lab.experiments.ranks.training import RankTask

HIDDEN = (256, 128)


class DigitsOnRank(RankTask):
    """A perceptron with two hidden layers, on this rank's rows of shuffled batches.

    Args:
        config: how many workers, digits and steps.
        device: where.
    """

    bucket_mb = 0.1  # several DDP buckets even in so small a model, as a large one has

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self.digits: Images = load_images("digits", None, device)
        self._batch_size = config.batch_size
        self._num_steps = config.num_steps

    def make_network(self, seed: int) -> nn.Module:
        """Torch's own initialisation."""
        torch.manual_seed(seed)
        sizes = (self.digits.train.shape[1], *HIDDEN)
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(HIDDEN[-1], 10)).to(self.digits.train.device)

    def order(self, seed: int) -> Tensor:
        """Epoch after epoch; a batch that would be short is left out."""
        return torch.stack(list(islice(self._batches(seed), self._num_steps)))

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(model(self.digits.train[rows]), self.digits.train_labels[rows])

    @torch.no_grad()
    def evaluate(self, network: nn.Module) -> dict[str, float]:
        """The loss of all training digits, and the percent of the test digits that are read right."""
        loss = F.cross_entropy(network(self.digits.train), self.digits.train_labels)
        is_right = network(self.digits.test).argmax(-1) == self.digits.test_labels
        return {"loss": float(loss), "accuracy": 100 * float(is_right.float().mean())}

    def _batches(self, seed: int) -> Iterator[Tensor]:
        rank, num_workers = dist.get_rank(), dist.get_world_size()
        whole, num_train = self._batch_size * num_workers, len(self.digits.train)
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(num_train, generator=generator)
            for start in range(0, num_train - whole + 1, whole):
                yield order[start : start + whole][rank::num_workers]
