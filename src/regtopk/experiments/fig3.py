"""Figure 3 and its relatives: deep networks trained by simulated workers.

GPU time is scarce, so an experiment runs in slices: any methods and seeds, each adding its runs to the same
folder. A (method, seed) that is finished there is never run again.
"""

import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import torch

from regtopk._version import __version__
from regtopk.core.algorithm import WithDensity
from regtopk.core.words import counted
from regtopk.core.worker import Layout, Worker
from regtopk.errors import ArgumentError
from regtopk.experiments.deep.checkpoints import Checkpoints
from regtopk.experiments.deep.config import DeepConfig
from regtopk.experiments.deep.description import description_of, title_of
from regtopk.experiments.deep.engine import Engine, Quality
from regtopk.experiments.deep.examples import Examples, load_examples
from regtopk.experiments.deep.finding import published_figure
from regtopk.experiments.deep.method import Method
from regtopk.experiments.deep.networks import NETWORKS, PIXELS
from regtopk.experiments.deep.plan import (
    Densities,
    first_params,
    make_engine,
    make_network,
    weights_file,
)
from regtopk.experiments.deep.results import is_finished, panels, summarise
from regtopk.experiments.deep.training import Training
from regtopk.experiments.experiment import Summary
from regtopk.experiments.settings import check_device
from regtopk.experiments.splits import divide
from regtopk.experiments.threads import threads_for
from regtopk.runs import Record, RunWriter, check_holds_no_run, make_header, read_records

PUBLISHED = {"topk": "topk", "regtopk:mu=5": "regtopk"}  # of our methods, in the paper's figure
Say = Callable[[float, str], None]  # the fraction done, and a few words


def record(
    config: DeepConfig,
    folder: Path,
    *,
    command: str,
    resume: bool = False,
    force: bool = False,
    say: Say = lambda fraction, words: None,
) -> Summary:
    """Run what of a slice is not yet in the folder; summarise all that is there."""
    header = make_header(
        "fig3",
        title=title_of(config),
        about=description_of(config),
        command=command,
        config=asdict(config),
        panels=panels(config),
    )
    if not (resume or force):
        check_holds_no_run(folder)  # before the data are read, which takes long
    recorded = read_records(folder) if resume else []
    replace(config, methods=_methods_and_seeds(config, recorded)["methods"])  # refuses one in two spellings
    groups = _open_groups(config, recorded)
    examples = _load(config) if groups else None
    shared = dict(config.protocol)
    if examples is not None:
        contents = {"examples": examples.fingerprint, **_fingerprint_of_weights(config)}
        header["config"] |= contents
        shared |= contents
    with _kernels(config), threads_for(0 if examples is None else _num_entries(config, examples)):
        densities = {} if examples is None else _densities(config, examples, groups)
        with RunWriter(folder, header, force=force, resume=resume, shared=shared) as writer:
            checkpoints = Checkpoints(folder, shared)
            if not writer.is_continued:
                checkpoints.clear()
            done = read_records(folder)
            writer.configure(_methods_and_seeds(config, done))
            if examples is not None:
                for new in _run(config, checkpoints, examples, densities, _open_groups(config, done), say):
                    writer.add(new)
            summary = summarise(config, read_records(folder))
            writer.finish(summary)
    return summary


def _densities(
    config: DeepConfig, examples: Examples, groups: list[tuple[Method, list[int]]]
) -> dict[str, float | None]:
    """Of all methods to run, before anything is written: bytes may be too few for one of them."""
    densities = Densities(config, examples)
    return {method.label: densities.of(method) for method in dict.fromkeys(method for method, _ in groups)}


def _methods_and_seeds(config: DeepConfig, records: list[Record]) -> dict[str, str]:
    """As settings: those of this slice, and of the slices before."""
    methods = [*(record["method"] for record in records), *(m.label for m in config.parsed_methods)]
    seeds = sorted({*(record["seed"] for record in records), *config.parsed_seeds})
    is_count = seeds == list(range(len(seeds)))
    which = "".join(f"{seed}," for seed in seeds)
    return {"methods": ",".join(dict.fromkeys(methods)), "seeds": str(len(seeds)) if is_count else which}


def _open_groups(config: DeepConfig, records: list[Record]) -> list[tuple[Method, list[int]]]:
    """What is still to be run: methods, each with the seeds that are trained at once."""
    groups = []
    for method in config.parsed_methods:
        seeds = [s for s in config.parsed_seeds if not is_finished(records, config, method.label, s)]
        for first in range(0, len(seeds), config.side_by_side):
            groups.append((method, seeds[first : first + config.side_by_side]))
    return groups


def _load(config: DeepConfig) -> Examples:
    """The data; what cannot be run is refused here, before anything is written."""
    check_device(config.device)
    examples = load_examples(config.data_set, config.data, config.device, PIXELS.get(config.network))
    network = make_network(config, examples.num_classes, config.parsed_seeds[0]).to(config.device)
    try:
        with torch.no_grad():
            network(examples.read(examples.train[:2], config.image_size, torch.float32))
    except (RuntimeError, ArgumentError) as error:
        raise ArgumentError(
            f"network must take examples of data_set {config.data_set!r}, got {config.network!r}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    _check_fits(config, examples)
    return examples


def _fingerprint_of_weights(config: DeepConfig) -> dict[str, str]:
    """Of the file to start from, if there is one: another under the same name is another start."""
    path = weights_file(config)
    return {} if path is None else {"weights_sha256": sha256(path.read_bytes()).hexdigest()[:16]}


def _num_entries(config: DeepConfig, examples: Examples) -> int:
    """J, without making the weights."""
    with torch.device("meta"):
        network = NETWORKS[config.network](examples.num_classes)
    return sum(p.numel() for p in network.parameters())


def _check_fits(config: DeepConfig, examples: Examples) -> None:
    """Refuse a split that these examples do not have, and a k that is larger than the network."""
    divide(examples.labels, config.num_workers, config.split, config.parsed_seeds[0])
    anyone = torch.ones(()), torch.zeros((), dtype=torch.int64), config.num_workers, 0
    worker = Worker(*anyone, Layout.anonymous(_num_entries(config, examples)))
    for method in config.parsed_methods:
        algorithm = method.algorithm(config.density, config.value_code)
        if isinstance(algorithm, WithDensity):
            algorithm.num_selected(worker)


def _run(
    config: DeepConfig,
    checkpoints: Checkpoints,
    examples: Examples,
    densities: dict[str, float | None],
    groups: list[tuple[Method, list[int]]],
    say: Say,
) -> Iterator[Record]:
    engines: dict[int, Engine] = {}
    for place, (method, seeds) in enumerate(groups):
        if len(seeds) not in engines:
            engines[len(seeds)] = make_engine(config, examples, len(seeds))
        start = torch.stack([first_params(config, examples, seed) for seed in seeds])
        engine, density = engines[len(seeds)], densities[method.label]
        training = Training(engine, config, method, density=density, start=start, seeds=seeds)
        say(place / len(groups), f"{method.label}, training")
        for new in _train(config, checkpoints, training, method, seeds):
            fraction = (place + new["step"] / config.num_rounds) / len(groups)
            say(fraction, f"{method.label}, seed {new['seed']}: {new['accuracy']:.1f} %")
            yield new


def _train(
    config: DeepConfig, checkpoints: Checkpoints, training: Training, method: Method, seeds: list[int]
) -> Iterator[Record]:
    """Train one method's seeds to the end, from where a checkpoint of them stands."""
    is_exact = config.device == "cpu" or config.deterministic
    spent_s = checkpoints.load(training, method, seeds) if is_exact else 0.0
    start = time.perf_counter()
    stops = {*range(config.evaluate_every, config.num_rounds, config.evaluate_every), config.num_rounds}
    for stop in sorted(stop for stop in stops if stop > training.num_rounds):
        training.run_until(stop)
        qualities = training.evaluate()
        time_s = spent_s + time.perf_counter() - start
        yield from _records(config, training, method, seeds, qualities, time_s)
        if is_exact:
            checkpoints.save(training, method, seeds, time_s)
    checkpoints.remove(method)


def _records(
    config: DeepConfig,
    training: Training,
    method: Method,
    seeds: list[int],
    qualities: list[Quality],
    time_s: float,
) -> Iterator[Record]:
    """One for each seed; the time of seeds that are trained at once is shared evenly."""
    published = _published(config, method).get(training.num_rounds)
    losses, payloads = training.take_losses(), training.payload_bytes
    for place, seed in enumerate(seeds):
        quality = qualities[place]
        record = {
            "method": method.label,
            "seed": seed,
            "step": training.num_rounds,
            "accuracy": quality.accuracy,
            "test_loss": _or_none(quality.loss),
            "loss": _or_none(losses[place]),
            "density": _density(training),
            "lr": method.lr,
            "payload_bytes": payloads[place],
            "diverged": training.is_diverged[place],
            "time_s": time_s / len(seeds),
            "compress_s": training.compress.total_s / len(seeds),
            "side_by_side": len(seeds),
            "hardware": hardware(config.device),
            "software": f"regtopk {__version__}, torch {torch.__version__}",
        }
        yield record if published is None else {**record, "published": published}


def _or_none(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _published(config: DeepConfig, method: Method) -> dict[int, float]:
    """The paper's accuracy by iteration, for the protocol and the methods it was published of."""
    if not config.is_as_published or method.label not in PUBLISHED:
        return {}
    figure = published_figure()
    return dict(zip(figure["iteration"], figure[PUBLISHED[method.label]], strict=True))


def _density(training: Training) -> float | None:
    algorithm = training.algorithm
    k, density = getattr(algorithm, "k", None), getattr(algorithm, "density", None)
    return density if k is None else k / training.engine.layout.numel


def hardware(device: str) -> str:
    """What a run ran on."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {counted(torch.get_num_threads(), 'thread')}"


@contextmanager
def _kernels(config: DeepConfig) -> Iterator[None]:
    """Reproducible kernels if asked for, fast ones otherwise."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
    was = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.benchmark = not config.deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was[0])
        torch.backends.cudnn.benchmark = was[1]
