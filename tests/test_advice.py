"""README, docs/which-method.md, the guide, the examples, `train` and `plan` advise the same."""

import re
from pathlib import Path
from typing import Any

import pytest

import regtopk
from regtopk import recipes
from regtopk.lab.experiments.ranks.config import TrainConfig
from regtopk.lab.method import Method
from regtopk.lab.plan.methods import ADVISED, PlannedMethod, advised_with, planned_methods
from regtopk.lab.plan.page import as_code

ROOT = Path(__file__).parent.parent
CODE = re.compile(r"(\w+)\((density=[^()]*)\)")
SGD, ADAMW, MUON = "With SGD", "A transformer with AdamW", "A transformer with Muon"


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def made(text: str) -> list[Any]:
    """The algorithms that a text makes with a density."""
    return [eval(f"regtopk.{name}({options})", {"regtopk": regtopk}) for name, options in CODE.findall(text)]


def use(section: str) -> str:
    """What a section of which-method.md says to use."""
    return read("docs/which-method.md").split(f"## {section}\n")[1].split("\n- **Learning rate**")[0]


def advised(section: str) -> tuple[Any, dict[str, int]]:
    """An algorithm, and the options of a round."""
    page = use(section)
    rounds = {name: int(value) for name, value in re.findall(r"\b(every|fragments)=(\d)", page)}
    return made(page)[0], rounds


def test_the_readmes_table_is_that_of_the_page() -> None:
    rows = {row.split("|")[1].strip(): row for row in read("README.md").splitlines() if row.startswith("| ")}
    for section, row in ((MUON, "a transformer with Muon"), (ADAMW, "a transformer with AdamW")):
        algorithm, rounds = advised(section)
        assert made(rows[row]) == [algorithm]
        assert f"`every={rounds['every']}, fragments={rounds['fragments']}`" in rows[row]
    assert made(rows["with SGD, data spread evenly"]) == [advised(SGD)[0]]
    momentum = "With SGD and momentum, data spread evenly"
    assert made(rows[momentum[0].lower() + momentum[1:]]) == [advised(momentum)[0]]


def test_the_recipe_is_that_of_the_page() -> None:
    algorithm, rounds = advised(MUON)
    page, (few, many) = use(MUON), map(regtopk.recipes.transformer, (8, 17))
    assert few.algorithm == many.algorithm == algorithm
    for recipe in (few, many):
        told = recipe.options
        assert rounds.items() <= told.items() and f'index_code="{told["index_code"]}"' in page
        assert "lr={lr}, momentum={momentum}".format(**told["outer"].keywords) in page
    whole = recipes.for_workers(8)[1]
    page = read("docs/which-method.md").split("**Over a link with latency**")[1].split("\n- ")[0]
    assert whole.algorithm in [eval(f"regtopk.{code}") for code in re.findall(r"Dense\([^()]*\)", page)]
    assert f"every={whole.every}" in page and "lr=0.7, momentum=0.6, nesterov=True" in page
    assert whole.outer == (0.7, 0.6, True)


@pytest.mark.parametrize(
    ("section", "texts"),
    [
        (SGD, ["docs/migration.md", "docs/tutorial.ipynb", "docs/training.md", "README.md"]),
        (SGD, ["src/regtopk/distributed/gradients/attach.py"]),
        (ADAMW, ["examples/train_gpt.py", "src/regtopk/distributed/updates/exchange.py"]),
        (ADAMW, ["docs/tutorial.ipynb", "docs/training.md", "docs/migration.md"]),
    ],
)
def test_first_lines_to_copy_are_what_the_page_advises(section: str, texts: list[str]) -> None:
    algorithm, rounds = advised(section)
    for text in texts:
        page = read(text).replace('\\"', '"')
        assert algorithm in made(page), text
        assert all(f"{name}={value}" in page for name, value in rounds.items()), text


def test_plan_and_train_know_what_the_page_advises() -> None:
    planned = {
        as_code(PlannedMethod.of(words, float(words.options["density"] or 0), "4bit"))
        for words in map(Method.parse, (*ADVISED["sgd"], *ADVISED["adamw"]))
    }
    sgd, (adamw, rounds) = advised(SGD)[0], advised(ADAMW)
    assert f"exchange = regtopk.attach(model, {code_of(sgd)})" in planned
    options = ", ".join(f"{name}={value}" for name, value in rounds.items())
    assert f"exchange = regtopk.UpdateExchange(model, optimizer, {code_of(adamw)}, {options})" in planned
    (dgc,) = (each for each in planned_methods() if each.algorithm == "dgc")  # the one way that is tried
    momentum = advised("With SGD and momentum, data spread evenly")[0]
    assert as_code(dgc) == f"exchange = regtopk.attach(model, {code_of(momentum)})"
    for task, algorithm in (("digits", sgd), ("gpt", adamw)):
        config = TrainConfig(task=task)
        assert config.methods[0].build(density=config.densities[0], value_code=None) == algorithm
    assert config.methods[0].rounds._asdict().items() >= rounds.items()


def test_what_comes_back_in_part_is_said_to_be_measured_with_muon_alone() -> None:
    for name in ("docs/which-method.md", "docs/returned.md"):
        told = [part for part in re.split(r"\n\n|\n- ", read(name)) if re.search("17 (workers )?on", part)]
        assert told and all("Muon" in part for part in told), name
        assert any("AdamW" in part for part in told), name
    page = read("docs/which-method.md").split(f"## {ADAMW}\n")[1].split("**From 17 workers on**")[1]
    (planned,) = (each for each in planned_methods(exchange="updates") if each.returned is not None)
    assert planned not in advised_with("adamw") and made(as_code(planned)) == made(page)[:1]
    assert all(f"{name}={value}" in page.split("\n\n")[0] for name, value in planned.turns.items())


def code_of(algorithm: Any) -> str:
    """As `plan` prints it."""
    given = {"density": algorithm.density, "value_code": algorithm.value_code}
    if getattr(algorithm, "impute", None):
        given["impute"] = algorithm.impute
    return f"regtopk.{type(algorithm).__name__}({', '.join(f'{k}={v!r}' for k, v in given.items())})"
