"""What users are told when something is refused."""

from collections.abc import Callable
from typing import Any

from regtopk import errors


def refusal(act: Callable[[], Any]) -> tuple[str, str]:
    """The kind and the text of the error that an act must end with."""
    try:
        act()
    except errors.RegtopkError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was refused")
