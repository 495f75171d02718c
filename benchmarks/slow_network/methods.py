"""The ways to exchange gradients that are measured, and the bytes each says it sends."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import regtopk
from benchmarks.slow_network.peer_topk import PeerTopK, peer_topk_hook
from regtopk.algorithms import ALGORITHMS
from regtopk.core.algorithm import Algorithm
from regtopk.core.traffic import all_reduce_bytes
from regtopk.errors import ArgumentError
from regtopk.lab.plan.exchange import POWERSGD_RANK, Workload

POWERSGD_DENSE_STEPS = 2  # the fewest torch allows
ONE_BUCKET_MB = 1000  # torch's PowerSGD hangs on gloo with two buckets
TORCH = ("dense", "fp16", "powersgd")
OURS = {name: ALGORITHMS[name] for name in ("topk", "regtopk", "dgc")}
STEP_METHODS = (
    "dense",
    "fp16",
    "powersgd",
    "peer-topk:0.001",
    "topk:0.001",
    "regtopk:0.001",
    "regtopk:0.001:float32:split",
    "regtopk:0.001:4bit",
    "dgc:0.001",
)
ACCURACY_METHODS = (
    "dense",
    "fp16",
    "powersgd",
    "peer-topk:0.001",
    "topk:0.001",
    "regtopk:0.001",
    "regtopk:0.001:4bit",
    "dgc:0.001",
)
SentBytes = Callable[[], tuple[int, int]]  # sent and received in the last step


@dataclass(frozen=True)
class Method:
    """One way to exchange gradients.

    Args:
        name: "dense" (DDP without a hook), "fp16" and "powersgd" (torch's hooks), "peer-topk" (peer_topk.py),
            or ours: "topk", "regtopk", "dgc".
        density: of the sparse ones.
        value_code: of ours.
        collective: "all_reduce", "all_gather" or "split".
    """

    name: str
    density: float | None = None
    value_code: str | None = None
    collective: str = "all_reduce"

    @classmethod
    def parse(cls, text: str) -> "Method":
        """From NAME[:DENSITY[:VALUE_CODE[:COLLECTIVE]]].

        Raises:
            ArgumentError: says what is understood.
        """
        name, *options = text.split(":")
        if name in TORCH and not options:
            return cls(name)
        if name == "peer-topk" and len(options) <= 1:
            return cls(name, _density(text, options), "float32", "all_gather")
        if name in OURS and len(options) <= 3:
            density = _density(text, options)
            code, collective, *_ = [*options[1:], *("float32", "all_gather")[len(options[1:]) :]]
            if collective in ("all_gather", "split"):
                method = cls(name, density, code, collective)
                method.algorithm()
                return method
        names = ", ".join((*TORCH, "peer-topk[:DENSITY]"))
        ours = ", ".join(OURS)
        raise ArgumentError(
            f"method must be {names} or one of {ours} as NAME[:DENSITY[:VALUE_CODE[:all_gather|split]]], "
            f"got {text!r}"
        )

    def algorithm(self) -> Algorithm[Any]:
        """Ours; refuses options it does not understand."""
        kind: Any = OURS[self.name]
        algorithm: Algorithm[Any] = kind(density=self.density, value_code=self.value_code)
        return algorithm

    def wrap(self, model: nn.Module) -> tuple[DistributedDataParallel, SentBytes]:
        """The model in DDP with this hook, and what it says of its bytes."""
        if self.name == "powersgd":
            return with_powersgd(model, POWERSGD_DENSE_STEPS)
        ddp = DistributedDataParallel(model, init_sync=False)  # all ranks made the same: nothing to send
        numel, num_workers = sum(p.numel() for p in model.parameters()), dist.get_world_size()
        if self.name == "peer-topk":
            assert self.density is not None
            state = PeerTopK(self.density)
            ddp.register_comm_hook(state, peer_topk_hook)
            return ddp, lambda: (state.sent_bytes(), state.sent_bytes())
        if self.name in OURS:
            return _with_ours(ddp, self)
        if self.name == "fp16":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        moved = all_reduce_bytes((2 if self.name == "fp16" else 4) * numel, num_workers)
        return ddp, lambda: (moved, moved)


def _density(text: str, options: list[str]) -> float:
    try:
        density = float(options[0]) if options else 0.001
    except ValueError:
        density = -1.0
    if not 0 < density <= 1:
        raise ArgumentError(f"density of a method must be in (0, 1], got {text!r}")
    return density


def _with_ours(ddp: DistributedDataParallel, method: Method) -> tuple[DistributedDataParallel, SentBytes]:
    collective: Any = method.collective
    exchange = regtopk.attach(ddp, method.algorithm(), collective=collective)

    def sent_bytes() -> tuple[int, int]:
        last = exchange.last_step
        return last.sent_bytes, last.received_bytes

    return ddp, sent_bytes


def with_powersgd(model: nn.Module, dense_steps: int) -> tuple[DistributedDataParallel, SentBytes]:
    """The model in DDP with torch's PowerSGD, dense in its first steps, and the bytes of a later step."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB, init_sync=False)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=dense_steps
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    workload = Workload.of_shapes([p.shape for p in model.parameters() if p.requires_grad])
    moved = all_reduce_bytes(sum(workload.powersgd_bytes), dist.get_world_size())
    return ddp, lambda: (moved, moved)
