"""Which links can this machine shape, and how well? An answer in seconds, before a race is begun."""

import os
import shutil
from collections.abc import Iterator

import torch

from benchmarks.slow_network.gpt_table import link_words
from benchmarks.slow_network.launch import launch
from benchmarks.slow_network.links import links_of, why_no_kernel_links
from benchmarks.slow_network.results import hardware


def lines(num_workers: int, bandwidth: float, latency_s: float) -> Iterator[str]:
    """The machine, and known transfers on links of each kind that it has."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    yield f"machine: {hardware()}, {gpu}, torch {torch.__version__}, user {os.geteuid()}"
    yield f"iproute2: ip {shutil.which('ip') or 'missing'}, tc {shutil.which('tc') or 'missing'}"
    missing = {latency: why_no_kernel_links(latency) for latency in sorted({0.0, latency_s})}
    for latency, reason in missing.items():
        yield f"kernel's links with a latency of {latency:g} s: {reason or 'yes'}"
    kernel = [("tc", latency) for latency, reason in missing.items() if reason is None][-1:]
    for shaper, latency in [*kernel, ("relay", latency_s)]:
        with links_of(num_workers, latency, shaper) as links:
            job = {"bandwidths_bits_per_s": [bandwidth], "latency_s": latency}
            for row in launch("benchmarks.slow_network.link_check", job, links):
                yield f"{shaper}, {num_workers} ranks, latency {latency:g} s: {link_words(row)}"
