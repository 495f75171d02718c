"""A method of a deep training, as words: an algorithm's, and what belongs to its run."""

from dataclasses import dataclass
from typing import Any

from regtopk.core.algorithm import Algorithm
from regtopk.core.codes import check_index_code
from regtopk.errors import ArgumentError
from regtopk.experiments.methods import make_method, parse_method, takes_density
from regtopk.experiments.settings import check_positive


@dataclass(frozen=True)
class Method:
    """An algorithm with its learning step length and index code.

    Args:
        label: the words as given.
        spec: those of the algorithm alone.
        lr: learning step length.
        index_code: how indices travel.
    """

    label: str
    spec: str
    lr: float
    index_code: str = "elias-fano"

    @classmethod
    def parse(cls, label: str, *, lr: float) -> "Method":
        """Read NAME[:OPTION=VALUE]..., where lr and index_code belong to the run."""
        index_code = cls.index_code
        words = []
        for word in label.split(":"):
            key, _, value = word.partition("=")
            if key == "lr":
                lr = _number(value, label)
            elif key == "index_code":
                index_code = check_index_code(value)
            else:
                words.append(word)
        spec = ":".join(words)
        parse_method(spec)
        check_positive("lr", lr)
        return cls(label, spec, lr, index_code)

    @property
    def takes_density(self) -> bool:
        """Whether its density is still open."""
        return takes_density(self.spec)

    def algorithm(self, density: float | None, value_code: str) -> Algorithm[Any]:
        """What the workers run."""
        return make_method(self.spec, density=density, value_code=value_code)


def _number(text: str, label: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentError(f"lr must be a number, got {label!r}") from None
