"""What ranks need, imported once by the process that they are forked from.

numba takes two seconds to be ready for its first function, torch two for its first optimizer. What is there
by then never goes: nobody looks for garbage meanwhile, and a rank that collects garbage need not look at it
again.
"""

import gc


def _import_all() -> None:
    import numpy as np
    import sklearn.datasets  # noqa: F401
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.run  # noqa: F401 -- and with it the elastic agent

    from regtopk.kernels.cpu.compiled import from_bfloat16

    from_bfloat16(np.uint16(0))


gc.disable()
_import_all()
gc.freeze()
gc.enable()
