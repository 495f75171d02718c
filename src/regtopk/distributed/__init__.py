"""The same algorithms on a real cluster, over torch.distributed."""

from regtopk.distributed.checkpoint import merge_state_dicts
from regtopk.distributed.ddp import SparseHookState, attach, sparse_hook
from regtopk.distributed.exchange import Exchange

__all__ = ["Exchange", "SparseHookState", "attach", "merge_state_dicts", "sparse_hook"]
