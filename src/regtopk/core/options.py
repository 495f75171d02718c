"""Checks of options and settings; every message names the option, its rule and the value."""

import math
from collections.abc import Callable, Iterable
from difflib import get_close_matches
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


def check_positive(name: str, number: Any) -> None:
    """Refuse an option that is not a positive, finite number."""
    check_number(name, number, "positive and finite", lambda x: 0 < x < math.inf)


def check_choice(name: str, choice: Any, choices: Iterable[str]) -> None:
    """Refuse an option that is not one of a few words; a word that is close to it is suggested."""
    words = list(choices)
    if choice not in words:
        raise ArgumentError(
            f"{name} must be one of {', '.join(words)}, got {choice!r}{did_you_mean(choice, words)}"
        )


def did_you_mean(word: Any, words: Iterable[str]) -> str:
    """A question that names the closest of some words, in brackets; nothing if none is close."""
    close = get_close_matches(str(word), words, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
