"""What is exchanged: the size of a model's gradients or updates, and what PowerSGD makes of its shapes."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

SIDE = 1024  # of the square matrices that a model of unknown shapes is thought to be made of
POWERSGD_RANK = 2
POWERSGD_MIN_SAVING = 2  # torch's min_compression_rate: what saves less is sent as it is


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
