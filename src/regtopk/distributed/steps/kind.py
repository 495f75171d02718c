"""What tells one kind of exchange from another."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """What one kind of exchange calls its steps, and what it compares them with.

    Args:
        call: what users called to get here, for the error when some rank did not.
        warning: what to log when a step is skipped for the first time; it gets the number of steps so far.
        settings: what all ranks must have the same, beside the options.
        parts: the names of parameters that take turns: a step exchanges one part of the model. Empty: all of
            it is exchanged in every step.
    """

    call: str
    warning: str = (
        "after step %d a rank's gradients were not finite, so all ranks get NaN: look at "
        "last_step.num_skipped before optimizer.step()"
    )
    settings: tuple[tuple[str, Any], ...] = ()
    parts: tuple[tuple[str, ...], ...] = ()
