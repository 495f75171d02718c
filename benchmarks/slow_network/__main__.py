"""Is compression worth it on a slow network? Measured on links that really are that slow.

    python -m benchmarks.slow_network steps      how long a step takes with each method on each link
    python -m benchmarks.slow_network clean      remove what killed runs left behind

N processes in N network namespaces, joined by shaped links, train with DDP over gloo. Needs Linux, root and
iproute2; touches no network interface but those it makes. See README.md beside this file.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.slow_network.launch import launch
from benchmarks.slow_network.links import Links
from benchmarks.slow_network.memory import check_memory
from benchmarks.slow_network.methods import DEFAULTS, Method
from benchmarks.slow_network.models import MODELS
from benchmarks.slow_network.namespaces import (
    Namespaces,
    NetworkError,
    check_possible,
    left_behind,
    remove,
    signals_raise,
)
from benchmarks.slow_network.results import Results, table
from regtopk.errors import ArgumentError
from regtopk.plan.units import parse_bandwidth, parse_time

INTERRUPTED = 130


def main(words: list[str] | None = None) -> int:
    options = parser().parse_args(words)
    command = "python -m benchmarks.slow_network " + " ".join(sys.argv[1:] if words is None else words)
    try:
        check_possible()
        with signals_raise():
            options.run(options, command)
    except (NetworkError, ArgumentError) as error:
        print(f"slow_network: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("slow_network: interrupted; the namespaces are removed", file=sys.stderr)
        return INTERRUPTED
    return 0


def parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    whole = argparse.ArgumentParser(
        prog="python -m benchmarks.slow_network",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = whole.add_subparsers(required=True, metavar="MEASUREMENT")
    steps = parts.add_parser("steps", help="step time of every method on every link")
    steps.add_argument("--workers", type=num_workers, nargs="+", default=[2, 4], metavar="N")
    steps.add_argument(
        "--links",
        type=bandwidth,
        nargs="+",
        default=[1e7, 1e8, 1e9, None],
        metavar="BANDWIDTH",
        help="such as 10Mbit, 1.5G, 'unshaped' (default: 10Mbit 100Mbit 1Gbit unshaped)",
    )
    steps.add_argument("--latency", type=latency, default=0.0, help="one way, such as 5ms (default: none)")
    steps.add_argument(
        "--methods",
        type=method,
        nargs="+",
        default=DEFAULTS,
        metavar="METHOD",
        help=f"NAME[:DENSITY[:VALUE_CODE[:all_gather|split]]] (default: {' '.join(DEFAULTS)})",
    )
    steps.add_argument("--model", choices=sorted(MODELS), default="resnet18", help="whose parameters")
    steps.add_argument("--seconds", type=float, default=5.0, help="for one method on one link (default: 5)")
    steps.add_argument("--least-steps", type=int, default=1, help="even if they take longer (default: 1)")
    steps.add_argument("--most-steps", type=int, default=20, help="even if there is time (default: 20)")
    steps.add_argument("--out", type=Path, help="JSON file to add the rows to")
    steps.set_defaults(run=measure_steps)
    parts.add_parser("clean", help="remove what killed runs left behind").set_defaults(run=clean)
    return whole


def measure_steps(options: argparse.Namespace, command: str) -> None:
    results = Results(options.out, command)
    for count in options.workers:
        check_memory(count, options.model)
        job = {
            "model": options.model,
            "methods": options.methods,
            "bandwidths_bits_per_s": options.links,
            "latency_s": options.latency,
            "seconds": options.seconds,
            "least_steps": options.least_steps,
            "most_steps": options.most_steps,
        }
        with links_of(count, options.latency) as links:
            for row in launch("benchmarks.slow_network.step_time", job, links):
                results.add("steps", row)
                print(table([row]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(results.content["steps"]))


def clean(options: argparse.Namespace, command: str) -> None:
    names = left_behind()
    remove(names)
    print(f"removed {', '.join(names)}" if names else "nothing was left behind")


@contextmanager
def links_of(count: int, latency_s: float = 0.0) -> Iterator[Links]:
    """Links that are removed whatever happens."""
    links = Links(Namespaces(count), latency_s)
    try:
        links.add()
        yield links
    finally:
        links.remove()


def num_workers(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"workers must be a whole number in 2..64, got {text!r}")
    return int(text)


def bandwidth(text: str) -> float | None:
    with refused():
        return None if text == "unshaped" else parse_bandwidth(text)


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


if __name__ == "__main__":
    sys.exit(main())
