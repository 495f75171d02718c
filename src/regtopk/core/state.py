"""What an algorithm remembers between steps, and what becomes of it when the number of ranks changes.

docs/add-an-algorithm.md says what `per_worker` and `shared` fields are. Of a "weighted_sum" each new worker m
takes over some of the old workers n: e'_m = (sum of w_n e_n over these n) / w'_m. What is "owned" is what a
worker owes to all on the entries that it owns (`core.owners`), in units of the sum: it is added to the
residual, over the weight. In the simulator a per-worker field is (N, m).
"""

from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from regtopk.errors import StateError

OnResize = Literal["weighted_sum", "owned", "reset", "shared"]
StateT = TypeVar("StateT", bound="State")


def per_worker(on_resize: Literal["weighted_sum", "owned", "reset"]) -> Any:
    """Declare a state field that differs between workers, and its rule when the number of ranks changes."""
    return field(metadata={"on_resize": on_resize})


def shared(*, per_entry: bool = False) -> Any:
    """Declare a state field that is identical on all ranks; `per_entry`: it holds one number per entry."""
    return field(metadata={"on_resize": "shared", "per_entry": per_entry})


@dataclass
class State:
    """Base of every algorithm's state; holds nothing by itself."""

    @classmethod
    @cache
    def rules(cls) -> dict[str, OnResize]:
        """What becomes of each field, by name, when the number of ranks changes."""
        return {f.name: f.metadata["on_resize"] for f in fields(cls)}

    @classmethod
    def per_entry_fields(cls) -> list[str]:
        """The fields that hold one number per entry of the flat vector, so they can be cut by parameter."""
        return [
            f.name
            for f in fields(cls)
            if f.metadata["on_resize"] == "weighted_sum" or f.metadata.get("per_entry", False)
        ]

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors by field name (not copied)."""
        return {name: getattr(self, name) for name in self.rules()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Take over saved tensors. If a name or the shape of a weighted sum does not fit, nothing changes."""
        if set(state_dict) != set(self.rules()):
            raise StateError(f"state must have the fields {sorted(self.rules())}, got {sorted(state_dict)}")
        for name, rule in self.rules().items():
            own, saved = getattr(self, name), state_dict[name]
            if rule in ("weighted_sum", "owned") and own.shape != saved.shape:
                raise StateError(
                    f"state field {name!r} must have shape {tuple(own.shape)}, got {tuple(saved.shape)}"
                )
        for name, saved in state_dict.items():
            own = getattr(self, name)
            setattr(self, name, saved.to(device=own.device, dtype=own.dtype, copy=True))

    def clone(self: StateT) -> StateT:
        """A copy with tensors of its own."""
        return type(self)(**{name: tensor.clone() for name, tensor in self.state_dict().items()})


def extended(state: StateT, rules: dict[str, Any], **tensors: Tensor) -> StateT:
    """The state with more fields, for each of which the rules have a `per_worker` or `shared`."""
    more = [(name, Tensor, rules[name]) for name in tensors]
    kind = make_dataclass(f"Extended{type(state).__name__}", more, bases=(type(state),))
    longer: StateT = kind(**state.state_dict(), **tensors)
    return longer


@dataclass
class NoState(State):
    """The state of algorithms that remember nothing."""


@dataclass
class ResidualState(State):
    """The sparsification error e that error feedback carries to the next step."""

    residual: Tensor = per_worker("weighted_sum")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of residuals and sums: the gradient's own, but at least float32."""
    return torch.promote_types(dtype, torch.float32)
