"""What an exchange of updates hears of its module: that it has loaded weights, and that it was read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod

from regtopk.errors import log


class Notices:
    """Remembers that a module has loaded weights, and warns once if it is read inside a round.

    Inside a round the module's weights are this rank's. A copy of the module says nothing.
    """

    _is_silent = False  # while those read who know

    def __init__(self, is_inside: Callable[[], bool] | None = None) -> None:
        self._is_inside = None if is_inside is None else WeakMethod(is_inside)  # no module holds its exchange
        self._has_loaded = False

    def __reduce__(self) -> Any:
        return Notices, ()

    def hear_load(self, *_: Any) -> None:
        """Called by the module."""
        self._has_loaded = True

    def taken(self) -> bool:
        """Whether it has loaded weights since this was last asked."""
        has_loaded, self._has_loaded = self._has_loaded, False
        return has_loaded

    def hear_read(self, *_: Any) -> None:
        """Called by the module."""
        is_inside = None if self._is_inside is None or Notices._is_silent else self._is_inside()
        if is_inside is not None and is_inside():
            self.mute()
            log.warning(
                "state_dict() of the model was called inside a round: it holds this rank's weights. Call it "
                "`with exchange.agreed():` for those that all ranks share, or save exchange.state_dict()"
            )

    def mute(self) -> None:
        """Say nothing of reads from now on."""
        self._is_inside = None

    @classmethod
    @contextmanager
    def silent(cls) -> Iterator[None]:
        """Let modules be read."""
        before, cls._is_silent = cls._is_silent, True
        try:
            yield
        finally:
            cls._is_silent = before
