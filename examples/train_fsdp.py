"""Train a small GPT that is sharded inside a machine and replicated across machines: copy it.

    torchrun --nproc_per_node 4 examples/train_fsdp.py                        # 2 replicas of 2 shards
    torchrun --nproc_per_node 4 examples/train_fsdp.py --gradients --lr 0.5   # attach, with plain SGD
    torchrun --nproc_per_node 4 examples/train_fsdp.py --dense                # torch's own HSDP, to compare

Between the replicas, over the slow links, few entries of AdamW's updates travel, or of the gradients.
With --resume it goes on from its last checkpoint, also on other numbers of ranks. --dense saves none.
"""

import argparse
import gc
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import regtopk

CONTEXT = 64  # characters that the model looks back on


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
    paths = [path] if path else sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in paths)), dtype=torch.uint8)
    return text[: -len(text) // 20], text[-len(text) // 20 :]


def loss_of(model: nn.Module, text: Tensor, size: int, seed: int, device: torch.device) -> Tensor:
    """The mean loss of the next character, over some random windows of the text."""
    starts = torch.randint(len(text) - CONTEXT, (size,), generator=torch.Generator().manual_seed(seed))
    pieces = torch.stack([text[i : i + CONTEXT + 1] for i in starts.tolist()]).to(device).long()
    return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="a text file; Python's library if not given")
    parser.add_argument("--shards", type=int, default=2, help="ranks that share a replica: a divisor of all")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=2, help="steps from one exchange of updates to the next")
    parser.add_argument("--density", type=float, default=0.01, help="share of its entries that a rank sends")
    parser.add_argument("--lr", type=float, default=0.004)
    parser.add_argument("--gradients", action="store_true", help="exchange gradients, not updates")
    parser.add_argument("--dense", action="store_true", help="torch's own HSDP, which sends all gradients")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--checkpoint", type=Path, default=Path("out/train_fsdp"))
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if any")
    arguments = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=timedelta(minutes=5))
    shape = dist.get_world_size() // arguments.shards, arguments.shards
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    train(arguments, mesh, device)
    gc.collect()
    dist.destroy_process_group()


def train(arguments: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
    torch.manual_seed(0)
    known, unknown = read_text(arguments.data)
    model = GPT(arguments.width, arguments.layers).to(device)
    axis = mesh if arguments.dense else mesh["shard"]  # over the shards alone: the replicas are ours
    for block in model.blocks:
        fully_shard(block, mesh=axis)
    fully_shard(model, mesh=axis)
    kind = torch.optim.SGD if arguments.gradients else torch.optim.AdamW
    optimizer = kind(model.parameters(), arguments.lr)
    topk, every = regtopk.TopK(density=arguments.density, value_code="4bit"), arguments.every
    exchange, replicas = None, mesh["replicate"]
    if arguments.gradients:
        exchange = regtopk.attach(model, topk, process_group=replicas)
    elif not arguments.dense:
        exchange = regtopk.UpdateExchange(model, optimizer, topk, every=every, process_group=replicas)
    root = arguments.checkpoint / ("gradients" if arguments.gradients else "updates")
    whole = [int(path.parent.name) for path in root.glob("*/.metadata")]  # written last
    first = max(whole, default=0) if arguments.resume and exchange is not None else 0
    if exchange is not None and first > 0:
        if arguments.gradients:  # with a momentum the optimizer too; updates hold both themselves
            state = {"model": get_model_state_dict(model)}
            dcp.load(state, checkpoint_id=root / str(first))
            set_model_state_dict(model, state["model"])
        exchange.load_sharded(root / str(first))
    if dist.get_rank() == 0:
        print(f"{first} of {arguments.steps} steps are done", flush=True)

    for step in range(first, arguments.steps):
        optimizer.zero_grad()
        seed = step * dist.get_world_size() + dist.get_rank()  # every rank has windows of its own
        loss_of(model, known, 16, seed, device).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == arguments.steps:
            if exchange is not None:
                state = {"model": get_model_state_dict(model)} if arguments.gradients else {}
                state["exchange"] = exchange.sharded_state_dict()
                dcp.save(state, checkpoint_id=root / str(step + 1))
            with torch.no_grad():  # on every rank: the model is in parts
                loss = loss_of(model, unknown, 64, 0, device)
            if dist.get_rank() == 0:
                print(f"{step + 1} steps: test loss {loss.item():.3f} nats a character", flush=True)
    if exchange is not None and dist.get_rank() == 0:
        print(exchange.summary())


if __name__ == "__main__":
    main()
