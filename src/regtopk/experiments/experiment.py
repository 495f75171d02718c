"""What an experiment is: a configuration, records it yields, and a summary of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic

from regtopk.experiments.settings import ConfigT
from regtopk.runs import Panel, Record, RunWriter, make_header

Progress = Callable[[float], None]
Summary = dict[str, Any]


@dataclass(frozen=True)
class Experiment(Generic[ConfigT]):
    """One figure or table.

    Args:
        name: on the command line.
        title: on the page.
        about: what it shows, in a sentence or two.
        config: a frozen dataclass; every field has a default.
        run: from a configuration to records; calls the given function with the fraction done, 0 to 1.
        summarise: from the records to summary.json. Its "table" is what is printed: one row a measure,
            with the name of the measure under "measure" and a number under each method.
        panels: the figure.
    """

    name: str
    title: str
    about: str
    config: type[ConfigT]
    run: Callable[[ConfigT, Progress], Iterator[Record]]
    summarise: Callable[[ConfigT, Sequence[Record]], Summary]
    panels: Callable[[ConfigT], Sequence[Panel]]

    def record(
        self,
        config: ConfigT,
        folder: Path,
        *,
        command: str,
        force: bool = False,
        progress: Progress = lambda fraction: None,
    ) -> Summary:
        """Run, and write the records as they come, into a folder that is claimed first."""
        header = make_header(
            self.name,
            title=self.title,
            about=self.about,
            command=command,
            config=asdict(config),  # type: ignore[call-overload]
            panels=self.panels(config),
        )
        records = []
        with RunWriter(folder, header, force=force) as writer:
            for record in self.run(config, progress):
                writer.add(record)
                records.append(record)
            summary = self.summarise(config, records)
            writer.finish(summary)
        return summary
