"""A method: an algorithm with its options, learning rate, codes and optimizer, and what is exchanged.

It is written as words, NAME[:OPTION=VALUE]...: "regtopk:mu=5" or "topk:exchange=updates:every=2:lr=0.1".
A `Grid` is written with alternatives: "topk:exchange=updates:every=2|4|8:lr=0.1|0.2".
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

from regtopk.algorithms import ALGORITHMS
from regtopk.algorithms.posterior import PosteriorScore
from regtopk.core.algorithm import Algorithm, check_density
from regtopk.core.codes import VALUE_CODES, check_index_code
from regtopk.core.options import check_choice, check_options, check_positive, option, read_number, within
from regtopk.core.precision import RESIDUAL_DTYPES
from regtopk.errors import ArgumentError
from regtopk.rounds import GRADIENTS, Rounds

SCORE_OPTIONS = {f.name for f in fields(PosteriorScore)}
ADAPTED = "regtopk"  # what an adaptive method adapts, unless told
START = 0.01  # the density that an adaptive method starts from, unless told
# words that are no options of an algorithm
OWN = ("lr", "index_code", "optimizer", "weight_decay", "beta2", "residual_dtype")
WORDS = [name for name in Rounds._fields if name != "by_worker"]  # of when updates are exchanged
Option = int | float | bool | str | None
GridPoint = tuple[str, ...]  # of a grid: one value for each option, as written


@dataclass(frozen=True)
class Method:
    """What a label such as "topk:lr=0.1" says.

    ``score=regtopk`` gives an algorithm RegTop-k's score; mu, damping, reference and q are then the score's
    options. ``algorithm=NAME`` says which algorithm an adaptive one adapts, whose options may follow.
    """

    label: str
    algorithm: str
    options: Mapping[str, Option] = field(default_factory=dict, hash=False)  # of the algorithm
    lr: float | None = option(None, check_positive)
    index_code: str = ""
    optimizer: str = ""  # what follows the aggregate, or each worker's gradient
    weight_decay: float | None = option(None, within("[0, inf)"))  # of matrices; None: the optimizer's own
    beta2: float | None = option(None, within("[0, 1)"))  # of Adam; None: the optimizer's own
    residual_dtype: str = ""
    rounds: Rounds = GRADIENTS  # what is exchanged, and how often

    @classmethod
    def read(cls, label: str) -> "Method":
        """Split the words without checking them; text that is no method has no options."""
        name, *words = label.split(":")
        if not all("=" in word for word in words):
            return cls(label, label)
        options = {key: _value(key, text) for key, text in cls(label, name).words}
        own: dict[str, Any] = {key: options.pop(key) for key in OWN if key in options}
        known = [f.name for f in fields(ALGORITHMS[name])] if name in ALGORITHMS else []
        # without `exchange`, a word such as every is the algorithm's if it has such an option
        told = [key for key in WORDS if "exchange" in options or key not in known]
        rounds: dict[str, Any] = {key: options.pop(key) for key in told if key in options}
        parts = str(rounds.get("every", "")).split("/")
        if len(parts) > 1 and all(part.isascii() and part.isdecimal() for part in parts):
            by_worker = tuple(map(int, parts))
            rounds |= {"every": max(by_worker), "by_worker": by_worker}
        if rounds.get("fragments") == "every":  # so that a search of every changes both
            rounds["fragments"] = rounds.get("every", Rounds().every)
        return cls(label, name, options, **own, rounds=Rounds(**rounds))

    @classmethod
    def parse(cls, label: str) -> "Method":
        """Split the words and check them."""
        method = cls.read(label)
        if ":" in method.algorithm:
            raise ArgumentError(f"method must be NAME[:OPTION=VALUE]..., got {label!r}")
        check_options(method)
        check_index_code(method.index_code or "raw32")
        check_choice("residual_dtype", method.residual_dtype or "float32", RESIDUAL_DTYPES)
        method.rounds.check(label)
        method._arguments()
        return method

    @classmethod
    def parse_like(cls, like: str) -> "Method":
        """Read NAME:DENSITY:INDEX_CODE:VALUE_CODE: the method whose bytes all others may send."""
        if like.count(":") != 3:
            raise ArgumentError(f"like must be NAME:DENSITY:INDEX_CODE:VALUE_CODE, got {like!r}")
        name, density, index_code, value_code = like.split(":")
        check_density(_value("density", density))
        check_choice("value_code", value_code, VALUE_CODES)
        return cls.parse(f"{name}:density={density}:index_code={index_code}:value_code={value_code}")

    @property
    def takes_density(self) -> bool:
        """Whether the algorithm takes a density that the words leave open."""
        return "density" in self._known and not {"density", "k"} & set(self.options)

    def build(self, *, density: float | None, value_code: str | None) -> Algorithm[Any]:
        """The algorithm. It gets the density and the value code if it takes them and the words have none."""
        arguments = self._arguments()
        if density is not None and self.takes_density:
            arguments["density"] = density
        if value_code is not None and "value_code" in self._known:
            arguments.setdefault("value_code", value_code)
        if "algorithm" in self._known:
            arguments["algorithm"] = arguments["algorithm"].build(density=START, value_code=value_code)
        return ALGORITHMS[self.algorithm](**arguments)

    def with_budget(self, bytes_per_step: float) -> "Method":
        """The method with a budget, if it keeps to a budget by itself and its words name no other aim."""
        if "bytes_per_step" not in self._known or {"bytes_per_step", "target_error"} & set(self.options):
            return self
        label = f"{self.label}:bytes_per_step={bytes_per_step:.0f}"
        return replace(self, label=label, options=Method.parse(label).options)

    @property
    def words(self) -> list[tuple[str, str]]:
        """All options in the order and the spelling of the label."""
        pairs = (word.partition("=") for word in self.label.removeprefix(self.algorithm).split(":")[1:])
        return [(key, text) for key, _, text in pairs]

    def without(self, option: str) -> str:
        """The words without an option: what variants that differ in that option alone share."""
        return ":".join([self.algorithm, *(f"{key}={text}" for key, text in self.words if key != option)])

    def is_same(self, other: "Method") -> bool:
        """Whether two methods differ in their label at most."""
        return replace(self, label="") == replace(other, label="")

    @property
    def _known(self) -> list[str]:
        return [f.name for f in fields(ALGORITHMS[self.algorithm])]

    def _arguments(self) -> dict[str, Any]:
        """The arguments of the algorithm's class. An adapted algorithm is still a `Method` among them."""
        check_choice("algorithm", self.algorithm, ALGORITHMS)
        known, given = self._known, dict(self.options)
        arguments: dict[str, Any] = {}
        if "score" in given:
            if given.pop("score") != "regtopk" or "score" not in known:
                raise ArgumentError(
                    f"score must be 'regtopk', of an algorithm that takes one, got {self.label!r}"
                )
            own = {key: given.pop(key) for key in list(given) if key in SCORE_OPTIONS and key not in known}
            arguments["score"] = PosteriorScore(**own)  # type: ignore[arg-type]
        if "algorithm" in known:
            name = str(given.pop("algorithm", ADAPTED))
            own = {key: given.pop(key) for key in list(given) if key not in known}
            arguments["algorithm"] = Method(self.label, name, own)
            arguments["algorithm"]._arguments()
        for key in given:
            check_choice(f"option of {self.algorithm}", key, [*known, *OWN, *WORDS])
        return {**arguments, **given}


@dataclass(frozen=True)
class Grid:
    """The methods that words with alternatives stand for."""

    label: str  # the words as written
    lists: Mapping[str, Sequence[str]]  # the values of each option, in the order written and lr first
    methods: Mapping[GridPoint, Method]  # in the order of the lists; every one has a learning rate

    @classmethod
    def parse(cls, label: str, lrs: Sequence[float]) -> "Grid":
        """Split the words and check every method; `lrs` are the learning rates where the words name none."""
        read = Method.read(label)
        lists = {"lr": [str(lr) for lr in lrs]} | {key: text.split("|") for key, text in read.words}
        for key, texts in lists.items():
            if len({_value(key, text) for text in texts}) < len(texts):
                raise ArgumentError(f"{key} must have different values, got {', '.join(texts)} in {label!r}")
        methods = {}
        for point in product(*lists.values()):
            chosen = dict(zip(lists, point, strict=True))
            words = (f"{key}={chosen[key]}" for key, _ in read.words)
            method = Method.parse(":".join([read.algorithm, *words]))
            methods[point] = replace(method, lr=method.lr or float(chosen["lr"]))
        return cls(label, lists, methods)

    @property
    def takes_density(self) -> bool:
        """Whether the words leave the density open."""
        return any(method.takes_density for method in self.methods.values())

    def settings(self, point: GridPoint) -> dict[str, Option]:
        """What tells a point from the others: the values of the options that have several."""
        chosen = zip(self.lists.items(), point, strict=True)
        return {key: _value(key, text) for (key, texts), text in chosen if len(texts) > 1}

    def at_edge(self, point: GridPoint) -> list[str]:
        """The options whose value here is the smallest or the largest of several numbers."""
        lists: dict[str, list[Any]] = {
            key: [_value(key, text) for text in texts] for key, texts in self.lists.items()
        }
        numbers = {key: values for key, values in lists.items() if {*map(type, values)} <= {int, float}}
        chosen = self.settings(point).items()
        return [key for key, x in chosen if key in numbers and x in (min(numbers[key]), max(numbers[key]))]


def _value(key: str, text: str) -> Option:
    """What a text means; "none" is a name where it says what is applied after an exchange."""
    for kind in (int, float):
        with suppress(ValueError):
            return read_number(kind, text)
    return text if key == "outer" else {"true": True, "false": False, "none": None}.get(text.lower(), text)
