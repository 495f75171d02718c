"""The search of a row's hyperparameters, on a seed that is not counted: one protocol for all rows."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean

from regtopk.lab.experiments.compare.config import CompareConfig, GridAt, MethodAt
from regtopk.lab.experiments.compare.results import key_of, settings_words
from regtopk.lab.method import Grid, GridPoint
from regtopk.lab.runs import Record, read_object, reading_from, write_json

SEARCH = "search.json"  # in the results folder: what the runs of its searches ended with


@dataclass(frozen=True)
class Search:
    """How the rows of a slice get their hyperparameters."""

    config: CompareConfig
    folder: Path  # of the results: a search that was interrupted goes on from the runs it holds
    done: Sequence[Record]  # of the slices before
    train: Callable[[MethodAt, int], Iterator[Record]]  # a seed of a method, to the end

    @property
    def seed(self) -> int:
        """That of the slices before, or the first that no slice so far counts. No later one may count it."""
        counted_seeds = {*self.config.chosen_seeds, *(record["seed"] for record in self.done)}
        return next(iter(tuning_seeds(self.done)), min(set(range(len(counted_seeds) + 1)) - counted_seeds))

    def num_runs(self, row: GridAt) -> int:
        """How many a row's search has; none where there is nothing to choose."""
        return 0 if len(row.runs) == 1 else min(self.config.num_search_runs or len(row.runs), len(row.runs))

    def pick(self, row: GridAt, say: Callable[[int, str], None]) -> tuple[MethodAt, Record]:
        """What a row runs, and what records hold of the search. The choice of an earlier slice is kept."""
        if len(row.runs) == 1:
            return next(iter(row.runs.values())), {"tuning_seed": None, "tuning": None}
        key = key_of(self.config, row.grid.label, row.density)
        for record in self.done:
            if key_of(self.config, record["method"], record["density"]) == key:
                # a record without a search is of a time when the learning rate alone was searched
                picked = record["search"]["picked"] if "search" in record else {"lr": record["lr"]}
                run = next(run for point, run in row.runs.items() if row.grid.settings(point) == picked)
                return run, {name: record.get(name) for name in ("tuning_seed", "tuning", "search")}
        return self._search(row, say)

    def _search(self, row: GridAt, say: Callable[[int, str], None]) -> tuple[MethodAt, Record]:
        grid, sign = row.grid, -1 if self.config.kind.is_better_higher else 1
        num_runs = self.num_runs(row)
        found: dict[GridPoint, Record] = {}

        def cost_of(point: GridPoint) -> float:
            words = settings_words(grid.settings(point))
            say(len(found), f"{grid.label}, search run {len(found) + 1} of {num_runs}: {words}")
            found[point] = run = self._run(grid, point, row.runs[point])
            return inf if run["diverged"] else float(sign * run["final"])

        best = find_best(grid, num_runs, cost_of)
        search: Record = {"picked": grid.settings(best), "at_edge": grid.at_edge(best)}
        search |= {"num_points": len(row.runs), "runs": list(found.values())}
        by_lr = {f"{m.lr:g}": found[point]["final"] for point, m in grid.methods.items() if point in found}
        tuning = by_lr if list(search["picked"]) == ["lr"] else None
        return row.runs[best], {"tuning_seed": self.seed, "tuning": tuning, "search": search}

    def _run(self, grid: Grid, point: GridPoint, run: MethodAt) -> Record:
        """What a point ended with. It is trained, unless it was before."""
        path, kind, settings = self.folder / SEARCH, self.config.kind, grid.settings(point)
        ended = read_object(path) if path.exists() else {}
        key = json.dumps([grid.label, settings, run.density, self.seed])
        if key not in ended:
            records = list(self.train(run, self.seed))
            diverged = records[-1]["diverged"]
            final = None if diverged else fmean(r[kind.metric] for r in records[-kind.num_last :])
            ended[key] = {"final": final, "diverged": diverged}
            write_json(path, ended)
        with reading_from(self.folder, "continued"):
            return {"settings": settings, "density": run.density, **ended[key]}


def tuning_seeds(records: Sequence[Record]) -> set[int]:
    """The seed on which the hyperparameters in a folder were picked, if any were."""
    return {r["tuning_seed"] for r in records if r.get("tuning_seed") is not None}


def find_best(grid: Grid, num_runs: int, cost_of: Callable[[GridPoint], float]) -> GridPoint:
    """The point with the smallest cost among so many, found one option after another.

    The search begins in the middle of every list. Of one option it tries the values beside the best, and goes
    on to either side while that is better, then those of the next option, and goes round. Once that finds
    nothing new, it tries the point that differs from the best in the fewest options. Of equal costs, the
    first in the lists' order is best.
    """
    costs: dict[GridPoint, float] = {}

    def best_after(point: GridPoint) -> GridPoint:
        if point not in costs and len(costs) < num_runs:
            costs[point] = cost_of(point)
        return min((point for point in grid.methods if point in costs), key=costs.__getitem__)

    best = best_after(tuple(values[(len(values) - 1) // 2] for values in grid.lists.values()))
    while len(costs) < num_runs:
        num_before = len(costs)
        for place, values in enumerate(grid.lists.values()):
            at = values.index(best[place])
            for side in (values[at + 1 :], values[:at][::-1]):
                for value in side:
                    before, best = best, best_after((*best[:place], value, *best[place + 1 :]))
                    if best == before:
                        break
                if best[place] != values[at]:
                    break
        if len(costs) == num_before:
            left = {at: sum(map(str.__ne__, at, best)) for at in grid.methods if at not in costs}
            best = best_after(min(left, key=left.__getitem__))
    return best
