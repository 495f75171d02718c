"""What has an exchange already: no second one may be made for it."""

from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from regtopk.errors import ClusterError

OPTIMIZERS: "WeakSet[Optimizer]" = WeakSet()  # whose updates are exchanged


def refuse_updates(model: nn.Module) -> None:
    """Refuse a model whose updates are exchanged."""
    own = set(map(id, model.parameters()))
    for optimizer in OPTIMIZERS:
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise ClusterError(
                "model must have no UpdateExchange, got one, and gradients would be exchanged beside "
                "updates: close() it first"
            )
