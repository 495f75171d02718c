"""Write docs/algorithms.md from the table of algorithms: python tools/catalogue.py.

Nothing about an algorithm is written down a second time: its class docstring has the words.
"""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from regtopk.algorithms import ALGORITHMS
from regtopk.core import Algorithm

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"
USE = "Use it for: "
# options that the page explains once
COMMON = ("density", "k", "value_code", "impute", "returned", "score", "seed")
PAGE_NAME, LINK = re.compile(r"docs/([\w-]+\.md)"), r"[\1](\1)"  # pages that docstrings name
OPTION = re.compile(r"^    (\w[\w, ]*): (.*?)(?=^    \w|\Z)", re.DOTALL | re.MULTILINE)  # of a section Args
ERROR_FEEDBACK = re.compile(
    r"(^|, )(a_n = e_n \+ g_n|send (s|s_n) \* a_n, receive g = sum_n w_n \((s|s_n) \* a_n\)"
    r"|e_n := a_n - (s|s_n) \* a_n)(?=,|$)"
)  # the equations that the page has once

HEAD = """# Algorithms

Every class is importable from `regtopk`: `regtopk.attach(model, regtopk.DGC(density=0.001))`.
[which-method.md](which-method.md) says which to try first, [add-an-algorithm.md](add-an-algorithm.md) how to
write one. fp16 is not here: torch ships it as a hook.

Worker n of N has the gradient g_n of J entries, the residual e_n and the weight w_n; s_n is a mask. What
the equations below leave out is error feedback:

```text
a_n = e_n + g_n, send s_n * a_n, receive the aggregate g = sum_n w_n (s_n * a_n), e_n := a_n - s_n * a_n
```

These options mean the same in all algorithms:

- `density`: k / J in (0, 1], or a function of the step such as `WarmUp`; or give `k` itself.
- `value_code`: how values travel: `float32`, `bfloat16`, `float16`, `int8`, `4bit`, `2bit` or `sign`. The
  residual keeps what a code loses.
- `impute`: rho in [0, 1] of [imputation](imputation.md); 0 infers nothing.
- `returned`: the part of J that comes [back](returned.md) of a sum; None: all of it.
- `score`: None selects by magnitude, a `PosteriorScore` as RegTop-k does.
- `seed`: of the random draws, an integer.

The docstrings say how each was checked. `python tools/catalogue.py` writes this page from them.

"""


def paragraphs_of(kind: type[Algorithm[Any]]) -> list[str]:
    """The paragraphs of a class docstring: summary, equations, and what follows."""
    return inspect.cleandoc(kind.__doc__ or "").split("\n\n")


def use_of(kind: type[Algorithm[Any]]) -> str:
    """What the class docstring says after "Use it for: ", without the full stop."""
    for paragraph in paragraphs_of(kind):
        if paragraph.startswith(USE):
            return _one_line(paragraph.removeprefix(USE)).removesuffix(".")
    raise ValueError(f"the docstring of {kind.__name__} must have a paragraph '{USE}...'")


def options_of(kind: type[Algorithm[Any]]) -> list[str]:
    """One line for each option of its own: the default, and what the docstring says."""
    (described,) = (p for p in paragraphs_of(kind) if p.startswith("Args:\n"))
    defaults = {f.name: f.default for f in fields(kind)}
    lines = []
    for names, text in OPTION.findall(described + "\n"):
        if not set(names.split(", ")) <= set(COMMON):
            default = defaults[names.split(", ")[0]]
            is_plain = isinstance(default, (bool, int, float, str))
            named = names.replace(", ", "`, `") + (f"={default!r}" if is_plain and ", " not in names else "")
            lines.append(f"- `{named}`: {_one_line(text)}")
    return lines


def describe(name: str) -> str:
    """One algorithm's section."""
    kind = ALGORITHMS[name]
    summary, equations, *others = paragraphs_of(kind)
    notes = [_one_line(paragraph) for paragraph in others if paragraph.startswith("Differs from")]
    lines = [ERROR_FEEDBACK.sub("", line).removeprefix(", ") for line in equations.splitlines()]
    own = "\n".join(filter(None, lines))
    head = [f"## {name}", f"`{kind.__name__}`: {summary}", f"```text\n{own}\n```"]
    return "\n\n".join([*head, *filter(None, ["\n".join(options_of(kind))]), *notes]) + "\n"


def catalogue() -> str:
    """The whole page."""
    index = "".join(f"- [{name}](#{name}): {use_of(kind)}\n" for name, kind in ALGORITHMS.items())
    return HEAD + index + "\n" + "\n".join(describe(name) for name in ALGORITHMS)


def _one_line(text: str) -> str:
    return PAGE_NAME.sub(LINK, " ".join(text.split())).replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(catalogue(), encoding="utf-8")
