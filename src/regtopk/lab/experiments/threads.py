"""One thread for small tensors: handing those to several costs more than it saves."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 100_000  # entries of a model


@contextmanager
def threads_for(numel: int) -> Iterator[None]:
    """Use one thread for models below `SMALL` entries, torch's own number otherwise; as before afterwards."""
    num_threads = torch.get_num_threads()
    if numel < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
