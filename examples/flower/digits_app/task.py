"""The network, and which digits a client has."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F


def make_model() -> nn.Module:
    torch.manual_seed(0)  # of no importance: the server's is used
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def digits_of(client: int, num_clients: int) -> tuple[Tensor, Tensor]:
    """Sorted by label and cut into pieces of 1, 2, 3 ... parts: clients differ in classes and in size."""
    images, labels = load()
    order = labels.argsort(stable=True)
    parts = torch.arange(1, num_clients + 1).cumsum(0)
    piece = order.tensor_split((parts[:-1] * len(order) // parts[-1]).tolist())[client]
    return images[piece], labels[piece]


def train(model: nn.Module, images: Tensor, labels: Tensor, *, seed: int) -> None:
    """One pass over the client's digits."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    for batch in order.split(32):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
