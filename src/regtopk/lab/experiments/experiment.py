"""What an experiment is: a configuration, records it yields, and a summary of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic

from regtopk.lab.experiments.settings import ConfigT, settings_of
from regtopk.lab.runs import SUMMARY, Panel, Record, RunWriter, check_same_settings, make_header, read_run

Summary = dict[str, Any]
Header = dict[str, Any]  # what config.json will say
ShowProgress = Callable[..., None]  # called with the fraction done, 0 to 1, and perhaps words
Place = tuple[Path, bool, bool]  # the folder, and whether its run is replaced (force) or continued (resume)


def silent(fraction: float, words: str = "") -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC, Generic[ConfigT]):
    """One figure or table.

    Args:
        name: on the command line.
        title: on the page.
        about: what the page says it shows, for a configuration.
        config: a frozen dataclass; every field has a default.
        presets: settings that have a name; the first is the default.
        summarise: from the records to summary.json. Its "table" is what is printed: one row per measure,
            with the name of the measure under "measure" and a number under each method.
        panels: the figure.
    """

    name: str
    title: str
    about: str | Callable[[ConfigT], str]
    config: type[ConfigT]
    presets: dict[str, dict[str, Any]] = field(default_factory=dict)
    summarise: Callable[[ConfigT, Sequence[Record]], Summary]
    panels: Callable[[ConfigT], Sequence[Panel]]

    def record(
        self,
        config: ConfigT,
        folder: Path,
        *,
        command: str,
        force: bool = False,
        resume: bool = False,
        progress: ShowProgress = silent,
    ) -> Summary:
        """Run, and write the records as they come, into a folder that is claimed first.

        Args:
            config: what to run.
            folder: of the results.
            command: what a user types to get them.
            force: replace a run that the folder holds.
            resume: go on with a run that the folder holds.
            progress: is told how far the run is.
        """
        about = self.about if isinstance(self.about, str) else self.about(config)
        settings, panels = settings_of(config), self.panels(config)
        header = make_header(
            self.name, title=self.title, about=about, command=command, config=settings, panels=panels
        )
        return self._record(config, header, (folder, force, resume), progress)

    @abstractmethod
    def _record(self, config: ConfigT, header: Header, place: Place, progress: ShowProgress) -> Summary:
        """Run under a header."""


@dataclass(frozen=True, kw_only=True)
class WholeExperiment(Experiment[ConfigT]):
    """An experiment that runs as a whole: an interrupted one starts again.

    Args:
        run: from a configuration to records, telling how far it is.
    """

    run: Callable[[ConfigT, ShowProgress], Iterator[Record]]

    def _record(self, config: ConfigT, header: Header, place: Place, progress: ShowProgress) -> Summary:
        folder, force, resume = place
        if resume and (folder / SUMMARY).exists():
            check_same_settings(folder, header["config"])
            return read_run(folder).summary
        records = []
        with RunWriter(folder, header, force=force or resume) as writer:
            for record in self.run(config, progress):
                writer.add(record)
                records.append(record)
            summary = self.summarise(config, records)
            writer.finish(summary)
        return summary


def by_method(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each method, which stand together."""
    return {method: list(own) for method, own in groupby(records, itemgetter("method"))}
