"""Weight files: a dictionary of named tensors, as torch.save writes a network's state_dict()."""

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regtopk.errors import ArgumentError, StateError

HEAD = "fc."  # every classifier here calls its last layer fc
UNUSED = "num_batches_tracked"  # torch's count for a moving average, which our BatchNorm does not keep


def load_weights(network: nn.Module, path: Path, *, replace_head: bool = False) -> None:
    """Copy the tensors of a file into a network, all of them or none.

    Names are compared without leading underscores, as EfficientNet's file has them.

    Args:
        replace_head: leave the network's own last layer `fc` as it is, whatever the file has there: for files
            with another number of classes.

    Raises:
        ArgumentError: there is no such file, it cannot be read, or the network has no `fc` to replace.
        StateError: names or shapes do not fit; the message lists what is missing, unexpected and misshaped.
    """
    given = _read(path)
    wanted = {name: tensor for name, tensor in network.state_dict().items() if not name.endswith(UNUSED)}
    if replace_head:
        if not any(name.startswith(HEAD) for name in wanted):
            raise ArgumentError(
                f"weights must be of a classifier, whose last layer is replaced, got {type(network).__name__}"
            )
        given = {name: tensor for name, tensor in given.items() if not name.startswith(HEAD)}
        wanted = {name: tensor for name, tensor in wanted.items() if not name.startswith(HEAD)}
    _check_fit(given, wanted, path)
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(given[name])


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ArgumentError(
            f"weights must be a file, got {path}: {'a folder' if path.is_dir() else 'nothing there'}"
        )
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError) as error:
        raise ArgumentError(
            f"weights must be a file of torch.save that holds tensors alone, got {path} "
            f"({type(error).__name__})"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        held = (
            f"a dictionary of {_some(map(str, content))}"
            if isinstance(content, dict)
            else type(content).__name__
        )
        raise ArgumentError(f"weights must be a dictionary of tensors, got {held} in {path}")
    plain = {re.sub(r"(^|\.)_+", r"\1", str(name)): tensor for name, tensor in content.items()}
    return {name: tensor for name, tensor in plain.items() if not name.endswith(UNUSED)}


def _check_fit(given: dict[str, Tensor], wanted: dict[str, Tensor], path: Path) -> None:
    misshaped = [
        f"{name} {tuple(given[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in given and given[name].shape != tensor.shape
    ]
    problems = {
        "missing": [name for name in wanted if name not in given],
        "unexpected": [name for name in given if name not in wanted],
        "misshaped": misshaped,
    }
    found = "; ".join(f"{what} {_some(names)}" for what, names in problems.items() if names)
    if found:
        is_head_alone = not problems["missing"] and not problems["unexpected"] and _are_of_head(misshaped)
        hint = " (another head: replace_head=True keeps the network's own)" if is_head_alone else ""
        raise StateError(f"weights must fit the network, got {path}: {found}{hint}")


def _are_of_head(names: list[str]) -> bool:
    return all(name.startswith(HEAD) for name in names)


def _some(names: Any, most: int = 4) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
