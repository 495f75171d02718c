"""What an experiment is: a configuration, records it yields, and a summary of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic

from regtopk.lab.experiments.settings import ConfigT, settings_of
from regtopk.lab.runs import CONFIG, SUMMARY, Panel, Record, RunWriter, make_header, read_run
from regtopk.lab.runs.writer import check_same_settings

Summary = dict[str, Any]
Header = dict[str, Any]  # what config.json will say
ShowProgress = Callable[..., None]  # called with the fraction done, 0 to 1, and perhaps words
Place = tuple[Path, bool, bool]  # the folder, and whether its run is replaced (force) or continued (resume)


def silent(fraction: float, words: str = "") -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC, Generic[ConfigT]):
    """One figure or table.

    A summary is summary.json. Its "table" is what is printed: one row per measure, with the name of the
    measure under "measure" and a number under each method.
    """

    name: str  # on the command line
    title: str  # on the page
    about: str | Callable[[ConfigT], str]  # what the page says it shows, for a configuration
    config: type[ConfigT]  # a frozen dataclass; every field has a default
    presets: dict[str, dict[str, Any]] = field(default_factory=dict)  # the first is the default
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

        `command` is what a user types to get them. A run that the folder holds is replaced with `force`, and
        continued with `resume`.
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
    """An experiment that runs as a whole: an interrupted one starts again."""

    run: Callable[[ConfigT, ShowProgress], Iterator[Record]]  # tells how far it is

    def _record(self, config: ConfigT, header: Header, place: Place, progress: ShowProgress) -> Summary:
        folder, force, resume = place
        if resume and (folder / CONFIG).exists():
            check_same_settings(folder, self.name, header["config"])
            if (folder / SUMMARY).exists():
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
