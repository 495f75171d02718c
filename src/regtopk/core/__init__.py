"""What algorithms are written with: what is sent, asked, kept and counted.

An algorithm imports everything it needs from here. docs/add-an-algorithm.md shows how.
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

__all__ = [
    "VALUE_CODES",
    "Algorithm",
    "Broadcast",
    "Conversation",
    "DenseSum",
    "DensitySchedule",
    "ErrorFeedback",
    "Gather",
    "Gathered",
    "Layer",
    "Layout",
    "NoState",
    "OfSenders",
    "Peek",
    "Promise",
    "Promises",
    "Report",
    "Request",
    "ResidualState",
    "SenderSum",
    "SparseGradient",
    "SparseSum",
    "Sparsifier",
    "State",
    "StateT",
    "WarmUp",
    "WithDensity",
    "Worker",
    "aggregate_from_parameters",
    "check_choice",
    "check_integer",
    "check_number",
    "check_value_code",
    "clear_at_",
    "converse",
    "exact_sum",
    "extended",
    "find_largest_",
    "impute_",
    "integer",
    "is_lossless",
    "kth_largest",
    "mean_of_senders",
    "one_of",
    "option",
    "per_worker",
    "put_back_",
    "quantise",
    "random_sequence",
    "random_subset",
    "send_",
    "send_instead_",
    "shared",
    "take",
    "take_above_",
    "take_all_above_",
    "take_at_",
    "take_largest_",
    "take_largest_per_chunk_",
    "take_where_",
    "to_dense",
    "to_integers",
    "true_or_false",
    "uniform",
    "within",
]
