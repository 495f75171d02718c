"""The same algorithms on a real cluster, over torch.distributed.

The way of a gradient, from backward to the wire and back (a test traces it)::

    gradients/ddp                 DDP hands over its gradients (sharded models: fsdp; without DDP: attach)
    steps/step                    makes flat vectors of them, and begins a step
    steps/agreement               do all ranks exchange the same, and are all gradients finite?
    steps/driver                  runs the algorithm on each vector, and passes its requests on:
    requests/sparse_sum           here a sparse sum (others: owner_sums, gather)
    requests/gather               codes a message (regtopk.wire), gathers every rank's, and decodes them
    transport/collectives         torch.distributed; the answer goes back up the same way, into `.grad`

The way of an update, from the optimizer's step to the next round::

    updates/exchange              the optimizer has made a step
    regtopk/rounds                is a round due, and of which fragment? torchft and the simulator ask it too
    updates/rank_rounds           what has changed since the round began is the update
    steps/step                    and so on as above; the aggregate is subtracted from where the round began
"""

from regtopk.distributed.checkpoints.folder import Checkpoints
from regtopk.distributed.gradients.attach import Exchange, OneProcess, attach
from regtopk.distributed.gradients.ddp import SparseHookState, sparse_hook
from regtopk.distributed.gradients.fsdp import ShardedHookState
from regtopk.distributed.options import ExchangeOptions
from regtopk.distributed.requests.record import StepRecord
from regtopk.distributed.state.saved import merge_state_dicts
from regtopk.distributed.steps.base import ExchangeBase
from regtopk.distributed.updates.exchange import UpdateExchange

__all__ = [
    "Checkpoints", "Exchange", "ExchangeBase", "ExchangeOptions", "OneProcess", "ShardedHookState",
    "SparseHookState", "StepRecord", "UpdateExchange", "attach", "merge_state_dicts", "sparse_hook",
]  # fmt: skip
