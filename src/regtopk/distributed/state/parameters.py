"""The trainable parameters of an exchange, by name, and what must not happen to them afterwards."""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from regtopk.core.worker import Layout, layer_kinds
from regtopk.errors import ArgumentError, ClusterError

NamedParameters = Iterable[tuple[str, nn.Parameter]] | Iterable[nn.Parameter]  # as optimizers take them


class Parameters:
    """The parameters that required a gradient when this was made, in the module's order.

    Those that are given without names are named by their place. `ignored` are names to leave out.
    """

    takes_dtensors = False

    def __init__(self, source: nn.Module | NamedParameters, ignored: Iterable[str] = ()) -> None:
        self.module = source if isinstance(source, nn.Module) else nn.Module()  # an empty one
        self._ignored = frozenset(ignored)
        if not self.takes_dtensors:
            _refuse_modules(self.module)
        self.whole = self._trainable(source)
        self._seen: list[object] = []  # in the module when names were last looked up, and kept until then
        self.shapes = {name: tuple(p.shape) for name, p in self.named.items()}
        self.kinds = layer_kinds(self.module)

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """What this rank holds of each, by name: here all of it."""
        return self.whole

    @property
    def device(self) -> torch.device:
        """Where they all are."""
        return next(iter(self.named.values())).device

    def layout_of(self, names: Iterable[str]) -> Layout:
        """The layout of some of them, one after another."""
        return Layout.of_shapes((name, self.shapes[name], self.kinds.get(name, "other")) for name in names)

    def check(self) -> None:
        """Refuse parameters that were added, replaced or reshaped since."""
        found = contents_of(self.module)
        if len(found) != len(self._seen) or not all(map(operator.is_, found, self._seen)):
            self._check_names()
            self._seen = found
        for name, p in self.named.items():
            if self.shapes[name] != p.shape:
                raise ClusterError(
                    f"parameter {name!r} must keep its shape {self.shapes[name]}, got {tuple(p.shape)}"
                )

    def _check_names(self) -> None:
        """Refuse parameters that were added or replaced; to look up all names takes a millisecond."""
        for name, p in self.module.named_parameters():
            if p.requires_grad and name not in self._ignored and self.whole.get(name) is not p:
                raise ClusterError(
                    f"parameter {name!r} of shape {tuple(p.shape)} must have been there, requiring a "
                    "gradient, when the exchange was made: make a new one (for DDP: wrap the model anew)"
                )

    def check_trainable(self) -> None:
        """Refuse parameters that were frozen since: what is still owed to them would be lost."""
        for name, p in self.whole.items():
            if not p.requires_grad:
                raise ClusterError(
                    f"parameter {name!r} must keep requiring a gradient: to freeze it, make a new exchange"
                )

    def _trainable(self, source: nn.Module | NamedParameters) -> dict[str, nn.Parameter]:
        named: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for name, p in named_pairs(source):
            if not p.requires_grad or name in self._ignored:
                continue
            if name in named or id(p) in seen:
                raise ArgumentError(f"parameters must be given once each, got {name!r} again")
            if is_dtensor(p) and not self.takes_dtensors:
                raise ClusterError(
                    f"parameter {name!r} must be a plain tensor, got a DTensor: hand over the whole model, "
                    "sharded by fully_shard (FSDP2), to regtopk.attach or regtopk.UpdateExchange"
                )
            if not p.is_floating_point():
                raise ClusterError(f"parameter {name!r} must be real, got {p.dtype}")
            if p.itemsize < 2:  # float8, which torch cannot add to anything
                raise ClusterError(f"parameter {name!r} must have a dtype of 16 bits or more, got {p.dtype}")
            seen.add(id(p))
            named[name] = p
        if not named:
            raise ArgumentError("parameters must hold at least one that requires a gradient, got none")
        devices = {p.device for p in named.values()}
        if len(devices) > 1:
            raise ClusterError(f"parameters must be on one device, got {sorted(map(str, devices))}")
        return named


def facts(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of each: what ranks compare."""
    return [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]


def named_pairs(source: nn.Module | NamedParameters) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) pairs of what a user gave."""
    given: Any = source.named_parameters() if isinstance(source, nn.Module) else source
    pairs: list[tuple[str, Any]] = []
    for place, each in enumerate(given if isinstance(given, Iterable) else [given]):
        pair = (str(place), each) if isinstance(each, torch.Tensor) else each
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[1], torch.Tensor):
            rule = "a module, parameters or (name, parameter) pairs"
            raise ArgumentError(f"parameters must be {rule}, got {type(each).__name__}")
        pairs.append(pair)
    return pairs


def _refuse_modules(module: nn.Module) -> None:
    if isinstance(module, DistributedDataParallel):
        raise ClusterError("module must not be in DistributedDataParallel: use regtopk.attach for that")
    for name, part in module.named_modules():
        what, kind = f"module {name!r}" if name else "the model", type(part).__name__
        if fsdp_version(part):
            raise ClusterError(
                f"{what} must not be sharded by FSDP, got {kind}: use regtopk.attach for fully_shard (FSDP2)"
            )
        if getattr(part, "sparse", False) and isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            raise ClusterError(f"{what} must have sparse=False, got {kind} with sparse=True")


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules inside a model, once each: quickly, for every step."""
    found, seen = [model], {model}
    for module in found:  # it grows meanwhile
        new = {child: None for child in module._modules.values() if child is not None and child not in seen}
        found += new
        seen.update(new)
    return found


def contents_of(model: nn.Module) -> list[object]:
    """All modules inside a model, all names, the parameters, and which of them require a gradient.

    A parameter that a module's own `named_parameters` makes up is not among them.
    """
    modules = modules_of(model)
    names = [name for module in modules for name in (*module._modules, *module._parameters)]
    own = [p for module in modules for p in module._parameters.values() if p is not None]
    return [*modules, *names, *own, *[p.requires_grad for p in own]]


def uncompiled(model: object) -> object:
    """The module inside torch.compile's wrapper, which has no hooks of its own."""
    return getattr(model, "_orig_mod", model)


def refuse_meta(pairs: Iterable[tuple[str, torch.Tensor]], kind: str = "parameter") -> None:
    """Refuse parameters, or buffers, without memory."""
    for name, p in pairs:
        if p.is_meta:
            raise ClusterError(
                f"{kind} {name!r} must be on the device that trains it, got 'meta': call to_empty() and "
                "give it values first"
            )


def fsdp_version(module: object) -> int:
    """Which FSDP has sharded a module, 1 or 2 (fully_shard); 0: none. By name: their imports take long."""
    names = [base.__name__ for base in type(module).__mro__]
    return 2 if "FSDPModule" in names else int("FullyShardedDataParallel" in names)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or what a parameter holds, is a DTensor."""
    # of a DTensor, .data is a new one and takes long
    return type(tensor).__name__ == "DTensor" or type(tensor.data).__name__ == "DTensor"


def after_backward(callback: Callable[[], None]) -> None:
    """Run a callback when this backward is over, and DDP or FSDP has finished with it."""
    # both queue their own ends; a callback that queues another comes later than all of them
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(callback))
