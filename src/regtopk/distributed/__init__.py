"""The same algorithms on a real cluster, over torch.distributed.

The way of a gradient, from backward to the wire and back. Each file calls the next, and none calls one that
it came from (tests/distributed/test_way.py traces a step on two ranks)::

    ddp.py             DDP hands over its buckets (without DDP: exchange.py; scope="bucket": bucket_queue.py;
                       sharded models: fsdp.py, whose units fsdp_units.py finds)
    step.py            makes flat vectors of them, once all ranks agree on what is exchanged
    driver.py          runs the algorithm on each, or on several at once that are alike (alike.py):
    core/algorithm.py  the algorithm selects entries and makes requests
    driver.py          passes each request to its function:
    sparse_sum.py      here a sparse sum; dense_sum.py and broadcast.py are others
    gather.py          codes a message (regtopk.wire), gathers every rank's, and decodes them
    collectives.py     torch.distributed; the answer goes back up the same way, into `.grad`

A step of RegTop-k enters 14 files of this package: those six, and these, which are called on the way and
return at once (and 20 of core, algorithms, kernels and wire)::

    parameters.py      are all parameters still trainable?
    bucket_queue.py    what DDP waits for: the future of a bucket
    buckets.py         the state of the algorithm, by parameter
    layout.py          parameters as one flat vector
    agreement.py       do all ranks exchange the same, and are all gradients finite? (by collectives.py)
    rank.py            what this rank knows and counts
    split.py           would a sum split by region move fewer bytes?
    record.py          the counts of all steps

Beside the way: handshake.py compares what ranks were given, checkpoint.py saves and loads, options.py checks
what users hand over, base.py is what every kind of exchange offers them, attach.py finds the right one,
sharded.py knows of parameters of which a rank holds a part, and one_process.py stands in where there is
nobody to exchange with. A new kind of exchange *has* a `Steps` and feeds it tensors by name.

updates.py is such a kind. It feeds what an optimizer has changed since the round began: local_model.py keeps
where that was, optimizers.py looks after the two optimizers, model_buffers.py after buffers, and
update_checkpoint.py saves them.

Checkpoints of a whole run are checkpoints.py's: checkpoint_files.py writes and reads, checkpoint_choice.py
finds the newest complete one, checkpoint_loading.py gives it to ranks that may be others, and
checkpoint_states.py copies and compares.
"""

from regtopk.distributed.checkpoints.folder import Checkpoints
from regtopk.distributed.gradients.attach import attach
from regtopk.distributed.gradients.ddp import SparseHookState, sparse_hook
from regtopk.distributed.gradients.loop import Exchange
from regtopk.distributed.state.saved import merge_state_dicts
from regtopk.distributed.updates.exchange import UpdateExchange

__all__ = [
    "Checkpoints",
    "Exchange",
    "SparseHookState",
    "UpdateExchange",
    "attach",
    "merge_state_dicts",
    "sparse_hook",
]
