"""Measures what work costs on this machine: passes, selection, coding, hooks, on CPUs gloo's collectives.

The algorithms, the driver and the codes run for one rank of a cluster whose other ranks are copies of it, so
nothing travels. gloo's collectives run between two processes over loopback; NCCL's are assumed (`link`). The
names and units of work are those of `exchange`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from regtopk.algorithms.topk import TopK
from regtopk.core.algorithm import Conversation
from regtopk.core.codes import quantise
from regtopk.core.requests import DenseSum, Gather, Request
from regtopk.core.timer import Timer
from regtopk.core.worker import Layout, Worker
from regtopk.distributed.options import Options
from regtopk.distributed.requests.rank import Rank, SumBuffer
from regtopk.distributed.state.parameters import Parameters
from regtopk.distributed.steps import driver
from regtopk.distributed.steps.step import Kind, Steps
from regtopk.distributed.transport.collectives import Alone, Collectives, group_or_default
from regtopk.errors import ClusterError
from regtopk.lab.launch import Emit, join_group, launch
from regtopk.lab.plan.costs import Calibration, describe_machine, fit
from regtopk.lab.plan.exchange import BUCKET_BYTES, MIDDLE_NUMEL, POWERSGD_RANK, Work, move_work, numel_units
from regtopk.lab.plan.link import Move, all_gather, all_reduce, all_to_all
from regtopk.lab.plan.methods import CODES

NUM_PROCESSES = 2  # that collectives run between
Point = tuple[Work, float]  # some work, and the seconds it took
Case = Callable[[torch.device], Iterator[Point]]

SMALL_NUMEL, LARGE_NUMEL = 2**20, 2**24
ON_GPU = 8  # times as many entries: launches would take longer than the work of fewer
# of sparse sums: N, J and k
SPARSE_SIZES = (
    (2, SMALL_NUMEL, 2**10), (8, SMALL_NUMEL, 2**16), (8, MIDDLE_NUMEL, 2**13), (2, MIDDLE_NUMEL, 2**17),
    (2, LARGE_NUMEL, 2**14),
)  # fmt: skip
MODELS = ((1024, 4), (256, 32), (1024, 12))  # width and depth of chains of matrices
IMPUTE = 0.35  # any: imputation takes as long with others
_SMALL_BYTES, _MESSAGE_BYTES = 64, 2**20
_NUM_CALLS, _NUM_REPEATS, _ENOUGH_S = 24, 7, 0.3


class Echo(Alone):
    """The collectives of rank 0 of N, whose other ranks send the same."""

    def __init__(self, num_workers: int) -> None:
        super().__init__()
        self.num_workers, self.ranks = num_workers, list(range(num_workers))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """N copies of the tensor."""
        return tensor.repeat(self.num_workers, 1)

    def all_to_all(self, parts: Sequence[Tensor], sizes: list[int]) -> list[Tensor]:
        """N copies of the part for rank 0."""
        return [parts[0]] * self.num_workers


def typical(run: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The median of each phase's seconds in a few runs, after one to warm up; in fewer if that is long."""
    run()
    times: list[dict[str, float]] = []
    spent_s = 0.0
    while len(times) < _NUM_REPEATS and (len(times) < 2 or spent_s < _ENOUGH_S):
        times.append(run())
        spent_s += sum(times[-1].values())
    return {phase: median(seconds[phase] for seconds in times) for phase in times[0]}


def _seconds(device: torch.device, function: Callable[[], Any]) -> dict[str, float]:
    timer = Timer(device)
    with timer.phase("all_s"):
        function()
    return timer.seconds()


def _rank_seconds(device: torch.device, N: int, converse: Callable[[], Conversation]) -> tuple[float, float]:
    """How long a rank takes for a conversation: the algorithm's own work, and coding and summing."""
    rank = Rank(Echo(N), torch.full((N,), 1 / N, dtype=torch.float64), Options(collective="all_gather"))
    sums = SumBuffer()

    def run() -> dict[str, float]:
        rank.begin(device)
        with rank.timer.phase("select_s"):
            driver.converse(rank, [converse()], [sums])
        rank.raise_refusals()
        sums.spare = sums.total  # reused, as in an exchange
        return rank.timer.seconds()

    seconds = typical(run)
    return seconds["select_s"], seconds["encode_s"] + seconds["decode_s"]


def pass_points(device: torch.device) -> Iterator[Point]:
    """A pass over a vector: two are read, one is written. On a GPU, which joins as it copies, a copy."""
    for size in (SMALL_NUMEL, MIDDLE_NUMEL, LARGE_NUMEL):
        numel = size * (ON_GPU if device.type == "cuda" else 1)
        one, other = (torch.randn(numel, device=device) for _ in range(2))
        out = torch.zeros_like(one)
        run = partial(out.copy_, one) if device.type == "cuda" else partial(torch.sub, one, other, out=out)
        yield Work("pass", numel_units(numel)), typical(partial(_seconds, device, run))["all_s"]


def sparse_points(device: torch.device, code: str, impute: float) -> Iterator[Point]:
    """Top-k on a standard normal gradient: selecting, and coding and summing messages."""
    name = f"{code} senders" if impute else code
    times = ON_GPU if device.type == "cuda" else 1
    for N, numel, k in ((N, times * numel, times * k) for N, numel, k in SPARSE_SIZES):
        select_s, messages_s = _topk_seconds(device, N, numel, TopK(k=k, value_code=code, impute=impute))
        yield Work(f"select {name}", {"calls": 1, "entries": k, **numel_units(numel)}), select_s
        yield Work(f"sparse {name}", {"calls": 1, "entries": (1 + N) * k, "numel": numel}), messages_s


def _topk_seconds(device: torch.device, N: int, numel: int, topk: TopK) -> tuple[float, float]:
    layout = Layout.of_shapes([("", (numel,), "linear")])
    worker = Worker(torch.tensor(1 / N, device=device), torch.tensor(0, device=device), N, 1, layout)
    converse = partial(topk.exchange, torch.randn(numel, device=device), topk.init(worker), worker)
    return _rank_seconds(device, N, converse)


def request_points(device: torch.device) -> Iterator[Point]:
    """Coding sets of indices, and the parts and the sums of dense vectors."""
    times = ON_GPU if device.type == "cuda" else 1
    for N, k in product((2, 8), (times * 2**10, times * 2**13, times * 2**17)):
        indices = torch.arange(k, device=device) * (times * MIDDLE_NUMEL // k)
        _, gather_s = _rank_seconds(device, N, partial(_ask, Gather(indices, numel=times * MIDDLE_NUMEL)))
        yield Work("sparse none", {"calls": 1, "entries": (1 + N) * k}), gather_s
        for code in CODES:
            values = quantise(torch.randn(k, device=device), code)
            request = DenseSum(values, values.new_tensor(1 / N), code)
            _, dense_s = _rank_seconds(device, N, partial(_ask, request))
            yield Work(f"dense {code}", {"calls": 1, "messages": N, "entries": (3 + 1 / N) * k}), dense_s


def _ask(request: Request) -> Conversation:
    answer: Tensor = yield request
    return answer


def hook_points(device: torch.device) -> Iterator[Point]:
    """What DDP adds to a bare model, torch's hooks to DDP, and ours to a conversation, in a group of one."""
    backend = "nccl" if device.type == "cuda" else "gloo"  # gloo would copy vectors to the host
    dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield Work("step", {"calls": 1}), _step_seconds(device)
    for width, depth in MODELS:
        time_model = partial(_time_model, device, width, depth)
        plain, ddp, fp16, powersgd = map(time_model, ("plain", "ddp", "fp16", "powersgd"))
        numel = depth * width * width
        yield Work("ddp", {"numel": numel}), max(0.0, ddp - plain)
        yield Work("fp16", {"numel": numel}), max(0.0, fp16 - ddp)
        yield Work("powersgd", {"messages": depth, **numel_units(numel)}), max(0.0, powersgd - ddp)
    dist.destroy_process_group()


def _time_model(device: torch.device, width: int, depth: int, name: str) -> float:
    """Seconds of a forward and backward pass of a model whose own work is small."""
    layers = (nn.Linear(width, width, bias=False) for _ in range(depth))
    model: nn.Module = nn.Sequential(*layers).to(device)
    if name != "plain":
        bucket_cap_mb = 1000 if name == "powersgd" else None  # one bucket, or DDP's own
        model = ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
        if name == "fp16":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if name == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, POWERSGD_RANK, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    x = torch.randn(1, width, device=device)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    for _ in range(3):  # DDP makes its buckets in the first two, PowerSGD begins in the third
        step()
    return typical(partial(_seconds, device, step))["all_s"]


def _step_seconds(device: torch.device) -> float:
    """What a step takes beside the algorithm's conversation: launches, and seeing that ranks agree."""
    width, depth, topk = 32, 64, TopK(k=32)  # so small that its step is what any takes
    model = [nn.Parameter(torch.zeros(width, width, device=device)) for _ in range(depth)]
    steps = Steps(Parameters(model), topk, Collectives(group_or_default(None)), Options(), Kind("plan"))
    grads = {name: torch.randn_like(p) for name, p in steps.parameters.named.items()}
    whole_s = typical(partial(_seconds, device, torch.no_grad()(lambda: steps.run(grads))))["all_s"]
    return max(0.0, whole_s - sum(_topk_seconds(device, 1, depth * width**2, topk)))


SPARSE = [partial(sparse_points, code=code, impute=impute) for code in CODES for impute in (0.0, IMPUTE)]
CASES: list[Case] = [pass_points, *SPARSE, request_points, hook_points]  # what one process can time


def calibrate(device: str, progress: Callable[[float], None], of: Sequence[Case] = CASES) -> Calibration:
    """Measure the work `of` one process on cpu or cuda, on cpu gloo's too, and fit a line to each kind."""
    points: dict[str, list[tuple[Any, float]]] = defaultdict(list)  # by line: units, and seconds
    gloo = (_time_collectives, NUM_PROCESSES, torch.get_num_threads())
    try:
        for point in launch(*gloo) if device == "cpu" else ():
            points[point["line"]].append((point["units"], point["seconds"]))
    except ClusterError as error:
        raise ClusterError(f"calibration failed: {error}") from None
    for number, case in enumerate(of, start=1):
        progress(number / (1 + len(of)))
        for work, seconds in case(torch.device(device)):
            points[work.line].append((work.units, seconds))
    progress(1.0)
    return Calibration(describe_machine(device), {line: fit(times) for line, times in points.items()})


def _time_collectives(emit: Emit, num_threads: int) -> None:
    """One process of those that gloo's collectives run between: what they cost without a network."""
    torch.set_num_threads(num_threads)
    join_group("gloo")
    N, ranks = NUM_PROCESSES, Collectives(group_or_default(None))
    for size in (_SMALL_BYTES, BUCKET_BYTES):
        vector, half = torch.zeros(size // 4), torch.zeros(size // 2, dtype=torch.float16)
        _time_calls(emit, all_reduce(size, N), partial(dist.all_reduce, vector))
        _time_calls(emit, all_reduce(size, N, "all_reduce half"), partial(dist.all_reduce, half))
    for size in (_SMALL_BYTES, _MESSAGE_BYTES):
        vector, many = torch.zeros(size // 4), torch.zeros(N * (size // 4))
        _time_calls(emit, all_to_all(size, N), partial(dist.all_to_all_single, torch.empty_like(many), many))
        _time_calls(emit, all_gather(size, N), partial(ranks.all_gather, vector))
    dist.destroy_process_group()


def _time_calls(emit: Emit, move: Move, run: Callable[[], Any]) -> None:
    """Many calls after one another, since processes come to a single one at different times."""
    num_calls = _NUM_CALLS if move.sent_bytes < BUCKET_BYTES else _NUM_CALLS // 6
    run()
    dist.barrier()
    seconds = _seconds(torch.device("cpu"), lambda: [run() for _ in range(num_calls)])["all_s"] / num_calls
    if dist.get_rank() == 0:
        emit({**move_work(move)._asdict(), "seconds": seconds})
