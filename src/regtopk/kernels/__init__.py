"""The operations that touch all J entries; everything else in the package is k-sized.

`reference` is plain torch and the oracle that every faster kernel is tested against.
"""

from regtopk.kernels.reference import (
    find_non_finite_row,
    sum_dense_in_rank_order,
    sum_sparse_in_rank_order,
    take_at_,
    take_largest_,
)

__all__ = [
    "find_non_finite_row",
    "sum_dense_in_rank_order",
    "sum_sparse_in_rank_order",
    "take_at_",
    "take_largest_",
]
