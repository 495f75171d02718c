"""Is compression worth it on a slow network? Measured on links that really are that slow.

    python -m benchmarks.slow_network probe      which links this machine can shape, and how well, in seconds
    python -m benchmarks.slow_network steps      how long a step takes with each method on each link
    python -m benchmarks.slow_network accuracy   how long training to the same accuracy takes
    python -m benchmarks.slow_network gpt        how long a GPT takes to the same loss with each method
    python -m benchmarks.slow_network delays     what a delay hides of a slow link, and what it costs
    python -m benchmarks.slow_network clean      remove what killed runs left behind

N processes, joined by shaped links, train with DDP over gloo. Links are the kernel's, between network
namespaces, where it is Linux with root and iproute2; else a process passes bytes on. No network interface is
touched but those made here. See README.md beside this file.
"""

import argparse
import shlex
import sys

from benchmarks.slow_network import delays, probe
from benchmarks.slow_network.gpt_race import GptRace
from benchmarks.slow_network.launch import launch
from benchmarks.slow_network.links import links_of
from benchmarks.slow_network.memory import check_memory
from benchmarks.slow_network.namespaces import (
    NetworkError,
    check_possible,
    left_behind,
    remove,
    signals_raise,
)
from benchmarks.slow_network.options import parser
from benchmarks.slow_network.race import Race
from benchmarks.slow_network.results import Results, accuracy_table, step_table
from regtopk.errors import RegtopkError

INTERRUPTED = 130


def main(words: list[str] | None = None) -> int:
    assert __doc__ is not None
    words = sys.argv[1:] if words is None else words
    options = parser(__doc__).parse_args(words)
    command = "python -m benchmarks.slow_network " + shlex.join(words)
    try:
        with signals_raise():
            MEASUREMENTS[options.measurement](options, command)
    except (NetworkError, RegtopkError) as error:
        print(f"slow_network: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("slow_network: interrupted; the namespaces are removed", file=sys.stderr)
        return INTERRUPTED
    return 0


def measure_steps(options: argparse.Namespace, command: str) -> None:
    results = Results(options.out, command)
    check_memory(max(options.workers), options.model)
    for num_workers in options.workers:
        job = {
            "model": options.model,
            "methods": options.methods,
            "bandwidths_bits_per_s": options.links,
            "latency_s": options.latency,
            "seconds": options.seconds,
            "least_steps": options.least_steps,
            "most_steps": options.most_steps,
        }
        with links_of(num_workers, options.latency, options.shaper) as links:
            for row in launch("benchmarks.slow_network.step_time", job, links):
                results.add("steps", {**row, "shaper": links.shaper})
                print(step_table([row]).splitlines()[-1], file=sys.stderr, flush=True)
    print(step_table(results.content["steps"]))


def measure_accuracy(options: argparse.Namespace, command: str) -> None:
    race = Race(options, Results(options.out, command))
    with links_of(options.workers, shaper=options.shaper) as links:
        race.try_dense(links)
        race.try_methods(links)
        race.run_on_link(links)
    print(accuracy_table(race.results.content["time_to_accuracy"]))


def measure_gpt(options: argparse.Namespace, command: str) -> None:
    print(GptRace(options, command).run())


def measure_delays(options: argparse.Namespace, command: str) -> None:
    print(delays.measure(options, command))


def measure_links(options: argparse.Namespace, command: str) -> None:
    for line in probe.lines(options.workers, options.link, options.latency):
        print(line, flush=True)


def clean(options: argparse.Namespace, command: str) -> None:
    check_possible()
    names = left_behind()
    remove(names)
    print(f"removed {', '.join(names)}" if names else "nothing was left behind")


MEASUREMENTS = {
    "probe": measure_links,
    "steps": measure_steps,
    "accuracy": measure_accuracy,
    "gpt": measure_gpt,
    "delays": measure_delays,
    "clean": clean,
}


if __name__ == "__main__":
    sys.exit(main())
