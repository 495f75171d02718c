"""What an exchange refuses to start with, whatever the other ranks say."""

from torch.nn.parallel import DistributedDataParallel

from regtopk.core.algorithm import Algorithm
from regtopk.core.options import check_choice, check_integer
from regtopk.errors import ArgumentError, ClusterError

SCOPES = ("model", "bucket")
PEEKS = (  # why an oracle is refused
    "peeks at the sum of all workers' vectors before anything is sent: only a simulator can answer that "
    "(regtopk.simulate.Cluster), a real cluster cannot"
)


def check_options(algorithm: object, dense_steps: object, skip: object, grad_scaler: object) -> None:
    """Options of every exchange."""
    if not isinstance(algorithm, Algorithm):
        raise ArgumentError(
            f"algorithm must be an Algorithm such as RegTopK(density=0.001), got {algorithm!r}"
        )
    check_integer("dense_steps", dense_steps, at_least=0)
    if skip is not None and not callable(skip):
        raise ArgumentError(f"skip must be a callable of (name, parameter), got {skip!r}")
    if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
        raise ArgumentError(f"grad_scaler must be a torch.amp.GradScaler, got {grad_scaler!r}")


def check_scope(scope: object, algorithm: object) -> None:
    """What is selected over."""
    check_choice("scope", scope, SCOPES)
    k = getattr(algorithm, "k", None)
    if scope == "bucket" and k is not None:
        raise ArgumentError(f"k must be None with scope='bucket', whose buckets differ in size, got {k}")


def check_model(model: object) -> None:
    """Only DDP has a hook to attach to."""
    if isinstance(model, DistributedDataParallel):
        return
    kind = type(model).__name__
    if is_fsdp(model):
        raise ClusterError(f"model must be a DistributedDataParallel, got {kind}: FSDP is not supported")
    raise ClusterError(
        f"model must be a DistributedDataParallel, got {kind}: wrap it first, or use regtopk.Exchange"
    )


def is_fsdp(module: object) -> bool:
    """Whether a module is sharded by either kind of FSDP (by name: their imports take long)."""
    return any(base.__name__ in ("FullyShardedDataParallel", "FSDPModule") for base in type(module).__mro__)
