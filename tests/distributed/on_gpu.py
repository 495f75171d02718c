"""What users do over NCCL, by two and by four NCCL ranks on one GPU.

    python -m tests.distributed.on_gpu                              # a table; it fails if a check does
    python -m tests.distributed.on_gpu --device cpu --only updates  # the same by gloo's ranks

Parameters must be equal on all ranks, bit for bit, and have the bits that gloo's ranks have on that device.
"""

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import regtopk
from regtopk.distributed.transport.collectives import Collectives
from tests.algorithms.cases import CASES
from tests.distributed.ranks import Ranks
from tests.distributed.sharding import sharded, whole_parameters
from tests.distributed.training import batch, flat_parameters, flip_a_bit, make_net, noted_go_on, refusal
from tests.integrations.scripts import TELL, bits_of, run, script_of
from tests.processes import passes

TIMEOUT_S = 30
TOPK = regtopk.TopK(density=0.1, value_code="4bit")
IMPUTED = regtopk.TopK(density=0.1, value_code="4bit", impute=0.35)
TRAINERS = {  # of docs/trainers.md: the package, and what the script calls its model
    "huggingface": ("transformers", "model"),
    "accelerate": ("accelerate", "accelerator.unwrap_model(model)"),
    "lightning": ("lightning", "module"),
}
UPDATES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (IMPUTED, {"every": 2}),
    "fragments": (IMPUTED, {"every": 4, "fragments": 4}),
    "delay": (TOPK, {"every": 3, "delay": 1}),
    "both": (TOPK, {"every": 4, "fragments": 2, "delay": 1}),
    "returned": (regtopk.TopK(density=0.1, returned=0.05, value_code="4bit"), {"every": 2}),
    "signs": (regtopk.recipes.transformer(2).algorithm, {"every": 2, "fragments": 2, "index_code": "rice"}),
    "dense in 4 bits": (regtopk.Dense(value_code="4bit", sum_code="4bit"), {"every": 2}),
    "an outer optimizer": (TOPK, {"every": 2, "outer": partial(torch.optim.SGD, lr=0.7, momentum=0.9)}),
}


@cache
def gloo() -> Any:
    """All ranks, by gloo."""
    return dist.new_group(backend="gloo")


def agreed_bits(tensor: Tensor) -> str:
    """A digest of what must be the same on all ranks."""
    own = hashlib.sha256(tensor.detach().cpu().numpy().tobytes()).hexdigest()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own, group=gloo())
    assert set(found) == {own}, "ranks differ"
    return own


def check_as_by_gloo(train: Callable[[dist.ProcessGroup | None], Tensor]) -> None:
    """The default group and gloo train to the same bits."""
    assert agreed_bits(train(None)) == agreed_bits(train(gloo()))


def steps(model: nn.Module, optimizers: list[torch.optim.Optimizer], numbers: range, device: str) -> None:
    for number in numbers:
        model.zero_grad()
        model(batch(number).to(device)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def by_gradients(algorithm: Any, device: str, group: dist.ProcessGroup | None, **options: Any) -> Tensor:
    model = DistributedDataParallel(make_net().to(device), process_group=group)
    exchange = regtopk.attach(model, algorithm, **options)
    steps(model, [torch.optim.SGD(model.parameters(), lr=0.1)], range(4), device)
    exchange.detach()
    return flat_parameters(model)


@contextmanager
def updates(
    name: str, device: str, group: dist.ProcessGroup | None
) -> Iterator[tuple[nn.Module, list[torch.optim.Optimizer], regtopk.UpdateExchange]]:
    """A net, what trains it, and its exchange."""
    algorithm, options = UPDATES[name]
    net = make_net().to(device)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(net.parameters(), lr=0.01)]
    if name == "plain":
        matrices = [p for p in net.parameters() if p.ndim == 2]
        others = [p for p in net.parameters() if p.ndim != 2]
        optimizers = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]
    exchange = regtopk.UpdateExchange(net, optimizers, algorithm, process_group=group, **options)
    yield net, optimizers, exchange
    exchange.close()


def by_updates(name: str, device: str, group: dist.ProcessGroup | None) -> Tensor:
    with updates(name, device, group) as (net, optimizers, exchange):
        steps(net, optimizers, range(9), device)
        exchange.finish()
    return flat_parameters(net)


# What is checked, on every rank.


def every_algorithm(device: str) -> None:
    """Through attach, as DDP calls it."""
    for case in CASES:
        if case.is_first and case.name != "global-topk":  # the oracle, which a cluster refuses
            check_as_by_gloo(partial(by_gradients, case.make(), device))


def exchanges_of_updates(device: str) -> None:
    """Muon and AdamW, fragments, delay, sums that come back in part, an outer optimizer."""
    for name in UPDATES:
        check_as_by_gloo(partial(by_updates, name, device))


def sharded_models(device: str) -> None:
    """Gradients and updates of FSDP2's parts; the host goes on without an answer where NCCL lets it."""
    with noted_go_on() as late:
        for kind in ("attach", "updates"):
            model, optimizer, exchange = sharded_job(kind, device)
            steps(model, [optimizer], range(6), device)
            agreed_bits(whole_parameters(model))
            exchange.close()
    assert late.called == (device == "cuda")


def sharded_job(kind: str, device: str) -> tuple[Any, torch.optim.Optimizer, Any]:
    mesh = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh["shard"], make_net().to(device))
    if kind == "attach":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, regtopk.attach(model, TOPK, process_group=mesh["replicate"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"every": 2, "process_group": mesh["replicate"]}
    return model, optimizer, regtopk.UpdateExchange(model, optimizer, TOPK, **options)


def sharded_checkpoints(device: str) -> None:
    """By torch.distributed.checkpoint, to the same bits."""
    found: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(found, group=gloo())
    model, optimizer, exchange = sharded_job("updates", device)
    steps(model, [optimizer], range(3), device)
    save({"exchange": exchange.sharded_state_dict()}, checkpoint_id=found[0])
    resumed, other, second = sharded_job("updates", device)
    second.load_sharded(found[0])
    steps(model, [optimizer], range(3, 6), device)
    steps(resumed, [other], range(3, 6), device)
    assert torch.equal(whole_parameters(model), whole_parameters(resumed))


def a_nan_on_one_rank(device: str) -> None:
    """No rank makes the step, and all go on."""
    model = DistributedDataParallel(make_net().to(device))
    exchange = regtopk.attach(model, TOPK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        optimizer.zero_grad()
        bad = torch.nan if number == 2 and dist.get_rank() == 1 else 1.0
        (bad * model(batch(number).to(device)).square().mean()).backward()
        if not exchange.last_step.num_skipped:
            optimizer.step()
    assert exchange.total.num_skipped == 1 and exchange.num_steps == 3
    assert torch.isfinite(flat_parameters(model)).all()
    agreed_bits(flat_parameters(model))
    exchange.detach()


def a_damaged_message(device: str) -> None:
    net = make_net().to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    exchange = regtopk.UpdateExchange(net, optimizer, TOPK, collective="all_gather")
    with patch.object(Collectives, "all_gather", flip_a_bit):
        kind, text = refusal(lambda: steps(net, [optimizer], range(1), device))
    exchange.close()
    assert kind == "WireFormatError" and text.startswith("message of rank 1 is refused"), (kind, text)


def ranks_that_disagree(device: str) -> None:
    net = make_net().to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    other = regtopk.TopK(density=0.1 if dist.get_rank() else 0.2)
    kind, text = refusal(lambda: regtopk.UpdateExchange(net, optimizer, other))
    assert kind == "ClusterError" and "density" in text, (kind, text)


def a_grad_scaler(device: str) -> None:
    """Losses that are scaled, and one step that overflows on a rank."""
    net = make_net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    exchange = regtopk.UpdateExchange(net, optimizer, TOPK, every=2)
    for number in range(6):
        optimizer.zero_grad()
        scaler.scale(net(batch(number).to(device)).square().mean()).backward()
        if number == 3:
            net.first.weight.grad.fill_(torch.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
    assert exchange.num_steps == 5 and scaler.get_scale() == 512.0
    exchange.finish()
    agreed_bits(flat_parameters(net))
    exchange.close()


def a_compiled_model(device: str) -> None:
    net = make_net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    exchange = regtopk.UpdateExchange(torch.compile(net), optimizer, TOPK, every=2)  # type: ignore[arg-type]
    steps(torch.compile(net), [optimizer], range(4), device)  # type: ignore[arg-type]
    agreed_bits(flat_parameters(net))
    exchange.close()


CHECKS = (
    every_algorithm, exchanges_of_updates, sharded_models, sharded_checkpoints, a_nan_on_one_rank,
    a_damaged_message, ranks_that_disagree, a_grad_scaler, a_compiled_model,
)  # fmt: skip


# What needs other ranks, or ends them.


def train_and_save(device: str, num_steps: int, folder: Path | None) -> Tensor:
    """The parameters after some steps from the last checkpoint on, and a round; saved before that round."""
    with updates("fragments", device, None) as (net, optimizers, exchange):
        with regtopk.Checkpoints(folder) if folder else nullcontext() as checkpoints:
            extra = checkpoints.load(exchange=exchange) if checkpoints else None
            first = extra["step"] if extra else 0
            steps(net, optimizers, range(first, first + num_steps), device)
            if checkpoints:
                checkpoints.save(first + num_steps, exchange=exchange)
        exchange.finish()
    agreed_bits(flat_parameters(net))
    return flat_parameters(net).cpu()


def saved_and_resumed(backend: str, device: str) -> None:
    """Inside a round: on as many ranks with the bits of a run that was not stopped, then on 4, then on 2."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for num_ranks in (2, 2, 4, 2):
            with Ranks(num_ranks, TIMEOUT_S, backend) as ranks:
                found.append(ranks.run(train_and_save, device, 5, Path(folder))[0])
    with Ranks(2, TIMEOUT_S, backend) as ranks:
        assert torch.equal(found[1], ranks.run(train_and_save, device, 10, None)[0])


def train_for_long(device: str) -> None:
    with updates("plain", device, None) as (net, optimizers, _):
        steps(net, optimizers, range(100_000), device)


def a_killed_rank(backend: str, device: str) -> None:
    """The others end with a message, within the group's timeout and some seconds."""
    with Ranks(2, TIMEOUT_S, backend) as ranks:
        running = ranks.start(train_for_long, device)
        time.sleep(15)  # programs compile first
        ranks.kill(1)
        began = time.monotonic()
        try:
            ranks.wait_for(running[:1], timeout_s=TIMEOUT_S + 30)
        except AssertionError as told:
            assert "ClusterError" in str(told), told
            print(f"      told after {time.monotonic() - began:.1f} s: {str(told).strip().splitlines()[-1]}")
        except (EOFError, OSError):  # NCCL's watchdog has ended the rank, and has told why on stderr
            print(f"      ended by NCCL's watchdog after {time.monotonic() - began:.1f} s")


def guides_of_trainers(backend: str, device: str) -> None:
    """The scripts of docs/trainers.md whose packages are installed end with the same bits on both ranks."""
    for framework, (package, model) in TRAINERS.items():
        if find_spec(package) is None:
            print(f"      {package} is not installed")
            continue
        source = script_of(framework) + TELL.format(model=model)
        if device == "cuda":
            source = source.replace('accelerator="cpu",\n    devices=2', "devices=1,\n    num_nodes=2")
        with tempfile.TemporaryDirectory() as folder:
            told = bits_of(run(Ranks(2, TIMEOUT_S, backend), source, Path(folder)))
        assert len(told) == 2 and len(set(told)) == 1, f"{framework}: {told}"
        print(f"      {framework} by {package} {version(package)}: {told[0][:21]}")


ALONE = (saved_and_resumed, a_killed_rank, guides_of_trainers)


def run_checks(device: str, only: list[str], sizes: tuple[int, ...] = (2, 4)) -> bool:
    """Whether all that were asked for pass; each is a line."""
    backend = "nccl" if device == "cuda" else "gloo"
    wanted = [check for check in CHECKS if not only or check.__name__ in only]
    results = []
    for num_ranks in sizes:
        with Ranks(num_ranks, TIMEOUT_S, backend) as ranks:
            for check in wanted:
                name = f"{check.__name__} on {num_ranks} {backend} ranks"
                results.append(passes(name, partial(ranks.run, check, device)))
    for alone in ALONE:
        if not only or alone.__name__ in only:
            results.append(passes(f"{alone.__name__} on {backend} ranks", partial(alone, backend, device)))
    print(f"{sum(results)} of {len(results)} pass")
    return all(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    names = [check.__name__ for check in (*CHECKS, *ALONE)]
    parser.add_argument(
        "--only", action="append", default=[], choices=names, metavar="NAME", help=", ".join(names)
    )
    given = parser.parse_args()
    sys.exit(not run_checks(given.device, given.only))


if __name__ == "__main__":
    main()
