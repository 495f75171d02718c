"""Configurations of experiments: from `key=value` words to a checked, frozen dataclass."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

import torch

from regtopk.errors import ArgumentError

ConfigT = TypeVar("ConfigT")


def parse_settings(
    config_class: type[ConfigT], settings: Sequence[str], base: Mapping[str, Any] | None = None
) -> ConfigT:
    """Build a configuration from its defaults and some `key=value` words.

    A value is read as the type of the default: an integer, a number, a word, or numbers with commas.

    Args:
        config_class: the dataclass.
        settings: the words.
        base: settings of a preset, which the words may change.

    Raises:
        ArgumentError: a word without "=", an unknown key (the nearest one is named), a key given twice,
            or a value that cannot be read or breaks its rule.
    """
    defaults: dict[str, Any] = {f.name: f.default for f in fields(config_class)}  # type: ignore[arg-type]
    chosen: dict[str, Any] = {}
    for word in settings:
        key, equals, text = word.partition("=")
        if not equals:
            raise ArgumentError(f"--set must be key=value, got {word!r}")
        check_word("--set key", key, defaults)
        if key in chosen:
            raise ArgumentError(f"each setting must be given once, got {key} twice")
        chosen[key] = _parse(key, text, defaults[key])
    return config_class(**{**(base or {}), **chosen})


def _parse(key: str, text: str, default: Any) -> Any:
    try:
        if isinstance(default, tuple):
            return tuple(float(part) for part in text.split(","))
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        return type(default)(text)
    except (ValueError, KeyError):
        kind = "numbers with commas" if isinstance(default, tuple) else f"of type {type(default).__name__}"
        kind = "true or false" if isinstance(default, bool) else kind
        raise ArgumentError(f"{key} must be {kind} (default {default!r}), got {text!r}") from None


def check_word(name: str, word: str, words: Iterable[str]) -> None:
    """Refuse a word that is not among some; the nearest one is named."""
    known = list(words)
    if word not in known:
        raise ArgumentError(
            f"{name} must be one of {', '.join(known)}, got {word!r} {did_you_mean(word, known)}"
        )


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """The nearest of some words, as a question in brackets."""
    return f"(did you mean {get_close_matches(word, words, n=1, cutoff=0.0)[0]!r}?)"


def check_count(name: str, count: int) -> None:
    """Refuse a count below 1."""
    if count < 1:
        raise ArgumentError(f"{name} must be an integer of at least 1, got {count}")


def check_positive(name: str, number: float) -> None:
    """Refuse a number that is not positive and finite."""
    if not 0 < number < math.inf:
        raise ArgumentError(f"{name} must be positive and finite, got {number}")


def check_device(device: str) -> None:
    """Refuse a device other than cpu and cuda, or cuda where there is none."""
    if device not in ("cpu", "cuda"):
        raise ArgumentError(f"device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device must be cpu where torch finds no GPU, got 'cuda'")
