"""Every algorithm, one short file each, and the table of their names."""

from typing import Any

from regtopk.algorithms.dense import Dense
from regtopk.algorithms.global_topk import GlobalTopK
from regtopk.algorithms.randomk import RandomK
from regtopk.algorithms.regtopk import RegTopK
from regtopk.algorithms.topk import TopK
from regtopk.core.algorithm import Algorithm

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {
    "dense": Dense,
    "topk": TopK,
    "regtopk": RegTopK,
    "randomk": RandomK,
    "global-topk": GlobalTopK,
}

__all__ = ["ALGORITHMS", "Dense", "GlobalTopK", "RandomK", "RegTopK", "TopK"]
