"""Checks of the options that algorithms take; every message names the option, its rule and the value."""

from collections.abc import Callable, Sequence
from typing import Any

from regtopk.errors import ArgumentError


def check_number(name: str, number: Any, rule: str, is_allowed: Callable[[float], bool]) -> None:
    """Refuse an option that is not a number, or breaks its rule ("in [0, 1)"); NaN breaks every rule."""
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or not is_allowed(number):
        raise ArgumentError(f"{name} must be {rule}, got {number!r}")


def check_integer(name: str, number: Any, *, at_least: int | None = None) -> None:
    """Refuse an option that is not an integer, or is too small."""
    if type(number) is not int or (at_least is not None and number < at_least):
        rule = "an integer" if at_least is None else f"an integer of at least {at_least}"
        raise ArgumentError(f"{name} must be {rule}, got {number!r}")


def check_choice(name: str, choice: Any, choices: Sequence[str]) -> None:
    """Refuse an option that is not one of a few words."""
    if choice not in choices:
        raise ArgumentError(f"{name} must be one of {', '.join(choices)}, got {choice!r}")
