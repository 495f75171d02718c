"""The optimizers of a rank (inner): one, or several that each train some of the parameters."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from regtopk.distributed.state.shards import local
from regtopk.errors import ArgumentError, ClusterError

Inner = Optimizer | Sequence[Optimizer]


class InnerOptimizers:
    """The optimizers that together train exactly the parameters that are exchanged.

    A step is a step of each, in the order of the first one. One that the GradScaler skips is not waited for.
    If it skips all, no step is counted.
    Their state dict is that of one optimizer that has all their groups.
    """

    def __init__(
        self, given: Inner, parameters: dict[str, nn.Parameter], grad_scaler: torch.amp.GradScaler | None
    ) -> None:
        self.all = tuple(given) if isinstance(given, Sequence) else (given,)
        _check(self.all, parameters)
        self._grad_scaler = grad_scaler
        self._stepped: dict[Optimizer, None] = {}  # in the step that is being made, in their order
        self._order: list[Optimizer] = []  # of the first step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return list(chain(*(optimizer.param_groups for optimizer in self.all)))

    @property
    def kinds(self) -> str:
        """Their classes: what ranks compare, and a checkpoint with its exchange."""
        return ", ".join(type(optimizer).__name__ for optimizer in self.all)

    def check_turn(self, optimizer: Optimizer) -> None:
        """Refuse a second step of an optimizer before the others have made their first."""
        if optimizer in self._stepped:
            raise ClusterError(
                f"every optimizer must step before one steps again, got {self._told([optimizer])} again "
                f"before {self._missing}. {_SCALER}"
            )
        if self._grad_scaler is None and self._order and optimizer != self._order[len(self._stepped)]:
            expected = self._told([self._order[len(self._stepped)]])
            raise ClusterError(
                f"optimizers must step in the order of the first step, got {self._told([optimizer])} before "
                f"{expected}. {_SCALER}"
            )

    def check_whole(self, call: str) -> None:
        """Refuse a call between the steps of two optimizers."""
        if self._stepped:
            raise ClusterError(
                f"{call}() must be called when every optimizer has stepped, got a step of "
                f"{self._told(self._stepped)} without {self._missing}. {_SCALER}"
            )

    def ends_step(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer's step was the last that the others had to wait for."""
        self._stepped[optimizer] = None
        if any(other not in self._stepped and not self._is_skipped(other) for other in self.all):
            return False
        self._order = self._order or list(self._stepped)
        self._stepped.clear()
        return True

    def state_dict(self) -> dict[str, Any]:
        """As one: numbers of parameters go on from one optimizer to the next."""
        if len(self.all) == 1:
            return self.all[0].state_dict()
        states: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for optimizer in self.all:
            saved = optimizer.state_dict()
            states |= {first + number: state for number, state in saved["state"].items()}
            for group in saved["param_groups"]:
                groups.append({**group, "params": [first + number for number in group["params"]]})
            first += sum(len(group["params"]) for group in saved["param_groups"])
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Give each its part; a step that was being made is forgotten."""
        self._stepped.clear()
        if len(self.all) == 1:
            self.all[0].load_state_dict(saved)
            return
        states, groups = saved["state"], iter(saved["param_groups"])
        for optimizer in self.all:
            own = [next(groups) for _ in optimizer.param_groups]
            numbers = chain(*(group["params"] for group in own))  # which torch takes in this order
            state = {number: states[number] for number in numbers if number in states}
            optimizer.load_state_dict({"state": state, "param_groups": own})

    def _is_skipped(self, optimizer: Optimizer) -> bool:
        """Whether the GradScaler has skipped an optimizer in this step, or is going to."""
        scaler = self._grad_scaler
        if scaler is None or not scaler.is_enabled():
            return False
        known = scaler._per_optimizer_states.get(id(optimizer), {}).get("found_inf_per_device")
        if known:  # it has looked already; gradients may be clipped or gone since
            return any(bool(found) for found in known.values())
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return not all(bool(torch.isfinite(local(grad)).all()) for grad in grads)

    @property
    def _missing(self) -> str:
        return self._told(set(self.all) - self._stepped.keys())

    def _told(self, some: Iterable[Optimizer]) -> str:
        """Some of them, by place and class."""
        chosen = [(place, each) for place, each in enumerate(self.all) if each in some]
        return " and ".join(f"optimizer[{place}] ({type(each).__name__})" for place, each in chosen)


_SCALER = "With a GradScaler, which may skip one of them, pass grad_scaler"
_RECIPE = (
    "hand over all optimizers, such as Muon for the matrices of hidden layers and AdamW for the rest, as "
    "UpdateExchange(model, [muon, adamw], ...)"
)


def _check(optimizers: tuple[object, ...], parameters: dict[str, nn.Parameter]) -> None:
    """Refuse optimizers that do not hold every parameter that is exchanged once, and no others."""
    counts: Counter[nn.Parameter] = Counter()
    if not optimizers:
        raise ArgumentError("optimizer must be a torch.optim.Optimizer, or a list of some, got an empty list")
    for each in optimizers:
        kind = type(each).__name__
        if not isinstance(each, Optimizer):
            raise ArgumentError(f"optimizer must be a torch.optim.Optimizer, or a list of some, got {kind}")
        if any({"train_mode", "weight_sum"} & group.keys() for group in each.param_groups):  # schedulefree's
            raise ArgumentError(
                "optimizer must have in the parameters what it has learned, not an average elsewhere as "
                f"schedule-free ones do, got {kind}"
            )
        counts.update(p for group in each.param_groups for p in group["params"])
    if several := [name for name, p in parameters.items() if counts[p] > 1]:
        raise ArgumentError(f"optimizer must hold every parameter once, got {_listed(several)} in several")
    if missing := [name for name, p in parameters.items() if p not in counts]:
        hint = _RECIPE if len(missing) < len(parameters) else "was it made from another model?"
        raise ArgumentError(
            f"optimizer must hold every parameter that is exchanged, got none with {_listed(missing)}: {hint}"
        )
    others = [tuple(p.shape) for p in counts.keys() - set(parameters.values()) if p.requires_grad]
    if others:
        raise ArgumentError(f"optimizer must hold exchanged parameters, got another of shape {others[0]}")


def _listed(names: list[str]) -> str:
    """The first names, and how many follow."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
