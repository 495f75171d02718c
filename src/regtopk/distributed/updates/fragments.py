"""Parts of a model whose rounds take turns, and rounds that are under way while training goes on."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regtopk.distributed.transport.background import Background


class Flight:
    """A round that is made beside training.

    Args:
        background: what makes it.
        make_round: makes it; returns whether all ranks' updates were finite.
        device: where it works.
    """

    def __init__(self, background: Background, make_round: Callable[[], bool], device: torch.device) -> None:
        self._make_round = make_round
        self._is_finite = False
        self._failure: BaseException | None = None
        self._has_landed = threading.Event()
        is_cuda = device.type == "cuda"
        self._device = device
        self._sent, self._received = (torch.cuda.Event() if is_cuda else None for _ in range(2))
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(device))
        background.put(self._run)

    def raise_failure(self) -> None:
        """Raise what went wrong, if that is known already."""
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Wait for the round's end, however it ends."""
        self._has_landed.wait()

    def land(self) -> bool:
        """Wait for the round's end; whether all ranks' updates were finite."""
        self.wait()
        self.raise_failure()
        if self._received is not None:
            self._received.wait(torch.cuda.current_stream(self._device))
        return self._is_finite

    def _run(self) -> None:
        try:
            if self._sent is not None:
                self._sent.wait(torch.cuda.current_stream(self._device))
            self._is_finite = self._make_round()
            if self._received is not None:
                self._received.record(torch.cuda.current_stream(self._device))
        except BaseException as error:  # raised where the rank next looks
            self._failure = error
        self._has_landed.set()


@dataclass(eq=False)
class Fragment:
    """Parameters that are exchanged in one round.

    Attributes:
        names: of the parameters.
        flight: the round that is under way.
        sent: by name, the parameters as they were when their update was sent; empty if none is on its way.
        is_skipped: whether the round whose flight is not known, because it was loaded, was not finite.
        num_steps: how many of the optimizer its newest round has.
    """

    names: tuple[str, ...]
    flight: Flight | None = None
    sent: dict[str, Tensor] = field(default_factory=dict)
    is_skipped: bool = False
    num_steps: int = 0

    def land(self) -> bool:
        """Wait for what is under way; whether all ranks' updates were finite."""
        return not self.is_skipped if self.flight is None else self.flight.land()

    def clear(self) -> None:
        """Nothing is under way any more."""
        self.flight, self.sent, self.is_skipped = None, {}, False
