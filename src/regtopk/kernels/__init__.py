"""The operations that touch all J entries; everything else in the package is k-sized.

`reference` is plain torch, and the oracle that every faster kernel is tested against. `cpu` is compiled by
numba, and uses numpy for short rows. `cuda` has programs in Triton. The same operation is in the file of the
same name in each. What draws, and what writes and reads messages, has its oracle in the tensor operations of
`core` and `wire`. `dispatch` chooses; REGTOPK_KERNELS=reference in the environment forces the reference.
"""

from regtopk.kernels.cuda.replay import capture_nothing_in_this_thread, repeat
from regtopk.kernels.dispatch import (
    MAX_ROWS,
    add_in_rank_order_,
    block_programs,
    describe,
    index_loops,
    join_,
    kernel_for,
    message_programs,
    overwrite_if_,
    programs_on,
    spread_,
    sum_dense_in_rank_order,
)
from regtopk.kernels.reference.pieces import Pieces, Support, is_finite, parts_of
from regtopk.kernels.reference.selection import Damped, Taken, take_at_
from regtopk.kernels.reference.sums import find_non_finite_row, sum_sparse_in_rank_order
from regtopk.kernels.self_check import self_check

__all__ = [
    "MAX_ROWS", "Damped", "Pieces", "Support", "Taken", "add_in_rank_order_", "block_programs",
    "capture_nothing_in_this_thread", "describe", "find_non_finite_row", "index_loops", "is_finite",
    "join_", "kernel_for", "message_programs", "overwrite_if_", "parts_of", "programs_on", "repeat",
    "self_check", "spread_", "sum_dense_in_rank_order", "sum_sparse_in_rank_order", "take_at_",
]  # fmt: skip
