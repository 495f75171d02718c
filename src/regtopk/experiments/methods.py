"""Methods as words: "regtopk", "topk:value_code=4bit", "adaptive:algorithm=consensus:seed=1"."""

from dataclasses import fields
from typing import Any

from regtopk.algorithms import ALGORITHMS
from regtopk.algorithms.posterior import PosteriorScore
from regtopk.core.algorithm import Algorithm
from regtopk.errors import ArgumentError
from regtopk.experiments.settings import check_word

SCORE_OPTIONS = {f.name for f in fields(PosteriorScore)}
START = 0.01  # the density that an adaptive method starts from, unless told


def parse_method(spec: str) -> tuple[str, dict[str, Any]]:
    """The algorithm's name and the options given in words.

    ``score=regtopk`` gives an algorithm RegTop-k's score; mu, reference and q are then the score's.
    ``algorithm=NAME`` says which one is adapted; it is a spec itself, with the options that are its own.

    Raises:
        ArgumentError: an unknown algorithm or option (the nearest is named), or a value that cannot be read.
    """
    name, *words = spec.split(":")
    check_word("algorithm", name, ALGORITHMS)
    known = {f.name: f for f in fields(ALGORITHMS[name])}
    given = dict(_split_word(word, spec) for word in words)
    score = given.pop("score", None)
    options: dict[str, Any] = {}
    if score is not None:
        if score != "regtopk" or "score" not in known:
            raise ArgumentError(f"score must be 'regtopk', of an algorithm that takes one, got {spec!r}")
        of_score = {key: given.pop(key) for key in list(given) if key in SCORE_OPTIONS and key not in known}
        options["score"] = PosteriorScore(**{key: _read(value) for key, value in of_score.items()})
    if "algorithm" in known:
        inner = given.pop("algorithm", "regtopk")
        words = [f"{key}={given.pop(key)}" for key in list(given) if key not in known]
        options["algorithm"] = ":".join([inner, *words])
        parse_method(options["algorithm"])
    for key, value in given.items():
        check_word(f"option of {name}", key, known)
        options[key] = _read(value)
    return name, options


def make_method(spec: str, *, density: float | None, value_code: str | None) -> Algorithm[Any]:
    """The algorithm of a spec, with a density and a value code where it takes them and the spec has none."""
    name, options = parse_method(spec)
    known = {f.name for f in fields(ALGORITHMS[name])}
    if density is not None and "density" in known and not {"density", "k"} & set(options):
        options["density"] = density
    if value_code is not None and "value_code" in known:
        options.setdefault("value_code", value_code)
    if "algorithm" in known:
        options["algorithm"] = make_method(options["algorithm"], density=START, value_code=value_code)
    return ALGORITHMS[name](**options)


def with_budget(spec: str, bytes_per_step: float) -> str:
    """The method told the budget, if it is one that keeps to a budget by itself and has no other aim."""
    name, options = parse_method(spec)
    aims = {"bytes_per_step", "target_error"}
    is_open = "bytes_per_step" in {f.name for f in fields(ALGORITHMS[name])} and not aims & set(options)
    return f"{spec}:bytes_per_step={bytes_per_step:.0f}" if is_open else spec


def takes_density(spec: str) -> bool:
    """Whether the method's density is still open."""
    name, options = parse_method(spec)
    return "density" in {f.name for f in fields(ALGORITHMS[name])} and not {"density", "k"} & set(options)


def _split_word(word: str, spec: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals:
        raise ArgumentError(f"method must be NAME[:OPTION=VALUE]..., got {spec!r}")
    return key, value


def _read(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)
