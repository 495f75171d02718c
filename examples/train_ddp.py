"""Train scikit-learn's digits with DistributedDataParallel and Consensus: copy it, and put your model in.

    torchrun --nproc_per_node 2 examples/train_ddp.py

It goes on from its newest checkpoint, if there is one: delete the folder to start over. Needs
`pip install '.[experiments]'`.
"""

import argparse
import gc
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import regtopk


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--density", type=float, default=0.01, help="share of the entries a worker sends")
    parser.add_argument("--checkpoints", type=Path, default=Path("out/train_ddp"), help="folder of this run")
    arguments = parser.parse_args()

    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    # a rank that hangs is found after the timeout: torch would wait for half an hour with gloo
    dist.init_process_group("nccl" if is_cuda else "gloo", timeout=timedelta(minutes=5))
    train(arguments, device)
    gc.collect()  # the model goes first: DDP would keep the group's threads alive into Python's exit
    dist.destroy_process_group()


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = (torch.tensor(images, dtype=torch.float32) / 16)[order], torch.tensor(labels)[order]
    known, test = TensorDataset(x[:1437], y[:1437]), (x[1437:].to(device), y[1437:].to(device))
    sampler = DistributedSampler(known)
    loader = DataLoader(known, batch_size=32, sampler=sampler)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(network.to(device))
    algorithm = regtopk.Consensus(density=arguments.density, value_code="4bit")
    exchange = regtopk.attach(model, algorithm)  # on every rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    checkpoints = regtopk.Checkpoints(arguments.checkpoints)
    state = {"model": model, "optimizer": optimizer, "exchange": exchange}
    extra = checkpoints.load(**state)  # on as many ranks as before, or on others
    first_epoch = 0 if extra is None else extra["step"]
    if first_epoch and dist.get_rank() == 0:
        where = f"epoch {first_epoch} of {arguments.epochs}, from {arguments.checkpoints}"
        print(f"goes on after {where}: delete the folder to start over")

    for epoch in range(first_epoch, arguments.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
        checkpoints.save(epoch + 1, **state)
    checkpoints.close()

    if dist.get_rank() == 0:
        with torch.no_grad():
            accuracy = (network(test[0]).argmax(-1) == test[1]).float().mean()
        print(f"{100 * float(accuracy):.1f} % of the test digits read right")
        print(exchange.summary())


if __name__ == "__main__":
    main()
