"""Train digits on ranks that may be killed, leave and come back: copy it, and put your model in.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or restarted ranks find the addresses of dead ones
    torchrun --nproc_per_node 4 --max-restarts 3 --rdzv_backend c10d --rdzv_endpoint localhost:29500 \
             examples/train_elastic.py
    torchrun --nnodes 1:2 --nproc_per_node 2 --max-restarts 3 --rdzv_backend c10d --rdzv_endpoint HOST:29500 \
             examples/train_elastic.py           # on each of two machines: one may leave and come back

It goes on from its newest checkpoint, on any number of ranks. Delete the folder to start over. With --updates
it exchanges what AdamW changed, not gradients. Needs `pip install '.[experiments]'`.
"""

import argparse
import gc
import logging
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import regtopk


class Batches:
    """Which samples come next: the same ones on any number of ranks. It goes on where the run stopped."""

    def __init__(self, num_samples: int, size: int, seed: int) -> None:
        self.num_samples, self.size, self.seed = num_samples, size, seed
        self.epoch, self.place = 0, 0

    def next(self, rank: int, num_ranks: int) -> Tensor:
        """This rank's share of the next batch of all ranks."""
        if self.place + self.size > self.num_samples:
            self.epoch, self.place = self.epoch + 1, 0
        generator = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        order = torch.randperm(self.num_samples, generator=generator)
        self.place += self.size
        return order[self.place - self.size : self.place][rank::num_ranks]

    def share(self, rank: int, num_ranks: int) -> float:
        """What part of a batch a rank gets: its weight in the sum of gradients."""
        return len(range(rank, self.size, num_ranks)) / self.size

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=440)
    parser.add_argument("--batch", type=int, default=120, help="samples of a step, of all ranks together")
    parser.add_argument("--density", type=float, default=0.01, help="share of the entries a worker sends")
    parser.add_argument("--updates", action="store_true", help="exchange AdamW's updates, not gradients")
    parser.add_argument("--delay", type=int, default=0, help="of updates: steps that an exchange may travel")
    parser.add_argument("--returned", type=float, help="of updates: share of the sums that come back")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="a rank that hangs longer is an error")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=20, help="steps; with --updates an even number")
    parser.add_argument("--asynchronous", action="store_true", help="train on while a checkpoint is written")
    parser.add_argument("--checkpoints", type=Path, default=Path("out/train_elastic"))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)  # regtopk says from where it goes on
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    # a rank that hangs is found after the timeout: torch would wait for half an hour with gloo
    dist.init_process_group("nccl" if is_cuda else "gloo", timeout=timedelta(seconds=arguments.timeout_s))
    train(arguments, device)
    gc.collect()  # the model goes first: DDP would keep the group's threads alive into Python's exit
    dist.destroy_process_group()


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = (torch.tensor(images, dtype=torch.float32) / 16)[order], torch.tensor(labels)[order]
    x, y = x.to(device), y.to(device)
    batches = Batches(1437, arguments.batch, arguments.seed)  # the other samples are for the test
    weight = batches.share(rank, num_ranks)

    torch.manual_seed(arguments.seed)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    model: nn.Module = network.to(device)
    if arguments.updates:  # the exchange's state holds the model and the optimizer
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
        topk = regtopk.TopK(density=arguments.density, value_code="4bit", returned=arguments.returned)
        exchange = regtopk.UpdateExchange(
            network, optimizer, topk, every=2, delay=arguments.delay, weight=weight
        )
        state = {"exchange": exchange, "batches": batches}
    else:
        model = DistributedDataParallel(network)
        exchange = regtopk.attach(model, regtopk.RegTopK(density=arguments.density), weight=weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        state = {"model": model, "optimizer": optimizer, "exchange": exchange, "batches": batches}

    with regtopk.Checkpoints(arguments.checkpoints, asynchronous=arguments.asynchronous) as checkpoints:
        extra = checkpoints.load(**state)
        first = 0 if extra is None else extra["step"]
        if rank == 0:
            print(f"{num_ranks} ranks go on from step {first}", flush=True)
        for step in range(first, arguments.steps):
            mine = batches.next(rank, num_ranks)
            optimizer.zero_grad()
            F.cross_entropy(model(x[mine]), y[mine]).backward()
            optimizer.step()
            if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
                checkpoints.save(step + 1, **state)

    if rank == 0:
        with torch.no_grad():
            scores = network(x)
        accuracy = (scores[1437:].argmax(-1) == y[1437:]).float().mean()
        loss = F.cross_entropy(scores[:1437], y[:1437])
        print(f"{100 * float(accuracy):.1f} % of the test digits read right, training loss {float(loss):.5f}")
        print(exchange.summary())


if __name__ == "__main__":
    main()
