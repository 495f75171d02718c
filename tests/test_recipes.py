"""Recipes are plain options, and their bytes are those that the simulator counts."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import regtopk
from regtopk import Link, recipes
from regtopk.lab.method import Method
from regtopk.lab.plan.exchange import Workload, exchange_of
from regtopk.lab.plan.methods import PlannedMethod, words_of
from regtopk.simulate import Cluster
from tests.refusals import refusal

NUMEL = 400_000


@pytest.mark.parametrize("num_workers", [4, 24])
def test_bytes_are_those_of_the_simulator(num_workers: int) -> None:
    for recipe in recipes.for_workers(num_workers):
        check_bytes(recipe, num_workers)


def check_bytes(recipe: recipes.ExchangeRecipe, num_workers: int) -> None:
    fragment = NUMEL // recipe.fragments
    cluster = Cluster(recipe.algorithm, num_workers=num_workers, index_code=recipe.index_code)
    cluster.step(torch.randn(num_workers, fragment, generator=torch.Generator().manual_seed(0)))
    counted = float(cluster.last_step.received_bytes.double().mean()) * recipe.fragments / recipe.every
    assert recipe.received_bytes(NUMEL, num_workers) == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize("numel", [1_000, 4_800_000, 124_000_000, 1_000_000_000])
@pytest.mark.parametrize("num_workers", [2, 8, 16, 17, 32, 512])
def test_latencies_are_those_of_the_planner(numel: int, num_workers: int) -> None:
    alone = Link(bandwidth=math.inf, latency_s=1.0)
    for recipe in recipes.for_workers(num_workers):
        words = Method.parse(words_of(recipe))
        algorithm = recipe.algorithm
        method = PlannedMethod.of(words, getattr(algorithm, "density", 1.0), algorithm.value_code)
        planned = exchange_of(method, Workload.of_size(numel), num_workers)
        latencies = planned.num_parts * sum(move.on_link_s(alone, "cpu") for move in planned.moves)
        assert recipe.trips(numel, num_workers) == pytest.approx(latencies / planned.every)


def test_a_recipe_that_is_changed_has_bytes_and_latencies() -> None:
    changed = recipes.ExchangeRecipe(regtopk.TopK(density=0.026, value_code="2bit", impute=0.15), 1.1, 4, 4)
    check_bytes(changed, 4)
    assert changed.trips(4_800_000, 4) == 4 and changed.trips(124_000_000, 4) == 2 * (1 + 3)
    whole = replace(changed, algorithm=regtopk.TopK(density=1, returned=1))
    assert whole.received_bytes(1000, 4) > 3 * 2 * 63 * 4  # two float32 of each entry that another owns


def test_options_are_those_of_an_exchange() -> None:
    signs, whole = recipes.for_workers(8)
    assert signs.options["index_code"] == "rice" and whole.options["index_code"] == recipes.INDEX_CODE
    assert replace(whole, outer=None).options["outer"] is None
    for recipe in (signs, whole):
        outer, told = recipe.options["outer"]([torch.zeros(2, requires_grad=True)]), recipe.outer
        assert told and {name: outer.defaults[name] for name in told._fields} == told._asdict()


def test_the_soonest_is_chosen() -> None:
    def chosen(**told: float) -> recipes.ExchangeRecipe:
        link = Link(**told)
        found = recipes.transformer(8, numel=4_800_000, step_s=0.03, link=link)
        assert found.options["link"] == found.link == link
        return replace(found, link=None)

    signs, whole = recipes.for_workers(8)
    known = replace(whole, link=Link(1e8, 0.02))
    assert known.trips(4_800_000, 8) == 6 / 16 < whole.trips(4_800_000, 8)  # sums do not go round a ring
    assert chosen(bandwidth=1e10) == chosen(bandwidth=1e6) == signs == recipes.transformer(8)
    assert chosen(bandwidth=1e8, latency_s=0.02) == whole
    many = [recipes.transformer(64).received_bytes(124_000_000, n) for n in (64, 256)]
    assert many[1] < 1.05 * many[0]
    assert "returned=0.3" in repr(signs) and "momentum=0.4" in repr(recipes.transformer(64))


def test_an_exchange_takes_one_as_it_is() -> None:
    recipe = recipes.transformer(2)
    assert set(recipe.options) <= set(regtopk.distributed.updates.exchange.UpdateOptions.__annotations__)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_workers": 0}, "num_workers must be an integer of at least 1, got 0"),
        ({"num_workers": 2, "numel": 9}, "link must be given with numel and step_s, got 9 and None alone"),
        ({"num_workers": 2, "link": 1e8, "numel": 9}, "link must be a regtopk.Link, got 100000000.0"),
        (
            {"num_workers": 2, "link": Link(1e6), "numel": 9, "step_s": 0},
            "step_s must be positive and finite, got 0",
        ),
    ],
)
def test_bad_input(arguments: dict[str, object], text: str) -> None:
    make: Any = recipes.transformer
    assert refusal(lambda: make(**arguments)) == ("ArgumentError", text)
