"""Training by real processes: a method, and dense beside it, on digits or on a text.

Every rank trains a network on its own mini-batches. Dense is DistributedDataParallel as it is. The method is
the same with `regtopk.attach` where gradients are exchanged, and a plain model with `regtopk.UpdateExchange`
where updates are.
"""

import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from regtopk.distributed.steps.handshake import refuse_oracles
from regtopk.lab.experiments.compare.comparison import exchanged
from regtopk.lab.experiments.compare.config import MethodAt
from regtopk.lab.experiments.experiment import ShowProgress, WholeExperiment
from regtopk.lab.experiments.ranks.config import DENSE, TrainConfig
from regtopk.lab.experiments.ranks.launch import Emit, join_group, launch
from regtopk.lab.experiments.ranks.results import panels, summarise
from regtopk.lab.experiments.ranks.tasks import load_task, save_examples
from regtopk.lab.experiments.ranks.training import RankTraining
from regtopk.lab.method import Method
from regtopk.lab.runs import Record


def run(config: TrainConfig, progress: ShowProgress) -> Iterator[Record]:
    """Train in new processes; yield what they measured, every few steps."""
    for method in config.methods:
        refuse_oracles(config.build(MethodAt(method, config.densities[0])))
    num_records = sum(len(config.record_steps(method)) for method in (DENSE, *config.methods))
    with tempfile.TemporaryDirectory() as folder:
        examples = Path(folder) / "examples.pt"
        save_examples(config, examples)
        for done, record in enumerate(launch(train_rank, config.num_workers, config, examples), start=1):
            progress(done / num_records)
            yield record


# What follows runs on every rank.


def train_rank(emit: Emit, config: TrainConfig, examples: Path) -> None:
    """Train with dense and with each method; rank 0 emits the records."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.num_workers))
    device = torch.device(config.device)
    if config.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    join_group("nccl" if config.device == "cuda" else "gloo")
    for method in (DENSE, *config.methods):
        _train(emit, config, method, examples, device)
    gc.collect()  # the models go first: what still holds the group would keep its threads into Python's exit
    dist.destroy_process_group()


def _train(emit: Emit, config: TrainConfig, method: Method, examples: Path, device: torch.device) -> None:
    tasks = [load_task(config, examples, seed, device) for seed in config.chosen_seeds]
    trainings = [RankTraining(task, config, method, is_plain_ddp=method is DENSE) for task in tasks]
    for step in range(config.num_steps + 1):
        if step in config.record_steps(method):
            record = _make_record(config, method, trainings, device)
            if dist.get_rank() == 0:
                emit(record)
        if step < config.num_steps:
            for training in trainings:
                training.step()


def _make_record(
    config: TrainConfig, method: Method, trainings: Sequence[RankTraining], device: torch.device
) -> Record:
    """How good every seed is, on rank 0; losses as means over ranks; bytes and times over seeds too."""
    qualities = [t.evaluate() for t in trainings] if dist.get_rank() == 0 else []
    measured = [training.measure() for training in trainings]
    names = list(measured[0])
    means = torch.tensor([[m[name] for name in names] for m in measured], dtype=torch.float64, device=device)
    means /= dist.get_world_size()
    dist.all_reduce(means)
    by_name = dict(zip(names, means.T.cpu(), strict=True))
    return {
        "method": method.label,
        "step": trainings[0].num_steps,
        "lr": method.lr or config.lr[0],
        **exchanged(config, method),
        **{name: float(of_seeds.mean()) for name, of_seeds in by_name.items()},
        "loss": by_name["loss"].tolist(),
        **{name: [quality[name] for quality in qualities] for name in next(iter(qualities), {})},
    }


TRAIN = WholeExperiment(
    name="train",
    title="Real training: processes, messages and bytes",
    about=(
        "Processes on this machine train a network: with DistributedDataParallel as it is (dense), and with "
        "each method, which exchanges gradients by regtopk.attach, or what the optimizer changed by "
        "regtopk.UpdateExchange. Bytes are what each worker sends: the method's messages, counted, and a "
        "ring all_reduce for dense. Times are medians. Processes of one machine talk through memory, so "
        "times do not show what sending less is worth on a network."
    ),
    config=TrainConfig,
    run=run,
    summarise=summarise,
    panels=panels,
)
