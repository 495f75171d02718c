"""Which kind of layer each parameter of a module belongs to, as layer-wise algorithms want to know it."""

from torch import nn


def layer_kinds(module: nn.Module) -> dict[str, str]:
    """Parameter name to "conv", "linear", "recurrent", "embedding", "norm", "bias" or "other"."""
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
