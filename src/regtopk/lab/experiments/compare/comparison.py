"""Methods compared over seeds, in slices: each slice runs some methods and seeds, and adds to one folder.

A (method, seed) that is finished there is never run again. One that was interrupted goes on from its last
checkpoint.
"""

import gc
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from regtopk._version import __version__
from regtopk.core.options import counted
from regtopk.core.traffic import all_reduce_bytes
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.compare.budget import rows_of
from regtopk.lab.experiments.compare.config import CompareConfig, GridAt, MethodAt
from regtopk.lab.experiments.compare.results import description_of, finished_curves, key_of, panels, summarise
from regtopk.lab.experiments.compare.search import SEARCH, Search, tuning_seeds
from regtopk.lab.experiments.experiment import Experiment, Header, Place, ShowProgress, Summary
from regtopk.lab.experiments.settings import check_device, format_seeds, threads_for
from regtopk.lab.experiments.tasks import Problem, Task
from regtopk.lab.experiments.training.optimizers import OPTIMIZERS
from regtopk.lab.experiments.training.trainer import Trainer
from regtopk.lab.method import Method
from regtopk.lab.runs import Record, RunWriter, check_holds_no_run, read_records, reading_from

CHECKPOINTS = "checkpoint-*.pt"
EVERY_S = 60.0  # a checkpoint is written at the first evaluation after so many seconds
MOVED = ("payload_bytes", "sent_bytes", "received_bytes")  # of `core.traffic`, in every record
MOST_AT_ONCE = 1.5e9  # parameters of models trained side by side: with their gradients and states, some 80 GB
Group = tuple[GridAt, list[int]]  # a row, and the seeds of it that are trained at once


@dataclass(frozen=True, kw_only=True)
class Comparison(Experiment[CompareConfig]):
    """An experiment that compares methods over seeds; `extras` are further fields of a record."""

    about: Callable[[CompareConfig], str] = field(default=description_of)
    config: type[CompareConfig] = CompareConfig
    summarise: Callable[[CompareConfig, Sequence[Record]], Summary] = field(default=summarise)
    extras: Callable[[CompareConfig, Method, int], Record] = field(default=lambda config, method, step: {})

    def _record(self, config: CompareConfig, header: Header, place: Place, progress: ShowProgress) -> Summary:
        """Run the part of a slice that the folder does not hold, and summarise all that it holds."""
        folder, force, resume = place
        if not (resume or force):
            check_holds_no_run(folder)  # before the data are read, which takes long
        recorded = read_records(folder) if resume else []
        with reading_from(folder, "continued"):
            finished_curves(config, recorded)
            replace(config, **_all_slices(config, recorded))  # refuses one method in two spellings
            searched = tuning_seeds(recorded)
        for seed in searched & set(config.chosen_seeds):
            raise ArgumentError(f"seeds must not include the one of the search, got {seed}: list others")
        check_device("device", config.device)
        problem = Problem(config)
        header["config"] |= problem.contents
        shared = {**config.shared, **problem.contents}
        numel = problem.task(config.chosen_seeds[: config.kind.num_at_once]).layout.numel

        def train_searched(run: MethodAt, seed: int) -> Iterator[Record]:
            return _train(config, problem.task([seed], is_search=True), run)

        with _kernels(config.deterministic), threads_for(numel):
            rows = rows_of(config, problem)  # before the folder is claimed: bytes may be too few for one
            with RunWriter(folder, header, force=force, resume=resume, shared=shared) as writer:
                for stale in [] if writer.is_continued else [*folder.glob(CHECKPOINTS), folder / SEARCH]:
                    stale.unlink(missing_ok=True)
                done = read_records(folder)
                writer.configure(_all_slices(config, done))
                search = Search(config, folder, done, train_searched)
                for new in self._run(search, problem, _groups(config, rows, done, numel), progress):
                    writer.add(new)
                with reading_from(folder, "summarised"):
                    summary = self.summarise(config, read_records(folder))
                writer.finish(summary)
        return summary

    def _run(
        self, search: Search, problem: Problem, groups: Sequence[Group], progress: ShowProgress
    ) -> Iterator[Record]:
        config, metric = search.config, search.config.kind.metric
        for place, (row, seeds) in enumerate(groups):
            label, num_searched = row.grid.label, search.num_runs(row)
            num_all = num_searched + len(seeds)

            def say(num_done: float, text: str, place: int = place, num_all: int = num_all) -> None:
                progress((place + num_done / num_all) / len(groups), text)

            run, searched = search.pick(row, say)
            say(num_searched, f"{label}, training")
            checkpoint = Checkpoint(search.folder, label, run.density, seeds)
            for new in _train(config, problem.task(seeds), run, checkpoint):
                num_done = num_searched + len(seeds) * new["step"] / config.stops[-1]
                say(num_done, f"{label}, seed {new['seed']}: {metric} {new[metric]:.4g}")
                yield {**new, "method": label, **searched, **self.extras(config, run.method, new["step"])}
            checkpoint.remove()


class Checkpoint:
    """Where the training of a row's seeds stands: a file in the results folder, one for each row."""

    def __init__(self, folder: Path, label: str, density: float | None, seeds: Sequence[int]) -> None:
        self._path = folder / CHECKPOINTS.replace("*", sha256(label.encode()).hexdigest()[:12])
        self._run = {"density": density, "seeds": list(seeds)}
        self._saved_at = time.perf_counter()

    def load(self, trainer: Trainer) -> float:
        """Go on from the file, if it is of this run. Returns the seconds that the training had taken."""
        if not self._path.exists():
            return 0.0
        state = torch.load(self._path, map_location=trainer.models.device, weights_only=True)
        if state["run"] != self._run:
            return 0.0
        trainer.load_state_dict(state["trainer"])
        return float(state["time_s"])

    def save(self, trainer: Trainer, time_s: float) -> None:
        """Replace the file, unless the last one was written less than `EVERY_S` ago."""
        if time.perf_counter() - self._saved_at < EVERY_S:
            return
        new = self._path.with_suffix(".new")
        torch.save({"run": self._run, "trainer": trainer.state_dict(), "time_s": time_s}, new)
        new.replace(self._path)
        self._saved_at = time.perf_counter()

    def remove(self) -> None:
        """The training is done."""
        self._path.unlink(missing_ok=True)


def _all_slices(config: CompareConfig, records: Sequence[Record]) -> dict[str, Any]:
    """The settings that name the methods and seeds of this slice, and of the slices before."""
    labels = [*(record["method"] for record in records), *(grid.label for grid in config.grids)]
    seeds = sorted({*(record["seed"] for record in records), *config.chosen_seeds})
    return {"algorithms": ",".join(dict.fromkeys(labels)), "seeds": format_seeds(seeds)}


def _groups(
    config: CompareConfig, rows: Sequence[GridAt], records: Sequence[Record], numel: int
) -> list[Group]:
    """What is still to be run: rows, each with the seeds that are trained at once."""
    finished = finished_curves(config, records)
    most = max(1, int(MOST_AT_ONCE / (config.num_workers * numel)))
    groups: list[Group] = []
    for row in rows:
        done = finished.get(key_of(config, row.grid.label, row.density), {})
        seeds = [seed for seed in config.chosen_seeds if seed not in done]
        at_once = min(config.kind.num_at_once or len(seeds), most)
        groups += [(row, seeds[first : first + at_once]) for first in range(0, len(seeds), at_once or 1)]
    return groups


def _train(
    config: CompareConfig, task: Task, run: MethodAt, checkpoint: Checkpoint | None = None
) -> Iterator[Record]:
    """Train one method's seeds to the end, from where their checkpoint stands."""
    gc.collect()  # the last training's engine refers to itself, and its graph holds a GPU's memory
    lr = run.method.lr or config.lr[0]
    trainer = Trainer(task, config.build(run), run.method, lr=lr, num_steps=config.stops[-1])
    start = time.perf_counter()
    if checkpoint:
        start -= checkpoint.load(trainer)
    for stop in [stop for stop in config.stops if stop > trainer.num_steps or not trainer.num_steps]:
        trainer.run_until(stop)
        yield from _records(config, trainer, run, start)
        if checkpoint:
            checkpoint.save(trainer, time.perf_counter() - start)


def _records(config: CompareConfig, trainer: Trainer, run: MethodAt, start: float) -> Iterator[Record]:
    """One record per seed. Seeds that are trained at once share the time since the start evenly."""
    method, algorithm, seeds = run.method, trainer.algorithm, trainer.task.seeds
    qualities, losses = trainer.evaluate(), trainer.take_losses()
    time_s = time.perf_counter() - start
    moved, diverged = {name: trainer.moved_bytes(name) for name in MOVED}, trainer.is_diverged.tolist()
    ring_bytes = all_reduce_bytes(4 * trainer.task.layout.numel, trainer.task.num_workers)
    for place, seed in enumerate(seeds):
        yield {
            "method": method.label,
            "algorithm": method.algorithm,
            "options": dict(method.options),
            "seed": seed,
            "step": trainer.num_steps,
            **qualities[place],
            "loss": losses[place],
            "density": run.density,
            "value_code": getattr(algorithm, "value_code", None),
            "index_code": method.index_code,
            "lr": trainer.lr,
            **exchanged(method),
            **{name: counts[place] for name, counts in moved.items()},
            "dense_bytes": trainer.num_steps * ring_bytes,
            "diverged": diverged[place],
            "time_s": time_s / len(seeds),
            "compress_s": trainer.exchange_s / len(seeds),
            "side_by_side": len(seeds),
            "hardware": hardware(config.device),
            "software": f"regtopk {__version__}, torch {torch.__version__}",
        }


def exchanged(method: Method) -> Record:
    """What a method's workers exchange, the optimizer, and which gradients it clips."""
    rounds = method.rounds
    clipped = "each worker's own" if rounds.has_updates else "the aggregate"
    return {
        "exchange": rounds.exchange,
        "every": rounds.told_every,
        "outer": {"name": rounds.outer, **rounds.outer_settings._asdict()} if rounds.has_updates else None,
        "optimizer": method.optimizer,
        "clipped": clipped if OPTIMIZERS[method.optimizer].max_norm else None,
    }


def hardware(device: str) -> str:
    """What a run ran on."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {counted(torch.get_num_threads(), 'thread')}"


@contextmanager
def _kernels(deterministic: bool) -> Iterator[None]:
    """Reproducible kernels if asked for, fast ones otherwise."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
    was = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was[0])
        torch.backends.cudnn.benchmark = was[1]


COMPARE = Comparison(name="compare", title="Methods compared", panels=panels)
