"""What algorithms are written with: what is sent, asked, kept and counted.

Your own algorithms can import everything from here. docs/add-an-algorithm.md shows how.
"""

from regtopk.core.algorithm import (
    Algorithm,
    Conversation,
    DensitySchedule,
    ErrorFeedback,
    Promise,
    Promises,
    Sparsifier,
    WarmUp,
    WithDensity,
    converse,
)
from regtopk.core.codes import VALUE_CODES, check_value_code, is_lossless, quantise
from regtopk.core.exact import exact_sum, to_integers
from regtopk.core.options import (
    check_choice,
    check_integer,
    check_number,
    integer,
    one_of,
    option,
    true_or_false,
    within,
)
from regtopk.core.parameters import aggregate_from_parameters
from regtopk.core.random import random_sequence, random_subset, uniform
from regtopk.core.requests import Broadcast, DenseSum, Gather, Gathered, Peek, Request, SenderSum, SparseSum
from regtopk.core.selection import (
    find_largest_,
    kth_largest,
    put_back_,
    send_,
    send_instead_,
    take_above_,
    take_all_above_,
    take_at_,
    take_largest_,
    take_largest_per_chunk_,
    take_where_,
)
from regtopk.core.senders import OfSenders, impute_, mean_of_senders
from regtopk.core.sparse import SparseGradient, clear_at_, take, to_dense
from regtopk.core.state import NoState, ResidualState, State, StateT, extended, per_worker, shared
from regtopk.core.worker import Layer, Layout, Report, Worker

# By subject, not by alphabet.
# fmt: off
__all__ = [  # noqa: RUF022
    "Algorithm", "WithDensity", "Sparsifier", "ErrorFeedback", "Promise", "Promises", "Conversation",
    "converse", "DensitySchedule", "WarmUp", "option", "within", "integer", "one_of", "true_or_false",
    "check_choice", "check_integer", "check_number", "check_value_code",
    "Worker", "Layout", "Layer", "Report",
    "State", "StateT", "NoState", "ResidualState", "extended", "per_worker", "shared",
    "SparseSum", "SenderSum", "OfSenders", "impute_", "mean_of_senders",
    "DenseSum", "Gather", "Gathered", "Broadcast", "Peek", "Request",
    "SparseGradient", "clear_at_", "take", "to_dense",
    "take_largest_", "take_largest_per_chunk_", "take_above_", "take_all_above_", "take_at_", "take_where_",
    "find_largest_", "kth_largest", "put_back_", "send_", "send_instead_",
    "VALUE_CODES", "is_lossless", "quantise", "exact_sum", "to_integers",
    "random_sequence", "random_subset", "uniform", "aggregate_from_parameters",
]
# fmt: on
