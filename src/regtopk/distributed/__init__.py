"""The same algorithms on a real cluster, over torch.distributed.

The way of a gradient, from backward to the wire and back::

    ddp.py            DDP hands over a bucket (Exchange.step in exchange.py: the whole model)
    bucket_queue.py   only scope="bucket": a thread takes the buckets in order
    step.py           Steps: one flat vector per bucket (layout.py), and a word with the other ranks, whether
                      all exchange the same and are finite (handshake.py); then the algorithm runs
    driver.py         answers each of its requests, by one function of a file each:
                      sparse_sum.py (split.py), dense_sum.py, gather.py, broadcast.py
    rank.py           what these know and count; wire codes and checks the messages
    collectives.py    torch.distributed; the answer goes back up the same way, into `.grad`

Beside the way: buckets.py keeps the algorithm's state by parameter, checkpoint.py saves and loads it,
record.py counts, options.py and parameters.py check what users hand over, and base.py is what every kind of
exchange offers them. A new kind of exchange *has* a `Steps` and feeds it tensors by name.
"""

from regtopk.distributed.checkpoint import merge_state_dicts
from regtopk.distributed.ddp import SparseHookState, attach, sparse_hook
from regtopk.distributed.exchange import Exchange
from regtopk.distributed.options import Options

__all__ = ["Exchange", "Options", "SparseHookState", "attach", "merge_state_dicts", "sparse_hook"]
