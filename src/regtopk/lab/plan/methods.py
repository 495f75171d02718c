"""The methods that are planned, and what each does in a step.

Nothing here depends on a machine or a link: `predict` multiplies with their costs.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import ceil, prod
from typing import Literal, NamedTuple

from regtopk.algorithms import ALGORITHMS
from regtopk.core.algorithm import check_density
from regtopk.core.codes import is_lossless
from regtopk.errors import ArgumentError
from regtopk.lab.method import Method as Words
from regtopk.lab.plan.asked import probe, takes
from regtopk.lab.plan.exchange import Exchange, Units, Work, all_gather, all_reduce, answer, broadcast
from regtopk.lab.plan.workload import Workload
from regtopk.rounds import ADVISED_UPDATES, GRADIENTS, Rounds

Way = Literal["all_reduce", "all_gather", "split"]
CODES = ("float32", "4bit", "2bit")  # of the algorithms that can be told one
DENSITIES = (0.001, 0.01, 0.1)
CHOSEN = ("topk", "regtopk", "consensus", "dgc")  # what one would try first; the others are planned if asked
UPDATES_DENSITIES = (0.01, 0.025, 0.05)  # of updates, unless told: rarer rounds need more entries
EVERY = (1, 2)  # steps of a round of updates, unless told
ADVISED_EVERY = (1, 2, 4, 8)  # of `ADVISED_UPDATES`, whole and in as many fragments
DILOCO = "dense:exchange=updates:every={}:outer=nesterov:value_code=float32"
DILOCO_EVERY = 16
MIDDLE_NUMEL = 2**22  # entries beyond these have a cost of their own
AGREEMENT_BYTES = 24  # that every rank tells all others before an exchange; and a report
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20  # DDP's default bucket_cap_mb, and its first bucket
POWERSGD_RANK = 2
POWERSGD_MIN_SAVING = 2  # torch's min_compression_rate: what saves less is sent as it is


class Method(NamedTuple):
    """A way to exchange gradients or updates; `dense` by all_reduce is DDP without a hook."""

    name: str  # an algorithm, with its other options: "topk:impute=0.35"
    density: float
    value_code: str
    collective: Way
    rounds: Rounds = GRADIENTS

    @property
    def sends_less(self) -> bool:
        """Whether it is meant to send less than DDP without a hook and torch's fp16 hook."""
        return self not in (DENSE, FP16)

    @property
    def kind(self) -> str:
        """The name without the number of steps between exchanges."""
        if self.rounds.has_updates:
            is_diloco = self.name == "dense" and self.rounds.outer == "nesterov"
            return "DiLoCo" if is_diloco else f"{self.name} updates"
        return "dense, coded" if self.name == DENSE.name and self != DENSE else self.name

    @property
    def label(self) -> str:
        """The name in tables and figures: `dense` is DDP alone, not this library's coded exchange of it."""
        if not self.rounds.has_updates:
            return self.kind
        told = [f"{name} {getattr(self.rounds, name)}" for name in ("every", *self.turns)]
        return f"{self.kind}, {', '.join(told)}"

    @property
    def turns(self) -> dict[str, int]:
        """The delay and the fragments of updates, where they have any."""
        rounds = self.rounds
        usual = {"delay": GRADIENTS.delay, "fragments": GRADIENTS.fragments}
        return {name: getattr(rounds, name) for name, own in usual.items() if getattr(rounds, name) != own}

    @property
    def amount(self) -> str:
        """How much of the gradient it sends."""
        return f"rank {POWERSGD_RANK}" if self == POWERSGD else f"{self.density:g}"


DENSE = Method("dense", 1.0, "float32", "all_reduce")
FP16 = Method("fp16", 1.0, "float16", "all_reduce")
POWERSGD = Method("powersgd", 1.0, "float32", "all_reduce")
TORCH = (DENSE, FP16, POWERSGD)


def planned_methods(
    densities: Sequence[float] = DENSITIES, *, every: bool = False, labels: Sequence[str] = ()
) -> list[Method]:
    """DDP, torch's hooks, and algorithms at every density, with every code and by every collective they run.

    An algorithm that decides by itself how many entries to send is planned as if it sent that many. One that
    always sends the same share is planned at that share.

    Args:
        densities: for the algorithms that take one.
        every: plan all algorithms that a cluster can run, not only those one would try first.
        labels: plan these instead, in words as `regtopk compare` takes them.
    """
    found = list(TORCH)
    for label in labels or (ALGORITHMS if every else CHOSEN):
        words = Words.parse(label)
        ways = _ways(words, densities)
        if not (ways or every or words.algorithm == DENSE.name):
            raise ArgumentError(f"algorithms must be such as a cluster can run, got {label!r}")
        found += ways
    return list(dict.fromkeys(found))


def advised_labels(every: int | None = None, delay: int = 0, fragments: int | None = None) -> list[str]:
    """What was measured best on updates, in several rounds; and DiLoCo."""
    least = max(delay + 1, fragments or 1)  # that a round must have
    ours = []
    for n in [every] if every else sorted({least, *(n for n in ADVISED_EVERY if n >= least)}):
        for parts in dict.fromkeys([1, n] if fragments is None else [fragments]):
            ours += update_labels([ADVISED_UPDATES], n, delay, parts)
    return [DILOCO.format(every or DILOCO_EVERY), *ours]


def update_labels(
    labels: Sequence[str], every: int | None, delay: int = 0, fragments: int | None = None
) -> list[str]:
    """The same methods on updates: every so many steps, or every few if not told; their words may tell."""
    split = [label.partition(":") for label in labels]
    least = max(delay + 1, fragments or 1)  # that a round must have
    steps = [n for n in (*EVERY, least) if n >= least] if every is None else [every]
    turns = (f":delay={delay}" if delay else "") + (f":fragments={fragments}" if (fragments or 1) > 1 else "")
    return [
        f"{name}:exchange=updates:every={n}{turns}{colon}{rest}"
        for name, colon, rest in split
        for n in dict.fromkeys(steps)
    ]


def _ways(words: Words, densities: Sequence[float]) -> list[Method]:
    """An algorithm at every density, with every code and by every collective that its words leave open."""
    if words.residual_dtype is not None:
        raise ArgumentError(
            f"a planned method has no residual_dtype: it changes no byte, got {words.label!r}"
        )
    if words.index_code is not None or "k" in words.options:
        raise ArgumentError(
            f"a planned method has a density, not k, and the index code elias-fano, got {words.label!r}"
        )
    options = dict(words.options)
    density, code = options.pop("density", None), options.pop("value_code", None)
    name = ":".join([words.algorithm, *(f"{key}={text}" for key, text in words.words if key in options)])
    found = []
    codes = CODES if takes(name, "value_code") else CODES[:1]
    for value_code in codes if code is None else [str(code)]:
        probed = probe(name, densities[0], value_code)
        sends_all_as_it_is = probed.density == 1 and is_lossless(probed.code)  # what DDP does anyway
        if probed.peeks or (sends_all_as_it_is and not words.rounds.has_updates):
            continue
        own = densities if density is None else [check_density(density)]
        own = own if probed.density is None else [probed.density]
        ways = product(own, probed.ways)
        found += [Method(name, each, probed.code, way, words.rounds) for each, way in ways]
    return found


def numel_units(numel: float) -> Units:
    """A vector's entries, and how many of them lie beyond the first four million.

    Large vectors take longer per entry: they do not fit the caches, and their memory is new every time.
    """
    return {"numel": numel, "numel beyond": max(0, numel - MIDDLE_NUMEL)}


@lru_cache(maxsize=16384)
def exchange_of(method: Method, workload: Workload, num_workers: int) -> Exchange:
    """What a step with a method does."""
    numel, N = workload.numel, num_workers
    num_parts = num_buckets(numel)
    in_bucket = numel / num_parts
    ddp = Work("ddp", {"numel": in_bucket})
    if method == DENSE:
        return Exchange(4 * numel, [all_reduce(4 * in_bucket, N)], [ddp], num_parts=num_parts)
    if method == FP16:
        move = all_reduce(2 * in_bucket, N, "all_reduce half")
        fp16 = Work("fp16", {"numel": in_bucket})
        return Exchange(2 * numel, [move], [ddp, fp16], num_parts=num_parts)
    if method == POWERSGD:  # three all_reduces, in one bucket (with several, torch's hook hangs on gloo)
        sizes = [size for size in powersgd_bytes(workload) if size]
        num_matrices = sum(len(shape) > 1 for shape in workload.shapes)
        powersgd = Work("powersgd", {"messages": num_matrices, **numel_units(numel)})
        work = [Work("ddp", {"numel": numel}), powersgd]
        return Exchange(sum(sizes), [all_reduce(size, N) for size in sizes], work)
    if method.rounds.has_updates:
        return _ours(method, numel, N, method.rounds.fragments)
    return _ours(method, numel, N, 1)


def num_buckets(numel: int) -> int:
    """How many buckets DDP makes of float32 gradients."""
    return 1 + max(0, ceil((4 * numel - FIRST_BUCKET_BYTES) / BUCKET_BYTES))


def _ours(method: Method, numel: int, N: int, num_parts: int) -> Exchange:
    """An exchange of this library: what the algorithm asks, and what comes before."""
    numel = max(1, numel // num_parts)
    k = max(1, round(method.density * numel))
    probed = probe(method.name, method.density, method.value_code)
    if method.rounds.has_updates:
        work = [Work(f"updates {method.rounds.outer}", numel_units(numel))]
    else:
        work = [Work("ddp", {"numel": numel}), Work("exchange", {"numel": numel})]
    work.append(Work(f"select {method.name}", {"calls": 1, "entries": k, **numel_units(numel)}))
    if takes(method.name, "value_code") and not is_lossless(method.value_code):
        work.append(Work(f"quantise {method.value_code}", {"calls": 1, "entries": k}))
    moves = [all_gather(AGREEMENT_BYTES, N)]
    if probed.listens:
        moves.append(broadcast(AGREEMENT_BYTES, N))
    payload_bytes, memory_bytes = 0, 0.0
    for asked in probed.requests:
        sizes, is_split = asked.size(numel, k, N), method.collective == "split"
        answered = answer(asked.request, *sizes, N, is_ragged=asked.is_ragged, is_split=is_split)
        work += answered.work
        moves += answered.moves
        payload_bytes += num_parts * answered.payload_bytes
        memory_bytes = max(memory_bytes, answered.memory_bytes)
    rounds = method.rounds
    delay = rounds.delay if rounds.has_updates else None
    return Exchange(payload_bytes, moves, work, memory_bytes, num_parts, rounds.every, delay)


def powersgd_bytes(workload: Workload) -> tuple[int, int, int]:
    """Bytes of the parameters PowerSGD leaves alone, of the left factors, and of the right factors."""
    alone = left = right = 0
    for shape in workload.shapes:
        size = prod(shape)
        rows = shape[0] if len(shape) > 1 else 1
        columns = size // rows if rows else 0
        rank = min(rows, columns, POWERSGD_RANK)
        if len(shape) > 1 and (rows + columns) * rank * POWERSGD_MIN_SAVING < size:
            left, right = left + 4 * rows * rank, right + 4 * columns * rank
        else:
            alone += 4 * size
    return alone, left, right
