"""What algorithms are written with: what is sent, asked, kept and counted.

Your own algorithms can import everything from here. docs/add-an-algorithm.md shows how.
"""

from regtopk.core.algorithm import (
    Algorithm,
    Conversation,
    ErrorFeedback,
    Promise,
    Promises,
    Sparsifier,
    WarmUp,
    WithDensity,
    converse,
)
from regtopk.core.codes import VALUE_CODES, is_lossless, quantise
from regtopk.core.exact import exact_sum, to_integers
from regtopk.core.options import integer, one_of, option, true_or_false, within
from regtopk.core.parameters import aggregate_from_parameters
from regtopk.core.random import random_sequence, random_subset, uniform
from regtopk.core.requests import (
    Broadcast,
    DenseSum,
    FromOwners,
    Gather,
    Gathered,
    OfSenders,
    Peek,
    Request,
    SenderSum,
    SparseSum,
    ToOwners,
    impute_,
    mean_of_senders,
)
from regtopk.core.sparse import (
    SparseGradient,
    clear_at_,
    find_largest_,
    send_instead_,
    take,
    take_above_,
    take_all_above_,
    take_at_,
    take_largest_,
    take_where_,
    to_dense,
)
from regtopk.core.state import NoState, ResidualState, State, extended, per_worker, shared
from regtopk.core.worker import Layer, Layout, Report, Worker

# By subject, not by alphabet.
# fmt: off
__all__ = [  # noqa: RUF022
    "Algorithm", "WithDensity", "Sparsifier", "ErrorFeedback", "Promise", "Promises", "Conversation",
    "converse", "WarmUp", "option", "within", "integer", "one_of", "true_or_false",
    "Worker", "Layout", "Layer", "Report",
    "State", "NoState", "ResidualState", "extended", "per_worker", "shared",
    "SparseSum", "SenderSum", "OfSenders", "impute_", "mean_of_senders",
    "DenseSum", "ToOwners", "FromOwners", "Gather", "Gathered", "Broadcast", "Peek", "Request",
    "SparseGradient", "clear_at_", "take", "to_dense",
    "take_largest_", "take_above_", "take_all_above_", "take_at_", "take_where_",
    "find_largest_", "send_instead_",
    "VALUE_CODES", "is_lossless", "quantise", "exact_sum", "to_integers",
    "random_sequence", "random_subset", "uniform", "aggregate_from_parameters",
]
# fmt: on
