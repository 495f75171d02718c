"""Parameters by name, and the flat vector they make in that order."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from regtopk.core.state import accumulation_dtype
from regtopk.core.worker import Layout
from regtopk.errors import ArgumentError, ClusterError

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def named_parameters(source: nn.Module | NamedParameters) -> dict[str, nn.Parameter]:
    """The trainable parameters by name, in the module's order; refuses what cannot be exchanged."""
    if isinstance(source, nn.Module):
        _refuse_modules(source)
        source = source.named_parameters()
    named = {name: p for name, p in source if p.requires_grad}
    if not named:
        raise ArgumentError("parameters must hold at least one that requires a gradient, got none")
    for name, p in named.items():
        if type(p).__name__ == "DTensor" or type(p.data).__name__ == "DTensor":
            raise ClusterError(f"parameter {name!r} is a DTensor: sharded parameters are not supported")
    devices = {p.device for p in named.values()}
    if len(devices) > 1:
        raise ClusterError(f"parameters must be on one device, got {sorted(map(str, devices))}")
    return named


def _refuse_modules(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if any(base.__name__ in ("FullyShardedDataParallel", "FSDPModule") for base in type(part).__mro__):
            raise ClusterError(
                f"module {name!r} is {type(part).__name__}: FSDP shards its gradients, which is not supported"
            )
        if getattr(part, "sparse", False) and isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            raise ClusterError(
                f"module {name!r} is {type(part).__name__} with sparse=True: sparse-layout gradients are "
                "not supported"
            )


def kinds_of(module: nn.Module | None) -> dict[str, str]:
    """Parameter name to the kind of layer it belongs to, as layer-wise algorithms want it."""
    if module is None:
        return {}
    kinds = {}
    for module_name, part in module.named_modules():
        for name, p in part.named_parameters(recurse=False):
            kinds[f"{module_name}.{name}" if module_name else name] = _kind(part, name, p)
    return kinds


def _kind(part: nn.Module, name: str, p: nn.Parameter) -> str:
    class_name = type(part).__name__.lower()
    if name.startswith("bias"):
        return "bias"
    if isinstance(part, nn.RNNBase):
        return "recurrent"
    for word in ("conv", "linear", "embedding", "norm"):
        if word in class_name:
            return word
    return "other" if p.dim() > 1 else "bias"


def layout_of(names: Iterable[str], shapes: dict[str, tuple[int, ...]], kinds: dict[str, str]) -> Layout:
    """The layout of some parameters, one after another."""
    return Layout.of_shapes((name, shapes[name], kinds.get(name, "other")) for name in names)


def flat_dtype(parameters: Iterable[nn.Parameter]) -> torch.dtype:
    """What a flat gradient of these parameters is kept in."""
    dtype = torch.float32
    for p in parameters:
        dtype = torch.promote_types(dtype, accumulation_dtype(p.dtype))
    return dtype


def copy_to_flat_(flat: Tensor, grads: Iterable[Tensor]) -> None:
    """Write gradients one after another into a flat vector."""
    start = 0
    for grad in grads:
        flat[start : start + grad.numel()].view_as(grad).copy_(grad)
        start += grad.numel()


def copy_from_flat_(grads: Iterable[Tensor], flat: Tensor) -> None:
    """Write a flat vector back into gradients, one after another."""
    start = 0
    for grad in grads:
        grad.copy_(flat[start : start + grad.numel()].view_as(grad))
        start += grad.numel()
