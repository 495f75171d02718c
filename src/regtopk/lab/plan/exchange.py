"""What a method asks of a worker in a step: the work, the collectives and their bytes.

Sizes are those of the real messages. A sparse sum is gathered or split as `collective="auto"` does it.
Nothing here depends on a machine or a link: `predict` multiplies with their costs.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import ceil, prod
from typing import NamedTuple

import torch

from regtopk.core.codes import full_message_bytes
from regtopk.core.owners import num_owned, num_returned
from regtopk.core.regions import region_bytes, sender_code, split_of
from regtopk.distributed.steps.agreement import AGREEMENT_BYTES
from regtopk.lab.plan.link import Move, all_gather, all_reduce, all_to_all, told
from regtopk.lab.plan.methods import COSTS_OF, FP16, POWERSGD, TORCH, PlannedMethod

Units = Mapping[str, float]
SIDE = 1024  # of the square matrices that a model of unknown shapes is thought to be made of
POWERSGD_RANK = 2
POWERSGD_MIN_SAVING = 2  # torch's min_compression_rate: what saves less is sent as it is
MIDDLE_NUMEL = 2**22  # entries beyond these have a cost of their own
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20  # DDP's default bucket_cap_mb, and its first bucket
# Passes over a vector of J entries: one reads two vectors and writes a third.
GRADIENT_PASSES = 2  # copy the gradients in and look for NaN; copy the aggregate out
UPDATE_PASSES = 3  # theta_start - theta_n and the look for NaN; the outer step; the copy into the model
OUTER_PASSES = 3  # of an outer optimizer with momentum
OWN_PASSES = {"dgc": 1, "consensus": 2}  # beside a selection: DGC's velocity, consensus' sum on its support
SPLIT_PASSES = 3  # that a sparse sum by regions makes beside one that is gathered
SORTING = 4  # consensus and messages to owners sort entries: as long as selecting four times as many


class Workload(NamedTuple):
    """The gradients of a model, or its updates."""

    numel: int  # J, the number of parameters
    num_matrices: int
    powersgd_bytes: tuple[int, ...]  # of what PowerSGD leaves alone, of its left and of its right factors

    @classmethod
    def of_size(cls, numel: int) -> "Workload":
        """As many parameters in square matrices; what is left over in a narrower one and a vector."""
        num_matrices, left = divmod(numel, SIDE * SIDE)
        columns, rest = divmod(left, SIDE)
        return cls.of_shapes([(SIDE, SIDE)] * num_matrices + [(SIDE, columns), (rest,)])

    @classmethod
    def of_shapes(cls, shapes: Iterable[Sequence[int]]) -> "Workload":
        """Of a model whose trainable parameters have these shapes; an empty one counts for nothing."""
        numel = num_matrices = alone = left = right = 0
        for shape in shapes:
            size, rows = prod(shape), shape[0]
            if size == 0:
                continue
            columns = size // rows
            numel += size
            num_matrices += len(shape) > 1
            rank = min(rows, columns, POWERSGD_RANK)
            if len(shape) > 1 and (rows + columns) * rank * POWERSGD_MIN_SAVING < size:
                left, right = left + 4 * rows * rank, right + 4 * columns * rank
            else:
                alone += 4 * size
        return cls(numel, num_matrices, (alone, left, right))


class Work(NamedTuple):
    """Local work: the name of its cost in a calibration, and how many units of it."""

    line: str
    units: Units


class PlannedExchange(NamedTuple):
    """An exchange: equal parts one after another, each with this work and these moves."""

    collective: str
    payload_bytes: int  # of the messages that a worker contributes, of all parts
    moves: Sequence[Move]
    work: Sequence[Work]
    num_parts: int = 1
    every: int = 1  # how many steps a worker takes from one exchange to the next
    delay: int | None = None  # steps that a part may travel beside; None: all parts but the last, a backward

    @property
    def bytes_per_step(self) -> float:
        """A step's share of the payload."""
        return self.payload_bytes / self.every

    @property
    def received_bytes_per_step(self) -> float:
        """What collectives bring a worker in a step, and send from it: planned workers are alike."""
        return self.num_parts * sum(move.sent_bytes for move in self.moves) / self.every


def numel_units(numel: float) -> Units:
    """A vector's entries, and those beyond the first four million: they do not fit the caches."""
    return {"numel": numel, "numel beyond": max(0, numel - MIDDLE_NUMEL)}


def move_work(move: Move) -> Work:
    """What a collective takes from the processor."""
    return Work(f"move {move.kind}", {"messages": move.num_messages, "bytes": move.sent_bytes})


def num_buckets(numel: int) -> int:
    """How many buckets DDP makes of float32 gradients."""
    return 1 + max(0, ceil((4 * numel - FIRST_BUCKET_BYTES) / BUCKET_BYTES))


@lru_cache(maxsize=16384)
def exchange_of(method: PlannedMethod, workload: Workload, num_workers: int) -> PlannedExchange:
    """What a step with a method does."""
    if method not in TORCH:
        return _ours(method, workload.numel, num_workers)
    numel, num_parts = workload.numel, num_buckets(workload.numel)
    kind, sizes, work = "all_reduce", [4 * numel], []
    if method == FP16:
        kind, sizes, work = "all_reduce half", [2 * numel], [Work("fp16", {"numel": numel / num_parts})]
    if method == POWERSGD:  # three all_reduces, in one bucket (with several, torch's hook hangs on gloo)
        num_parts, sizes = 1, [size for size in workload.powersgd_bytes if size]
        work = [Work("powersgd", {"messages": workload.num_matrices, **numel_units(numel)})]
    moves = [all_reduce(size / num_parts, num_workers, kind) for size in sizes]
    ddp = Work("ddp", {"numel": numel / num_parts})
    return PlannedExchange("all_reduce", sum(sizes), moves, [ddp, *work], num_parts)


def _ours(method: PlannedMethod, numel: int, N: int) -> PlannedExchange:
    """An exchange of this library: passes over the vector, a selection, and what the algorithm asks."""
    rounds = method.rounds
    numel = max(1, numel // rounds.fragments)
    k = max(1, round(method.density * numel))
    num_passes, work = OWN_PASSES.get(method.algorithm, 0), [Work("step", {"calls": 1})]
    if rounds.has_updates:
        num_passes += UPDATE_PASSES + (OUTER_PASSES if rounds.outer != "none" else 0)
    else:
        num_passes += GRADIENT_PASSES
        work.append(Work("ddp", {"numel": numel}))
    work += num_passes * [Work("pass", numel_units(numel))]
    if method.algorithm != "dense":
        is_sorted = method.algorithm == "consensus" or method.returned is not None
        select = {"calls": 1, "entries": k * (SORTING if is_sorted else 1), **numel_units(numel)}
        work.append(Work(f"select {_code(method)}", select))
    answers = answers_of(method, k, numel, N)
    return PlannedExchange(
        answers[-1].collective,
        rounds.fragments * sum(answer.payload_bytes for answer in answers),
        [all_gather(AGREEMENT_BYTES, N), *(move for answer in answers for move in answer.moves)],
        [*work, *(work for answer in answers for work in answer.work)],
        rounds.fragments,
        rounds.every,
        rounds.delay if rounds.has_updates else None,
    )


def answers_of(method: PlannedMethod, k: int, numel: int, N: int) -> list[PlannedExchange]:
    """How N workers answer what an algorithm asks in a step, all of them sending k entries of J."""
    if method.algorithm == "dense":
        return [_dense_sum(method, numel, N)]
    if method.algorithm == "consensus":  # everybody's set of indices to everybody, then a sum on their union
        count, code = ceil(k / N), {"value_code": "none", "index_code": method.index_code}
        size = full_message_bytes(count, numel, dtype=torch.float32, **code)
        work = Work("sparse none", {"calls": 1, "entries": (1 + N) * count})
        proposals = PlannedExchange("all_gather", size, [all_gather(size, N)], [work])
        return [proposals, _dense_sum(method, k, N)]
    if method.returned is not None:
        return _owned_sum(method, method.returned, k, numel, N)
    return [_sparse_sum(method, k, numel, N)]


def _code(method: PlannedMethod) -> str:
    """What the costs of its values are called; with imputation it is also found out who sent each entry."""
    code = COSTS_OF.get(method.value_code, method.value_code)
    return f"{code} senders" if "impute" in method.options else code


def _dense_sum(method: PlannedMethod, length: int, N: int) -> PlannedExchange:
    """Parts to the owners of the regions, and the sums from them."""
    codes = method.value_code, method.options.get("sum_code", "float32")
    parts, sums = (region_bytes(length, N, (), torch.float32, code) for code in codes)
    units = {"calls": 1, "messages": N, "entries": (3 + 1 / N) * length}
    moves = [all_to_all(max(parts), N), all_gather(max(sums), N)]
    return PlannedExchange("split", sum(parts), moves, [Work(f"dense {_code(method)}", units)])


def _sparse_sum(method: PlannedMethod, k: int, numel: int, N: int) -> PlannedExchange:
    """Everybody's entries to everybody; or, where that moves less, pieces to owners, and sums back."""
    codes = {"value_code": method.value_code, "index_code": method.index_code}
    senders = sender_code([1 / N] * N) if "impute" in method.options else None
    size = split_of(k, numel, N, dtype=torch.float32, sender_code=senders, **codes)
    line = f"sparse {_code(method)}"
    if N < 3 or size.piece_bytes + size.sums_bytes >= size.message_bytes:
        work = Work(line, {"calls": 1, "entries": (1 + N) * k, "numel": numel})
        return PlannedExchange("all_gather", size.message_bytes, [all_gather(size.message_bytes, N)], [work])
    moves = [told(all_to_all(size.piece_bytes, N)), told(all_to_all(size.sums_bytes, N))]
    work = Work(line, {"calls": N, "entries": 2 * k + (1 + 1 / N) * size.union, "numel": numel})
    passes = SPLIT_PASSES * [Work("pass", numel_units(numel))]
    return PlannedExchange("split", N * size.piece_bytes, moves, [work, *passes])


def _owned_sum(method: PlannedMethod, returned: float, k: int, numel: int, N: int) -> list[PlannedExchange]:
    """Entries to their owners, and the largest of what these owe to everybody."""
    owned, code = num_owned(numel, N), method.value_code
    counts = ceil(k / N), num_returned(returned, numel, N)
    codes = {"dtype": torch.float32, "value_code": code, "index_code": method.index_code}
    piece, message = (full_message_bytes(count, owned, **codes) for count in counts)
    costs = _code(method)
    coding = Work(f"sparse {costs}", {"calls": 1, "entries": 2 * k, "numel": owned})
    back = told(all_gather(message, N)) if method.index_code == "rice" else all_gather(message, N)
    selection = Work(f"select {costs}", {"calls": 1, "entries": counts[1], **numel_units(owned)})
    summing = Work(f"sparse {costs}", {"calls": 1, "entries": (1 + N) * counts[1], "numel": numel})
    return [
        PlannedExchange("owners", N * piece, [told(all_to_all(piece, N))], [coding]),
        PlannedExchange("owners", message, [back], [selection, summing]),
    ]
