"""The work that a calibration times: this library's, that of DDP and torch's hooks, and gloo's collectives.

The algorithms, the driver and the codes run for one rank of a cluster whose other ranks are copies of it, so
nothing travels.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from regtopk import kernels
from regtopk.algorithms.dense import Dense
from regtopk.core.codes import quantise
from regtopk.core.requests import DenseSum, Gather, Request, SenderSum, SparseSum
from regtopk.core.sparse import SparseGradient
from regtopk.core.worker import Layout, Worker
from regtopk.distributed.requests.rank import Rank, SumBuffer
from regtopk.distributed.state import layout
from regtopk.distributed.state.buckets import Bucket, Buckets
from regtopk.distributed.steps import driver
from regtopk.distributed.transport.collectives import Collectives
from regtopk.distributed.updates.model import LocalModel
from regtopk.lab.plan.asked import make_algorithm
from regtopk.lab.plan.bench import Bench, typical
from regtopk.lab.plan.exchange import Move, Work, all_gather, all_reduce, all_to_all, answer, broadcast
from regtopk.lab.plan.methods import BUCKET_BYTES, MIDDLE_NUMEL, POWERSGD_RANK, numel_units
from regtopk.rounds import Rounds

SMALL_NUMEL, LARGE_NUMEL = 2**20, 2**24
SLOW_S = 0.3  # an algorithm that would take longer on the next vector is not timed on it
_MATRIX = 512  # all sizes are powers of two: copies can answer only if all ranks' regions are equal
_MODELS = ((1024, 4), (256, 32), (1024, 12))  # width and depth of chains of matrices
_ONE_BUCKET_MB = 1000
_SMALL_BYTES, _MESSAGE_BYTES = 64, 2**20
_NUM_CALLS = 24

Point = tuple[Work, float]  # some work, and the seconds it took


class Echo(Collectives):
    """The collectives of rank 0 of N, whose other ranks send the same."""

    def __init__(self, num_workers: int) -> None:
        self.rank, self.num_workers = 0, num_workers

    def all_gather(self, tensor: Tensor) -> Tensor:
        """N copies of the tensor."""
        return tensor.repeat(self.num_workers, 1)

    def all_to_all(self, parts: Sequence[Tensor], sizes: list[int]) -> list[Tensor]:
        """N copies of the part for rank 0."""
        return [parts[0]] * self.num_workers

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor."""
        return tensor


def echo_rank(collectives: Collectives, bench: Bench, *, is_split: bool = False) -> Rank:
    """A rank of such a cluster, with the clock of a bench."""
    N = collectives.num_workers
    weights = torch.full((N,), 1 / N, dtype=torch.float64)
    return Rank(collectives, weights, collective="split" if is_split else "all_gather", now=bench.now)


def algorithm_points(bench: Bench, name: str) -> Iterator[Point]:
    """What an algorithm itself computes on a standard normal gradient, without its messages."""
    sizes = (SMALL_NUMEL, 1024), (SMALL_NUMEL, 16), (MIDDLE_NUMEL, 1024), (LARGE_NUMEL, 1024)
    seconds, before = 0.0, 1
    for numel, numel_per_k in sizes:
        if seconds * numel / before > SLOW_S:
            return
        seconds, count = _time_algorithm(bench, name, 1 / numel_per_k, numel)
        yield Work(f"select {name}", {"calls": 1, "entries": count, **numel_units(numel)}), seconds
        before = numel


def _time_algorithm(bench: Bench, name: str, density: float, numel: int) -> tuple[float, int]:
    """Seconds of a step, and how many entries it sent."""
    matrices = [(str(n), (_MATRIX, _MATRIX), "linear") for n in range(numel // _MATRIX**2)]
    device = bench.device
    weight, index = torch.tensor(0.5, device=device), torch.tensor(0, device=device)
    worker = Worker(weight, index, 2, 1, Layout.of_shapes(matrices))
    algorithm, rank = make_algorithm(name, density), echo_rank(Echo(2), bench)
    state = algorithm.init(worker)
    grad = torch.randn(numel, device=device)

    def step() -> dict[str, float]:
        rank.begin(device)
        with rank.timer.phase("select_s"):
            driver.converse(rank, [algorithm.exchange(grad, state, worker)], [SumBuffer()])
        return {"select_s": rank.timer.seconds()["select_s"]}

    return typical(step)["select_s"], rank.record.num_entries


def message_points(bench: Bench, kind: str, code: str, senders: str = "") -> Iterator[Point]:
    """Encoding one's own messages of a kind and decoding everybody's.

    Args:
        bench: which times it.
        kind: "gather", "split" or "dense".
        code: of the values; "none" for sets of indices, which are gathered.
        senders: "senders" if decoding also finds out who sent each entry.
    """
    sparse_sum, is_split = SenderSum if senders else SparseSum, kind == "split"
    sizes = ((SMALL_NUMEL, 2**10), (MIDDLE_NUMEL, 2**13), (MIDDLE_NUMEL, 2**17))
    for N, (numel, count) in product((2, 8), sizes):
        rank, sums = echo_rank(Echo(N), bench, is_split=is_split), SumBuffer()
        indices = torch.arange(count, device=bench.device) * (numel // count)
        request: Request = Gather(indices, numel=numel)
        if code != "none":
            weight = torch.tensor(0.5, device=bench.device)
            values = quantise(torch.randn(count, device=bench.device), code)
            request = sparse_sum(SparseGradient(indices, values, numel, code=code), weight)
            if kind == "dense":
                request = DenseSum(values, weight, code)

        def run(rank: Rank = rank, request: Request = request, sums: SumBuffer = sums) -> dict[str, float]:
            rank.begin(bench.device)
            driver.answer(rank, [request], [sums])
            rank.raise_refusals()
            sums.spare = sums.total if kind == "gather" else None  # reused, as in an exchange
            return rank.timer.seconds()

        seconds = typical(run)
        encode, decode = answer(request, count, numel, N, is_split=is_split).work
        if is_split:  # copies choose the same entries, so that the sum has no more than each
            encode.units["entries"], decode.units["entries"] = count + count / N, 2 * count
        yield encode, seconds["encode_s"]
        yield decode, seconds["decode_s"]


def code_points(bench: Bench, code: str) -> Iterator[Point]:
    """Rounding values to a code, and returning what it lost to the residual."""
    residual = torch.zeros(MIDDLE_NUMEL, device=bench.device)
    for count in (2**12, 2**17):
        values = torch.randn(count, device=bench.device)
        indices = torch.arange(count, device=bench.device) * (MIDDLE_NUMEL // count)

        def round_off(values: Tensor = values, indices: Tensor = indices) -> None:
            residual.scatter_add_(-1, indices, values - quantise(values, code))

        yield Work(f"quantise {code}", {"calls": 1, "entries": count}), bench.typical(round_off)


def exchange_points(bench: Bench) -> Iterator[Point]:
    """What an exchange does with the whole vector: copy it in, look for NaN, copy the aggregate out."""
    flat = torch.zeros(MIDDLE_NUMEL, device=bench.device)
    grads = [torch.randn(_MATRIX, _MATRIX, device=bench.device) for _ in range(MIDDLE_NUMEL // _MATRIX**2)]
    nowhere = torch.zeros(1, dtype=torch.int64, device=bench.device)
    support = kernels.Support(nowhere.unsqueeze(0), nowhere)

    def prepare_and_write_back() -> None:
        kernels.join_(flat, grads)
        layout.write_(grads, flat, support)

    yield Work("exchange", {"numel": MIDDLE_NUMEL}), bench.typical(prepare_and_write_back)


@torch.no_grad()
def update_points(bench: Bench, outer: str) -> Iterator[Point]:
    """What a round of updates does with the whole vector.

    That is theta_start - theta_n, a look for NaN, the outer step, and the copy back into the model.
    """
    make_outer = partial(torch.optim.SGD, **Rounds(outer=outer).outer_settings._asdict())
    rank = echo_rank(Echo(2), bench)
    for numel in (SMALL_NUMEL, MIDDLE_NUMEL, LARGE_NUMEL):
        net = _chain(_MATRIX, numel // _MATRIX**2).to(bench.device)
        inner = torch.optim.SGD(net.parameters())
        model = LocalModel(net, inner, None if outer == "none" else make_outer, "mean")
        buckets = Buckets(model.parameters, frozenset(), Dense(), rank).all
        model.begin(rank.collectives, buckets)
        aggregate = torch.zeros(numel, device=bench.device)

        def make_round(
            model: LocalModel = model, buckets: list[Bucket] = buckets, aggregate: Tensor = aggregate
        ) -> None:
            model.take_update(buckets)
            if model.outer is None:
                layout.subtract_(list(model.start.values()), aggregate)
            else:
                layout.write_(list(model.update.values()), aggregate)
                model.apply(model.outer, list(model.start))
            model.write_back()

        yield Work(f"updates {outer}", numel_units(numel)), bench.typical(make_round)


def _chain(width: int, depth: int) -> nn.Sequential:
    """A model of square matrices."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))


def hook_points(bench: Bench) -> Iterator[Point]:
    """The time that DDP adds to a bare model, and that torch's hooks add to DDP, in a group of one."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for width, depth in _MODELS:
        plain, ddp, fp16, powersgd = (
            _time_model(bench, width, depth, name, group) for name in ("plain", "ddp", "fp16", "powersgd")
        )
        numel = depth * width * width
        yield Work("ddp", {"numel": numel}), max(0.0, ddp - plain)
        yield Work("fp16", {"numel": numel}), max(0.0, fp16 - ddp)
        yield Work("powersgd", {"messages": depth, **numel_units(numel)}), max(0.0, powersgd - ddp)


def _time_model(bench: Bench, width: int, depth: int, name: str, group: dist.ProcessGroup) -> float:
    """Seconds of a forward and backward pass of a model whose own work is small."""
    model: nn.Module = _chain(width, depth).to(bench.device)
    if name != "plain":
        bucket_cap_mb = _ONE_BUCKET_MB if name == "powersgd" else None
        model = ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_cap_mb)
        if name == "fp16":
            ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
        if name == "powersgd":
            state = powerSGD_hook.PowerSGDState(group, POWERSGD_RANK, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    x = torch.randn(1, width, device=bench.device)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    for _ in range(3):  # DDP makes its buckets in the first two, PowerSGD begins in the third
        step()
    return bench.typical(step)


def collective_points(bench: Bench) -> Iterator[Point]:
    """Messages and bytes of gloo's collectives between the processes: what they cost without a network."""
    assert dist.group.WORLD is not None
    N, run = dist.get_world_size(), Collectives(dist.group.WORLD)
    for size in (_SMALL_BYTES, BUCKET_BYTES):
        vector, half = torch.zeros(size // 4), torch.zeros(size // 2, dtype=torch.float16)
        yield _time_calls(bench, all_reduce(size, N), partial(dist.all_reduce, vector))
        yield _time_calls(bench, all_reduce(size, N, "all_reduce half"), partial(dist.all_reduce, half))
    for size in (_SMALL_BYTES, _MESSAGE_BYTES):
        vector, many = torch.zeros(size // 4), torch.zeros(N * (size // 4))
        yield _time_calls(bench, broadcast(size, N), partial(dist.broadcast, vector, 0))
        swap = partial(dist.all_to_all_single, torch.empty_like(many), many)
        yield _time_calls(bench, all_to_all(size, N), swap)
        yield _time_calls(bench, all_gather(size, N), partial(run.all_gather, vector))


def _time_calls(bench: Bench, move: Move, run: Callable[[], Any]) -> Point:
    """Many calls after one another, since processes come to a single one at different times."""
    num_calls = _NUM_CALLS if move.sent_bytes < BUCKET_BYTES else _NUM_CALLS // 6
    run()
    dist.barrier()
    return move.work, bench.seconds(lambda: [run() for _ in range(num_calls)]) / num_calls
