"""The ways to train the GPT that are raced: what each makes of a plain network and its AdamW."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

import regtopk
from benchmarks.slow_network.methods import Method, with_powersgd
from regtopk.core.codes import full_message_bytes

EVERY = {
    "dense": 1,
    "fp16": 1,
    "powersgd": 1,
    "diloco": 16,
    "updates:2": 2,
    "updates:4": 4,
}  # steps of a round
WORDS = {
    "dense": "DDP, float32",
    "fp16": "DDP, torch's fp16 hook",
    "powersgd": "DDP, torch's PowerSGD hook",
    "diloco": "DiLoCo, dense, every 16 steps",
    "updates:2": "ours, every 2 steps",
    "updates:4": "ours, every 4 steps",
}
BYTES_PER_PARAMETER = 0.008  # of a rank's message, by local step
IMPUTE = 0.35
VALUE_CODE = "4bit"
SentBytes = Callable[[], float]  # from a rank, by local step


class Joined(NamedTuple):
    """What computes the loss, the bytes a rank says it sends in a local step, and the exchange of updates."""

    model: nn.Module
    sent_bytes: SentBytes
    exchange: regtopk.UpdateExchange | None = None


def every_of(name: str) -> int:
    """Steps of a round; "updates:4:delay=1:fragments=2" has 4."""
    return EVERY[name] if name in EVERY else int(name.split(":")[1])


def join(name: str, network: nn.Module, optimizer: Optimizer, powersgd_dense_steps: int) -> Joined:
    """A method's way to train a network."""
    if every_of(name) > 1:
        return _exchanging_updates(name, network, optimizer)
    if name == "powersgd":
        model, moved = with_powersgd(network, powersgd_dense_steps)
    else:
        model, moved = Method.parse(name).wrap(network)
    return Joined(model, lambda: moved()[0])


def _exchanging_updates(name: str, network: nn.Module, optimizer: Optimizer) -> Joined:
    every, turns = every_of(name), _turns(name)
    if name == "diloco":
        exchange = regtopk.UpdateExchange(network, optimizer, regtopk.Dense(), every=every, outer=nesterov)
    else:
        numel = sum(p.numel() for p in network.parameters())
        density = num_entries(numel, every) / numel
        topk = regtopk.TopK(density=density, value_code=VALUE_CODE, impute=IMPUTE)
        exchange = regtopk.UpdateExchange(network, optimizer, topk, every=every, **turns)
    num_turns = turns.get("fragments", 1)
    return Joined(network, lambda: exchange.last_step.sent_bytes * num_turns / every, exchange)


def _turns(name: str) -> dict[str, Any]:
    """The delay and the fragments that a name has."""
    return {key: int(number) for key, _, number in (word.partition("=") for word in name.split(":")[2:])}


def nesterov(parameters: list[nn.Parameter]) -> Optimizer:
    """DiLoCo's outer optimizer."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def num_entries(numel: int, every: int) -> int:
    """The most entries whose message keeps to `BYTES_PER_PARAMETER`, by bisection."""
    codes: dict[str, Any] = {"dtype": torch.float32, "value_code": VALUE_CODE, "index_code": "elias-fano"}
    low, high = 1, numel
    while low < high:
        middle = (low + high + 1) // 2
        fits = full_message_bytes(middle, numel, **codes) <= BYTES_PER_PARAMETER * every * numel
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
