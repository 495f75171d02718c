"""Training by real processes: a method, and dense beside it, on digits or on a text.

Every rank trains a network on its own mini-batches. Dense is DistributedDataParallel as it is. The method is
the same with `regtopk.attach` where gradients are exchanged, and a plain model with `regtopk.UpdateExchange`
where updates are.
"""

import gc
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from regtopk.distributed.steps.handshake import refuse_oracles
from regtopk.errors import MissingExtraError
from regtopk.lab.experiments.compare.comparison import exchanged
from regtopk.lab.experiments.experiment import Progress, WholeExperiment
from regtopk.lab.experiments.ranks.config import DENSE, TrainConfig
from regtopk.lab.experiments.ranks.digits import DigitsOnRank
from regtopk.lab.experiments.ranks.launch import emit, join_group, launch
from regtopk.lab.experiments.ranks.results import panels, summarise
from regtopk.lab.experiments.ranks.tasks import GptOnRank, save_examples
from regtopk.lab.experiments.ranks.training import RankTask, RankTraining
from regtopk.lab.method import Method
from regtopk.lab.runs import Record


def run(config: TrainConfig, progress: Progress) -> Iterator[Record]:
    """Train in new processes; yield what they measured, every few steps."""
    methods = DENSE, config.method
    refuse_oracles(config.build(config.method))
    if config.task == "digits" and find_spec("sklearn") is None:
        raise MissingExtraError("the digits come with scikit-learn: pip install 'regtopk[experiments]'")
    num_records = sum(len(config.record_steps(method)) for method in methods)
    with tempfile.TemporaryDirectory() as folder:
        examples = Path(folder) / "examples.pt"
        if config.task == "gpt":
            save_examples(replace(config.simulated, device="cpu"), examples)
        settings = {"config": asdict(config), "examples": str(examples)}
        records = launch(train_rank, settings, config.num_workers)
        for done, record in enumerate(records, start=1):
            progress(done / num_records)
            yield record


# What follows runs on every rank.


def train_rank(settings: Mapping[str, Any]) -> None:
    """Train with both methods; rank 0 emits the records."""
    config = TrainConfig(**settings["config"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.num_workers))
    device = torch.device(config.device)
    if config.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    join_group("nccl" if config.device == "cuda" else "gloo")
    train_both(config, make_task(config, Path(settings["examples"]), device), device)
    gc.collect()  # the models go first: what still holds the group would keep its threads into Python's exit
    dist.destroy_process_group()


def make_task(config: TrainConfig, examples: Path, device: torch.device) -> RankTask:
    """What this rank learns."""
    if config.task == "gpt":
        return GptOnRank(config.simulated, examples, device)
    return DigitsOnRank(config, device)


def train_both(config: TrainConfig, task: RankTask, device: torch.device) -> None:
    """Dense, then the method, on the group that there is."""
    for method in (DENSE, config.method):
        algorithm = None if method is DENSE else config.build(method)
        trainings = [RankTraining(task, config, method, algorithm, seed) for seed in range(config.num_seeds)]
        for step in range(config.num_steps + 1):
            if step in config.record_steps(method):
                record = make_record(config, method, trainings, device)
                if dist.get_rank() == 0:
                    emit(record)
            if step < config.num_steps:
                for training in trainings:
                    training.step()


def make_record(
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
        "lr": method.lr or config.lr,
        **exchanged(config.simulated, method),
        **{name: float(of_seeds.mean()) for name, of_seeds in by_name.items()},
        "loss": by_name["loss"].tolist(),
        **{name: [quality[name] for quality in qualities] for name in next(iter(qualities), {})},
    }


TRAIN = WholeExperiment(
    name="train",
    title="Real training: processes, messages and bytes",
    about=(
        "Processes on this machine, joined by torch.distributed, train a network: once with "
        "DistributedDataParallel as it is (dense), once with the method. It exchanges gradients by one more "
        "line, regtopk.attach, or what the optimizer changed, by regtopk.UpdateExchange. Bytes are what each "
        "worker sends: the method's messages, counted, and a ring all_reduce for dense. Times are medians; "
        "here processes talk through memory, so they do not show what sending less is worth on a network."
    ),
    config=TrainConfig,
    run=run,
    summarise=summarise,
    panels=panels,
)
