"""Train neural networks over slow networks by sending about a hundredth of the bytes.

Training needs what is here: the algorithms, `attach` and its kin, the simulator. A new algorithm is written
with what is in `regtopk.core`.
"""

from regtopk import algorithms, core, errors, simulate
from regtopk._version import __version__
from regtopk.algorithms import *  # noqa: F403
from regtopk.core import WarmUp
from regtopk.distributed import (
    Checkpoints,
    Exchange,
    ExchangeBase,
    ExchangeOptions,
    OneProcess,
    ShardedHookState,
    SparseHookState,
    StepRecord,
    UpdateExchange,
    attach,
    merge_state_dicts,
    sparse_hook,
)
from regtopk.errors import RegtopkError

__all__ = [
    "Checkpoints",
    "Exchange",
    "ExchangeBase",
    "ExchangeOptions",
    "OneProcess",
    "RegtopkError",
    "ShardedHookState",
    "SparseHookState",
    "StepRecord",
    "UpdateExchange",
    "WarmUp",
    "__version__",
    "attach",
    "core",
    "errors",
    "merge_state_dicts",
    "simulate",
    "sparse_hook",
]
__all__ += algorithms.__all__
