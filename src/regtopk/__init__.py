"""Train neural networks over slow networks by sending a thousandth of the gradient."""

from regtopk import errors, simulate
from regtopk._version import __version__
from regtopk.algorithms import ALGORITHMS, Dense, GlobalTopK, RandomK, RegTopK, TopK
from regtopk.core.algorithm import Algorithm, Sparsifier
from regtopk.core.requests import Broadcast, DenseSum, Gather, Peek, SparseSum
from regtopk.core.sparse import SparseGradient
from regtopk.core.warm_up import WarmUp
from regtopk.core.worker import Layout, Worker
from regtopk.distributed import Exchange, SparseHookState, attach, merge_state_dicts, sparse_hook
from regtopk.errors import RegtopkError

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Broadcast",
    "Dense",
    "DenseSum",
    "Exchange",
    "Gather",
    "GlobalTopK",
    "Layout",
    "Peek",
    "RandomK",
    "RegTopK",
    "RegtopkError",
    "SparseGradient",
    "SparseHookState",
    "SparseSum",
    "Sparsifier",
    "TopK",
    "WarmUp",
    "Worker",
    "__version__",
    "attach",
    "errors",
    "merge_state_dicts",
    "simulate",
    "sparse_hook",
]
