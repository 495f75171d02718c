"""Checks of options and settings; every message names the option, its rule and the value.

An algorithm declares an option with its check, and the check runs when the algorithm is made::

    decay: float = option(1.0, within("[0, 1]"))
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import field, fields
from difflib import get_close_matches
from typing import Any, TypeVar

from regtopk.errors import ArgumentError

Check = Callable[[str, Any], Any]
NumberT = TypeVar("NumberT", int, float)
MOST = 2**31 - 1  # of an option that counts something, unless it says less


def option(default: Any, check: Check) -> Any:
    """Declare a field with its default, or MISSING, and its check; a default of None is not checked."""
    return field(default=default, metadata={"check": check})


def check_options(options: Any) -> None:
    """Run the checks that the fields of a dataclass declare."""
    for f in fields(options):
        given = getattr(options, f.name)
        if "check" in f.metadata and not (given is None and f.default is None):
            f.metadata["check"](f.name, given)


def within(interval: str) -> Check:
    """A number in an interval such as "[0, 1)"; "(0, inf)" are the positive and finite numbers."""
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    has_low, has_high = interval[0] == "[", interval[-1] == "]"

    def is_inside(x: float) -> bool:
        return (low <= x if has_low else low < x) and (x <= high if has_high else x < high)

    return lambda name, given: check_number(name, given, f"in {interval}", is_inside)


def integer(at_least: int | None = None, at_most: int | None = MOST) -> Check:
    """An integer within bounds."""
    return lambda name, given: check_integer(name, given, at_least=at_least, at_most=at_most)


def one_of(*words: str) -> Check:
    """One of a few words."""
    return lambda name, given: check_choice(name, given, words)


def true_or_false(name: str, given: Any) -> None:
    """True or False itself: 1 may be a mistake."""
    if type(given) is not bool:
        raise ArgumentError(f"{name} must be True or False, got {given!r}")


def check_number(name: str, number: Any, rule: str, is_allowed: Callable[[float], bool]) -> None:
    """Refuse an option that is not a number, or breaks its rule ("in [0, 1)"); NaN breaks every rule."""
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or not is_allowed(number):
        raise ArgumentError(f"{name} must be {rule}, got {number!r}")


def check_integer(name: str, number: Any, *, at_least: int | None = None, at_most: int | None = None) -> None:
    """Refuse an option that is not an integer, or is too small or too large."""
    rule = "an integer" if at_least is None else f"an integer of at least {at_least}"
    if type(number) is not int or (at_least is not None and number < at_least):
        raise ArgumentError(f"{name} must be {rule}, got {number!r}")
    if at_most is not None and number > at_most:
        raise ArgumentError(f"{name} must be at most {at_most}, got {number}")


def read_number(kind: type[NumberT], text: str) -> NumberT:
    """int(text) or float(text), or a ValueError: Python would take digits of other scripts, too."""
    if not text.isascii():
        raise ValueError(f"a number has the digits 0 to 9, got {text!r}")
    return kind(text)


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
    digits = re.findall(r"\d", str(word))  # are no slips: "8bit" is not "4bit"
    alike = [each for each in words if not digits or re.findall(r"\d", each) == digits]
    close = get_close_matches(str(word), alike, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def counted(number: int, noun: str) -> str:
    """A number of things: "1 seed", "2 seeds", "1,000 steps"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
