"""Train neural networks over slow networks by sending a thousandth of the gradient."""

from regtopk import errors, simulate
from regtopk.algorithms import ALGORITHMS, Dense, GlobalTopK, RandomK, RegTopK, TopK
from regtopk.core.algorithm import Algorithm, Sparsifier
from regtopk.core.requests import Broadcast, DenseSum, Gather, Peek, SparseSum
from regtopk.core.sparse import SparseGradient
from regtopk.core.worker import Layout, Worker
from regtopk.errors import RegtopkError

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Broadcast",
    "Dense",
    "DenseSum",
    "Gather",
    "GlobalTopK",
    "Layout",
    "Peek",
    "RandomK",
    "RegTopK",
    "RegtopkError",
    "SparseGradient",
    "SparseSum",
    "Sparsifier",
    "TopK",
    "Worker",
    "errors",
    "simulate",
]
