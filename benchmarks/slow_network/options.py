"""The command line: what is understood, and how nonsense is refused."""

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.slow_network.links import SHAPERS
from benchmarks.slow_network.methods import ACCURACY_METHODS, STEP_METHODS, Method
from benchmarks.slow_network.models import MODELS
from regtopk.errors import ArgumentError
from regtopk.lab.plan.units import parse_bandwidth, parse_time

SHAPER = (
    "tc: the kernel's links, between namespaces; relay: a process that all bytes pass; auto: tc where it can"
)


def parser(description: str) -> argparse.ArgumentParser:
    """Of all measurements."""
    whole = argparse.ArgumentParser(
        prog="python -m benchmarks.slow_network",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = whole.add_subparsers(required=True, metavar="MEASUREMENT", dest="measurement")
    shown = argparse.ArgumentDefaultsHelpFormatter
    steps = parts.add_parser("steps", help="step time of every method on every link", formatter_class=shown)
    accuracy = parts.add_parser(
        "accuracy",
        help="time of every method to one point below dense's accuracy on Fashion-MNIST",
        description="Learning rates are tried on the unshaped link first. Rows in --out are not run again.",
        formatter_class=shown,
    )
    gpt = parts.add_parser(
        "gpt",
        help="time of every method to a test loss of a GPT, as picked in the simulator",
        description="Methods, learning rates and steps come from folders of `regtopk compare gpt`. What is "
        "in --out is not run again.",
        formatter_class=shown,
    )
    probe = parts.add_parser("probe", help="which links this machine can shape, and how well")
    add_probe_options(probe)
    delays = parts.add_parser(
        "delays",
        help="what a delay hides of a slow link, and what fragments do to its peaks",
        formatter_class=shown,
    )
    add_delay_options(delays)
    parts.add_parser("clean", help="remove what killed runs left behind")
    add_step_options(steps)
    add_accuracy_options(accuracy)
    add_gpt_options(gpt)
    for part in (steps, accuracy, gpt, delays):
        part.add_argument("--out", type=Path, help="JSON file to add the rows to")
        part.add_argument("--shaper", choices=SHAPERS, default="auto", help=SHAPER)
    return whole


def add_step_options(part: argparse.ArgumentParser) -> None:
    part.add_argument("--workers", type=num_workers, nargs="+", default=[2, 4], metavar="N", help="how many")
    links = "bandwidth each way, such as 10Mbit or 1.5G, or 'unshaped'"
    every = [10e6, 100e6, 1e9, None]
    part.add_argument("--links", type=bandwidth, nargs="+", default=every, metavar="BANDWIDTH", help=links)
    part.add_argument("--latency", type=latency, default=0.0, help="one way, such as 5ms")
    add_methods(part, STEP_METHODS)
    part.add_argument("--model", choices=sorted(MODELS), default="resnet18", help="whose parameters")
    part.add_argument("--seconds", type=above_zero, default=5.0, help="for one method on one link")
    part.add_argument("--least-steps", type=at_least_one, default=1, help="even if they take longer")
    part.add_argument("--most-steps", type=at_least_one, default=20, help="even if there is time")


def add_accuracy_options(part: argparse.ArgumentParser) -> None:
    part.add_argument("--workers", type=num_workers, default=4, metavar="N", help="how many")
    part.add_argument("--link", type=bandwidth, default=100e6, metavar="BANDWIDTH", help="each way")
    add_methods(part, ACCURACY_METHODS)
    lrs = [0.4, 0.8, 0.2, 0.1]
    part.add_argument("--lrs", type=above_zero, nargs="+", default=lrs, metavar="LR", help="that all try")
    part.add_argument("--steps", type=at_least_one, default=200, help="of every run")
    part.add_argument("--batch-size", type=at_least_one, default=32, help="of one worker")
    part.add_argument("--evaluate-every", type=at_least_one, default=10, metavar="STEPS", help="a divisor")
    part.add_argument(
        "--data", type=Path, help="folder of Fashion-MNIST; None: where Debian's package puts it"
    )


def add_gpt_options(part: argparse.ArgumentParser) -> None:
    part.add_argument(
        "--picked", type=Path, nargs="+", required=True, metavar="DIR", help="recorded by compare"
    )
    part.add_argument(
        "--only", nargs="+", default=[], metavar="METHOD", help="of these, in the record's words"
    )
    part.add_argument("--target-of", default="dense", metavar="METHOD", help="whose curve sets the target")
    part.add_argument("--target-at", type=share, default=0.75, metavar="SHARE", help="of that method's steps")
    part.add_argument("--link", type=slow_link, default=100e6, metavar="BANDWIDTH", help="each way")
    part.add_argument("--latency", type=latency, default=0.02, help="one way")
    part.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="that all ranks share")
    most = "a method that takes longer is timed, not trained"
    part.add_argument("--most-seconds", type=above_zero, default=90.0, metavar="S", help=most)
    timed = "of such a method, and whole rounds"
    part.add_argument("--timed-steps", type=at_least_one, default=16, metavar="STEPS", help=timed)
    part.add_argument(
        "--calibration", type=Path, help="of `regtopk plan`; None: measured by all ranks at once"
    )
    part.add_argument("--data", default="", help="a text file; empty: the record's")


def add_probe_options(part: argparse.ArgumentParser) -> None:
    part.add_argument("--workers", type=num_workers, default=8, metavar="N", help="how many")
    part.add_argument("--link", type=slow_link, default=100e6, metavar="BANDWIDTH", help="each way")
    part.add_argument("--latency", type=latency, default=0.02, help="one way")


def add_delay_options(part: argparse.ArgumentParser) -> None:
    part.add_argument("--workers", type=num_workers, default=4, metavar="N", help="how many")
    part.add_argument("--quick", action="store_true", help="a minute: no result")
    part.add_argument("--data", type=Path, help="a text file; None: sources of Python's library")


def add_methods(part: argparse.ArgumentParser, default: tuple[str, ...]) -> None:
    words = "NAME[:DENSITY[:VALUE_CODE[:all_gather|split]]]"
    part.add_argument("--methods", type=method, nargs="+", default=default, metavar="METHOD", help=words)


def num_workers(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"workers must be a whole number in 2..64, got {text!r}")
    return int(text)


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


def share(text: str) -> float:
    number = above_zero(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"must be a share of at most 1, got {text!r}")
    return number


def bandwidth(text: str) -> float | None:
    with refused():
        return None if text == "unshaped" else parse_bandwidth(text)


def slow_link(text: str) -> float:
    with refused():
        return parse_bandwidth(text)


def latency(text: str) -> float:
    with refused():
        return parse_time("latency", text, may_be_zero=True)


def method(text: str) -> str:
    with refused():
        Method.parse(text)
    return text


@contextmanager
def refused() -> Iterator[None]:
    """argparse shows the message of its own error alone."""
    try:
        yield
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
