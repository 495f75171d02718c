"""One line for users: `attach` makes a model exchange its gradients sparsely, however it is wrapped."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from regtopk.core.algorithm import Algorithm
from regtopk.distributed.gradients.ddp import SparseHookState, attach_to_ddp
from regtopk.distributed.gradients.fsdp import ShardedHookState
from regtopk.distributed.gradients.one_process import OneProcess, is_one_process
from regtopk.distributed.options import Collective, Options, ResidualDtype, Skip, Writer, names_typos
from regtopk.distributed.state.parameters import is_fsdp, is_fsdp2, uncompiled
from regtopk.distributed.updates.exchange import refuse_updates
from regtopk.errors import ArgumentError


@names_typos
def attach(
    model: nn.Module,
    algorithm: Algorithm[Any],
    *,
    replicate_group: dist.ProcessGroup | DeviceMesh | None = None,
    index_code: str = "elias-fano",
    weight: float | None = None,
    dense_steps: int = 0,
    skip: Skip | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    collective: Collective = "auto",
    deterministic: bool = True,
    writer: Writer | None = None,
    handshake_timeout_s: float = 60.0,
    residual_dtype: ResidualDtype = "float32",
) -> SparseHookState | ShardedHookState | OneProcess:
    """Make a DDP or fully_shard'ed model exchange its gradients with an algorithm. Call it on every rank.

    >>> model = DistributedDataParallel(model)
    >>> exchange = regtopk.attach(model, regtopk.RegTopK(density=0.001))
    >>> ...                                  # train as before
    >>> print(exchange.summary())

    A model that fully_shard has sharded over one axis of a mesh is exchanged over the other, the replicas.
    Every rank exchanges its own part of each FSDP unit with the ranks that hold the same part:

    >>> mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
    >>> fully_shard(model, mesh=mesh["shard"])
    >>> exchange = regtopk.attach(model, regtopk.TopK(density=0.01), replicate_group=mesh["replicate"])

    With Adam, and where you clip, use `regtopk.UpdateExchange`. What arrives here is a sum of late pulses: an
    entry that is sent rarely brings what it gathered over many steps. So `clip_grad_norm_` after backward
    clips nearly every step, and AdamW's second moment is that of the pulses, not of the gradients.

    Nothing is exchanged before backward is over, so your own code cannot interrupt it. If the exchange itself
    fails (a lost rank), the state is no longer whole: the exchange refuses to be saved or to go on until a
    checkpoint is loaded.

    Args:
        model: wrapped in DistributedDataParallel, without another communication hook; torch.compile may be
            around that. Where there is one process, a model that is not wrapped is left as it is. Or sharded
            by fully_shard over a mesh of one dimension.
        algorithm: what is run; the same on every rank.
        replicate_group: of a sharded model, and only then: the ranks that hold the same part of it.
        index_code: how indices are coded: "elias-fano", "rice" or "raw32".
        weight: this rank's w_n; 1/N if None. The weights of all ranks must sum to one within 1e-6.
        dense_steps: how many first steps send everything.
        skip: a callable of (name, parameter): True sends that parameter dense,
            for example ``lambda name, p: p.ndim <= 1``.
        grad_scaler: the torch.amp.GradScaler in use: residuals are then kept unscaled.
        collective: how sparse sums run: "auto" (computed), "all_gather" or "split".
        deterministic: sum uncoded dense vectors in rank order too, not in the order of the backend.
        writer: a TensorBoard SummaryWriter (or anything with add_scalar) that gets every step's numbers.
        handshake_timeout_s: how long to wait for every rank to make this call.
        residual_dtype: how residuals are kept between steps: "float32", or in half the memory "bfloat16",
            rounded at random.

    Returns:
        The exchange: `summary()`, `total` and `last_step`; `state_dict()`, `gather_state_dict()` and
        `load_state_dict()`; `report()`, for adaptive algorithms; `detach()`, to train on without it; and
        `close()`, for those who attach to many models in one process.

    Raises:
        ArgumentError: an option breaks its rule, or does not fit the model.
        ClusterError: not a DDP or fully_shard'ed model, attached twice, the ranks differ, or a rank did not
            make this call; nothing was changed.
        OracleError: the algorithm asks what only a simulator can answer.
    """
    inner = uncompiled(model)
    is_sharded = isinstance(inner, nn.Module) and any(map(is_fsdp2, inner.modules()))
    _check_sharding(inner, is_sharded, replicate_group, skip)
    options = Options(
        index_code=index_code,
        weight=weight,
        dense_steps=dense_steps,
        skip=skip,
        grad_scaler=grad_scaler,
        collective=collective,
        deterministic=deterministic,
        writer=writer,
        handshake_timeout_s=handshake_timeout_s,
        residual_dtype=residual_dtype,
    )
    if isinstance(inner, nn.Module):
        refuse_updates(inner)
    if isinstance(inner, nn.Module) and is_sharded:
        return ShardedHookState(inner, algorithm, replicate_group, options)
    is_wrapped = isinstance(inner, DistributedDataParallel) or is_fsdp(inner)
    if isinstance(inner, nn.Module) and not is_wrapped and is_one_process():
        return OneProcess(inner, algorithm, options)
    return attach_to_ddp(model, algorithm, options)


def _check_sharding(model: object, is_sharded: bool, replicate_group: object, skip: Skip | None) -> None:
    """Refuse options that do not fit a model that is sharded, or one that is not."""
    if not is_sharded and replicate_group is not None:
        raise ArgumentError(
            f"replicate_group must be None for a model that is not fully_shard'ed, got one for "
            f"{type(model).__name__}: call fully_shard(model, mesh=mesh['shard']) first, or wrap it in "
            "DistributedDataParallel and leave the group out"
        )
    if is_sharded and skip is not None:
        raise ArgumentError(
            f"skip must be None for a fully_shard'ed model, whose units are exchanged whole, got {skip!r}"
        )
