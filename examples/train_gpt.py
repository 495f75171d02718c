"""Train a small GPT on the characters of a text, and send what its optimizers changed. Put your model in.

    torchrun --nproc_per_node 2 examples/train_gpt.py                     # AdamW
    torchrun --nproc_per_node 2 examples/train_gpt.py --optimizer muon    # Muon and AdamW
    torchrun --nproc_per_node 2 examples/train_gpt.py --dense --lr 0.004  # DDP, for comparison
    torchrun --nproc_per_node 2 examples/train_gpt.py --layers 2 --width 64 --steps 200

On two CPU cores the first takes about 40 minutes, the last half a minute. Muon learns more, and computes in
bfloat16, which is slow on many CPUs: use it on a GPU. Without --data the text is the sources of Python's
library. It goes on from its newest checkpoint, if there is one: delete the folder to start over, or name
another by --checkpoints. With --dense it writes none.
"""

import argparse
import gc
import math
import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import regtopk

CONTEXT = 128  # characters that the model looks back on


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden_in, self.hidden_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention_in(self.norm1(x)).unflatten(-1, (3, -1, 32))  # of 32 numbers each
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.hidden_out(F.gelu(self.hidden_in(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        for matrix in [p for p in self.parameters() if p.ndim > 1]:
            nn.init.normal_(matrix, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.token.weight)  # tied


def read_text(path: Path | None) -> tuple[Tensor, Tensor]:
    """The bytes of a file, or of Python's library: to train on, and the last 5 % to test on."""
    folder = Path(os.__file__).parent
    paths = [path] if path else sorted(p for p in folder.rglob("*.py") if "site-packages" not in p.parts)
    text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in paths)), dtype=torch.uint8)
    if len(text) < 100_000:
        raise SystemExit(f"the text must have at least 100,000 characters, got {len(text)}")
    return text[: -len(text) // 20], text[-len(text) // 20 :]


def loss_of(model: nn.Module, text: Tensor, size: int, seed: int, device: torch.device) -> Tensor:
    """The mean loss of the next character, over some random windows of the text."""
    starts = torch.randint(len(text) - CONTEXT, (size,), generator=torch.Generator().manual_seed(seed))
    pieces = torch.stack([text[i : i + CONTEXT + 1] for i in starts.tolist()]).to(device).long()
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def optimizers_of(network: GPT, name: str, lr: float) -> list[torch.optim.Optimizer]:
    """AdamW; or Muon for the matrices in blocks, scaled to AdamW's learning rates, and AdamW for the rest."""
    named = list(network.named_parameters())
    matrices = [p for key, p in named if name == "muon" and key.startswith("blocks.") and p.ndim == 2]
    rest = [p for _, p in named if all(p is not matrix for matrix in matrices)]
    adamw = torch.optim.AdamW(rest, lr, betas=(0.9, 0.95), weight_decay=0.1)
    if not matrices:
        return [adamw]
    return [torch.optim.Muon(matrices, lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), adamw]


def make_exchange(network: GPT, optimizers: list[torch.optim.Optimizer]) -> regtopk.UpdateExchange:
    """What docs/which-method.md advises. The model is not wrapped; optimizers' steps make the exchange."""
    if len(optimizers) == 2:
        recipe = regtopk.recipes.transformer(dist.get_world_size())
        return regtopk.UpdateExchange(network, optimizers, recipe.algorithm, **recipe.options)
    topk = regtopk.TopK(density=0.01, value_code="4bit", impute=0.35)
    return regtopk.UpdateExchange(network, optimizers, topk, every=2, fragments=2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="a text file")
    parser.add_argument("--steps", type=int, default=1536)
    parser.add_argument("--lr", type=float, default=0.008)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--dense", action="store_true", help="DDP, which sends all; without checkpoints")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="windows a step and rank")
    parser.add_argument("--checkpoints", type=Path, help="folder of this run")
    arguments = parser.parse_args()
    if arguments.checkpoints is None:  # other runs have others
        name = f"train_gpt-{arguments.optimizer}-{arguments.layers}x{arguments.width}"
        arguments.checkpoints = Path("out", name)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=timedelta(minutes=5))
    train(arguments, device)
    gc.collect()  # the model goes first: DDP would keep the group's threads alive into Python's exit
    dist.destroy_process_group()


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    known, unknown = read_text(arguments.data)
    torch.manual_seed(0)
    network = GPT(arguments.width, arguments.layers).to(device)
    optimizers = optimizers_of(network, arguments.optimizer, arguments.lr)

    def factor(step: int) -> float:  # warm-up, then a cosine to 10 %
        return min((step + 1) / 100, 0.55 + 0.45 * math.cos(math.pi * step / arguments.steps))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizers[-1], factor)
    model, exchange, first = network, None, 0
    if arguments.dense:
        model = DistributedDataParallel(network)
    else:
        exchange = make_exchange(network, optimizers)
        checkpoints = regtopk.Checkpoints(arguments.checkpoints, asynchronous=True)
        # the exchange's state holds the model and the optimizers, but not the scheduler
        state = {"exchange": exchange, "scheduler": scheduler}
        extra = checkpoints.load(**state)
        first = 0 if extra is None else extra["step"]

    if dist.get_rank() == 0:
        size = sum(p.numel() for p in network.parameters())
        print(f"{first} of {arguments.steps} steps are done; {size:,} parameters", flush=True)
    for step in range(first, arguments.steps):
        network.zero_grad()
        seed = step * dist.get_world_size() + dist.get_rank()
        loss_of(model, known, arguments.batch, seed, device).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]  # one schedule for all
            optimizer.step()
        scheduler.step()
        if (step + 1) % 50 == 0 or step + 1 == arguments.steps:
            if exchange is not None:
                checkpoints.save(step + 1, **state)
            if dist.get_rank() == 0:
                # the model that all ranks share: their own differ while a part waits for its turn
                with torch.no_grad(), exchange.agreed() if exchange is not None else nullcontext():
                    loss = loss_of(network, unknown, 64, 0, device)
                print(f"{step + 1} steps: test loss {loss.item():.3f} nats per character", flush=True)
    if exchange is not None:
        checkpoints.close()
        exchange.finish()  # all ranks have the same model now
        if dist.get_rank() == 0:
            print(exchange.summary())


if __name__ == "__main__":
    main()
