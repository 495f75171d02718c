"""What `regtopk plan` says of a method of the race, told what work costs where all ranks share a machine."""

import multiprocessing as mp
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median

import torch

from benchmarks.slow_network.gpt_picked import Picked
from regtopk.core.link import Link
from regtopk.lab.plan.calibrate import (
    IMPUTE,
    calibrate,
    hook_points,
    pass_points,
    request_points,
    sparse_points,
)
from regtopk.lab.plan.costs import Calibration
from regtopk.lab.plan.exchange import Workload, exchange_of
from regtopk.lab.plan.methods import COSTS_OF, FP16, PLANNED, PlannedMethod
from regtopk.lab.plan.predict import step_time_s


def planned(picked: Picked) -> PlannedMethod | None:
    """A method as the planner knows it; None if it does not. Two bytes per gradient are its fp16 hook."""
    method = picked.method
    if picked.is_plain:
        return FP16
    if method.algorithm not in PLANNED:
        return None
    density = method.options.get("density", 1.0)
    assert isinstance(density, float)
    return PlannedMethod.of(method, density, str(method.options.get("value_code", "float32")))


def predicted_step_s(
    picked: Picked, numel: int, num_workers: int, link: Link, costs: Calibration
) -> float | None:
    """The time of a step. gloo takes what lies on a GPU as it takes what does not: by the processor."""
    method = planned(picked)
    if method is None:
        return None
    by_processor = replace(costs, machine={**costs.machine, "device": "cpu"})
    return step_time_s(exchange_of(method, Workload.of_size(numel), num_workers), link, by_processor)


def shared_costs(device: str, num_workers: int, methods: Sequence[Picked]) -> Calibration:
    """What the work of some methods costs while as many processes calibrate at once: the median of theirs."""
    codes = {method.value_code for picked in methods if (method := planned(picked))} - {FP16.value_code}
    codes = {COSTS_OF.get(code, code) for code in codes}
    with ProcessPoolExecutor(num_workers, mp_context=mp.get_context("spawn")) as processes:
        found = list(processes.map(_costs, [device] * num_workers, [sorted(codes)] * num_workers))
    lines = {
        name: {unit: median(costs.lines[name][unit] for costs in found) for unit in line}
        for name, line in found[0].lines.items()
    }
    if device != "cpu":  # vectors come to the host for gloo, whose own costs are the processor's
        lines |= calibrate("cpu", lambda share: None, of=[]).lines
    return Calibration(found[0].machine, lines)


def _costs(device: str, codes: Sequence[str]) -> Calibration:
    torch.set_num_threads(1)  # as a rank has
    sparse = [
        partial(sparse_points, code=code, impute=impute) for code, impute in product(codes, (0.0, IMPUTE))
    ]
    return calibrate(device, lambda share: None, of=[pass_points, *sparse, request_points, hook_points])
