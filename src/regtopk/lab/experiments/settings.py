"""Configurations of experiments: from `key=value` words to a checked, frozen dataclass."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any, TypeVar

import torch

from regtopk.core.algorithm import check_density
from regtopk.core.options import MOST, check_choice, read_number
from regtopk.errors import ArgumentError

ConfigT = TypeVar("ConfigT")
MOST_SEEDS = 10_000
SMALL = 100_000  # entries of a model below which several threads cost more than they save


def parse_settings(
    config_class: type[ConfigT], settings: Sequence[str], base: Mapping[str, Any] | None = None
) -> ConfigT:
    """A configuration from a preset's settings and `key=value` words, read as the type of the default."""
    defaults: dict[str, Any] = {f.name: f.default for f in fields(config_class)}  # type: ignore[arg-type]
    chosen: dict[str, Any] = {}
    for word in settings:
        key, equals, text = word.partition("=")
        if not equals:
            raise ArgumentError(f"setting must be key=value, got {word!r}")
        check_choice("setting", key, defaults)
        if key in chosen:
            raise ArgumentError(f"each setting must be given once, got {key} twice")
        default = defaults[key]
        try:
            if isinstance(default, tuple):
                chosen[key] = tuple(read_number(float, part) for part in text.split(","))
            elif isinstance(default, bool):
                chosen[key] = {"true": True, "false": False}[text.lower()]
            else:
                chosen[key] = text if isinstance(default, str) else read_number(type(default), text)
        except (ValueError, KeyError):
            rule = "numbers with commas between" if default == () else f"like its default, {default!r}"
            raise ArgumentError(f"{key} must be {rule}, got {text!r}") from None
    return config_class(**{**(base or {}), **chosen})


def settings_of(config: Any) -> dict[str, Any]:
    """A configuration as JSON has it, where tuples are lists."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(config).items()}


def parse_seeds(text: str) -> list[int]:
    """Read "3" (three seeds: 0, 1, 2), "3,4,5", "2-6", or "3-3" for seed three alone ("3," is that too)."""
    try:
        if "," in text:
            seeds = [read_number(int, word) for word in text.rstrip(",").split(",")]
        else:
            first, dash, last = text.partition("-")
            start, stop = (read_number(int, word) for word in ((first, last) if dash else ("0", first)))
            seeds = list(range(start, stop + bool(dash))[: MOST_SEEDS + 1])
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0 or max(seeds) > MOST or len(set(seeds)) < len(seeds):
        raise ArgumentError(f"seeds must be a number, or different ones like 3,4,5 or 2-6, got {text!r}")
    if len(seeds) > MOST_SEEDS:
        raise ArgumentError(f"seeds must be at most {MOST_SEEDS}, got {text!r}")
    return seeds


def format_seeds(seeds: Sequence[int]) -> str:
    """As `parse_seeds` reads them."""
    if list(seeds) == list(range(len(seeds))):
        return str(len(seeds))
    return "".join(f"{seed}," for seed in seeds)


def check_densities(name: str, densities: Sequence[float]) -> None:
    """Refuse densities outside (0, 1], none at all, and one given twice."""
    for density in densities:
        check_density(density)
    if not densities or len(set(densities)) < len(densities):
        raise ArgumentError(f"{name} must be different and at least one, got {densities}")


def check_device(name: str, device: str) -> None:
    """Refuse a device other than cpu and cuda, or cuda where there is none."""
    if device not in ("cpu", "cuda"):
        raise ArgumentError(f"{name} must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(f"{name} must be cpu where torch finds no GPU, got 'cuda'")


@contextmanager
def threads_for(numel: int) -> Iterator[None]:
    """Use one thread for models below `SMALL` entries, and torch's own number otherwise."""
    num_threads = torch.get_num_threads()
    if numel < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
