"""Checkpoints of a whole run, for ranks that come and go: what the ranks agree on when they save and load."""

import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from regtopk.core.options import check_choice, check_integer
from regtopk.distributed.checkpoints.choice import Seen, choose, found_in, refuse
from regtopk.distributed.checkpoints.files import Manifest, Save, remove, saves_in, write_part
from regtopk.distributed.checkpoints.things import Loading, copies_of
from regtopk.distributed.options import names_typos
from regtopk.distributed.steps.attached import Notices
from regtopk.distributed.steps.base import ExchangeBase
from regtopk.distributed.steps.handshake import together
from regtopk.distributed.transport.collectives import by_rank, collectives_of
from regtopk.errors import ArgumentError, ClusterError, OutputError, log


class Checkpoints:
    """The newest checkpoints of a run, in a folder: what a launcher that restarts ranks needs.

    >>> checkpoints = regtopk.Checkpoints("out/run")                             # on every rank
    >>> extra = checkpoints.load(model=model, optimizer=optimizer, exchange=exchange)
    >>> step = 0 if extra is None else extra["step"]
    >>> ...
    >>> checkpoints.save(step, model=model, optimizer=optimizer, exchange=exchange, epoch=epoch)

    Every rank calls `save` and `load`, with the same names. What a name stands for decides who writes it:

    - a module or an optimizer is the same on all ranks, so it is written once; of a sharded one
      (fully_shard) every rank writes its part;
    - an exchange is every rank's own. That of an `UpdateExchange` holds model and optimizer, which then need
      not be named;
    - anything else with `state_dict()` (a scheduler, a GradScaler), and plain values (numbers, strings,
      tensors, dicts, lists), are each rank's own.

    docs/training.md says what becomes of checkpoints that are damaged, and of those on other numbers of ranks
    or on disks of several machines. A sharded model needs the mesh it was saved on.

    Args:
        folder: the folder of this run alone; it is made if it is not there.
        keep: how many complete checkpoints stay. While one is written there is one more.
        asynchronous: whether `save` copies and returns, and a thread writes. The next `save` waits for it.
        on_error: what to do when a checkpoint cannot be written, because the disk is full, say: "warn" in the
            log and train on, or "raise" an OutputError on all ranks.
        process_group: the ranks that take part; the default group if None.
    """

    @names_typos
    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 2,
        asynchronous: bool = False,
        on_error: Literal["warn", "raise"] = "warn",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_integer("keep", keep, at_least=1)
        check_choice("on_error", on_error, ("warn", "raise"))
        self._collectives = collectives_of(process_group)
        self.folder = Path(folder)
        self.keep = keep
        self.asynchronous = asynchronous
        self.on_error = on_error
        self._pool = ThreadPoolExecutor(1, "regtopk-checkpoints")
        self._writing: tuple[Save, Future[None]] | None = None
        self._run = ""  # which start of all ranks this is: a killed one's files are never mixed with it
        self._file_systems: list[list[int]] = []  # the ranks that see one another's files
        self._is_writer = False  # of what all ranks have the same, on this file system
        self._complete: list[Save] = []
        self._removable: set[Save] = set()  # older ones that this run knows and does not need
        self._has_loaded = False
        self._is_closed = False

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.wait()
        self.close()

    def save(self, step: int, **things: Any) -> None:
        """Save things under their names. Call it on every rank, with the same names.

        Args:
            step: greater than that of the last checkpoint.
            things: modules, optimizers, exchanges, others with `state_dict()`, and plain values.

        Raises:
            ArgumentError: a thing cannot be saved, or the folder holds another run, which was not loaded.
            ClusterError: the ranks save different things.
            OutputError: a rank could not write, with on_error="raise".
        """
        self._begin()
        self.wait()
        self._check(step, things)
        rank = self._collectives.rank
        with together(self._collectives, "save", ClusterError), Notices.silent():
            own, shared, meshes = copies_of(things, writes_shared=self._is_writer)
        contents = {f"rank-{rank}.pt": own}
        if shared and self._is_writer:
            contents[f"shared-{rank}.pt"] = shared
        save, facts = Save(step, self._run), self._facts(step, things, list(shared), meshes)
        writing = self._pool.submit(write_part, self.folder / save.folder, rank, contents, facts)
        self._writing = save, writing
        if not self.asynchronous:
            self.wait()

    def load(self, **things: Any) -> dict[str, Any] | None:
        """Load the newest complete checkpoint into things. Call it on every rank, with the same names.

        Returns:
            Its step, and what was saved but not named here, by name; None if no checkpoint was ever complete.

        Raises:
            ArgumentError: a thing has no `load_state_dict()`.
            StateError: the checkpoint does not fit the things, or none of those in the folder can be used; no
                module, optimizer or exchange was changed.
        """
        for name, thing in things.items():
            if not hasattr(thing, "load_state_dict"):
                raise ArgumentError(f"{name} must have load_state_dict(), got {type(thing).__name__}")
        self._begin()
        self.wait()
        damaged: set[Save] = set()
        while True:
            seen = self._collectives.all_gather_objects(found_in(self.folder))
            choice = choose(seen, damaged)
            refuse(self.folder, choice.refused)
            extra, told = None, choice.skipped
            if choice.save is None:
                break
            loading = Loading(self._collectives, self.folder / choice.save.folder, choice.found, things)
            files = loading.read([theirs.get(choice.save, Seen()) for theirs in seen])
            if files is not None:
                extra = {"step": choice.save.step, **loading.take_over(files)}
                told += loading.told
                break
            damaged.add(choice.save)
        for message in told if self._collectives.rank == 0 else []:
            log.warning("%s", message)
        self._complete, self._removable, self._has_loaded = choice.usable, choice.removable, True
        return extra

    def wait(self) -> None:
        """Wait until the last checkpoint is written, by all ranks. Call it on every rank.

        Raises:
            OutputError: a rank could not write, with on_error="raise".
        """
        if self._writing is None:
            return
        (save, writing), self._writing = self._writing, None
        error = writing.exception()
        errors = self._collectives.all_gather_objects(error and f"{type(error).__name__}: {error}")
        told = zip(self._collectives.ranks, errors, strict=True)
        failed = ", ".join(f"rank {rank}: {theirs}" for rank, theirs in told if theirs)
        if not failed:
            self._complete.append(save)
            self._remove_old()
            return
        if self._is_writer:
            remove(self.folder / save.folder)
        last = f"of step {self._complete[-1].step}" if self._complete else "none"
        message = f"checkpoint of step {save.step} was not written ({failed}); the last one is {last}"
        if self.on_error == "raise":
            raise OutputError(message)
        if self._collectives.rank == 0 or error is not None:
            log.warning("%s; training goes on", message)

    def close(self) -> None:
        """Let this rank finish its writing, and end the thread. Like `wait`, but for no other rank."""
        self._pool.shutdown()
        self._is_closed = True
        error = self._writing and self._writing[1].exception()
        if self._writing is not None and error is not None:
            message = f"checkpoint of step {self._writing[0].step} was not written: {error!r}"
            if self.on_error == "raise":
                raise OutputError(message) from error
            log.warning("%s", message)
        self._writing = None

    def _begin(self) -> None:
        """Once: agree on a name for this start of all ranks, and find out who sees whose files."""
        if self._is_closed:
            raise ArgumentError("checkpoints must not be used after close()")
        if self._run:
            return
        rank, ranks = self._collectives.rank, self._collectives.ranks
        run: str = self._collectives.all_gather_objects(secrets.token_hex(4))[0]
        probe = self.folder / f"probe-{run}-{rank}"
        with together(self._collectives, f"write to folder {self.folder}", OutputError):
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
        here = sorted(int(path.name.rpartition("-")[2]) for path in self.folder.glob(f"probe-{run}-*"))
        everyone = self._collectives.all_gather_objects(here)
        self._file_systems = [list(members) for members in sorted(set(map(tuple, everyone)))]
        self._is_writer = here[0] == rank
        probe.unlink()
        self._run = run
        if len(self._file_systems) > 1 and rank == 0:
            seen_by = [[ranks[member] for member in members] for members in self._file_systems]
            log.warning("%s is on several file systems, seen by ranks %s", self.folder, seen_by)

    def _check(self, step: int, things: dict[str, Any]) -> None:
        check_integer("step", step, at_least=0)
        last = self._complete[-1].step if self._complete else -1
        if step <= last:
            raise ArgumentError(f"step must be greater than the last one, {last}, got {step}")
        if not self._has_loaded:  # a new run in an old one's folder would be taken for it
            found = set().union(*self._collectives.all_gather_objects(saves_in(self.folder)))
            if found:
                newest = self.folder / max(found).folder
                raise ArgumentError(f"folder must be empty, or be loaded before a save, got {newest}")
            self._has_loaded = True
        num_ranks = self._collectives.num_workers
        for name, thing in things.items():
            is_whole = isinstance(thing, ExchangeBase) and not thing.is_sharded
            if is_whole and thing.num_workers != num_ranks:
                raise ArgumentError(
                    f"{name} must be an exchange over the {num_ranks} ranks of process_group, got "
                    f"{thing.num_workers}"
                )

    def _facts(self, step: int, things: dict[str, Any], shared: list[str], meshes: Any) -> Manifest:
        """The manifest of this rank's part, without its files; refuses ranks that save different things."""
        exchanges = {name: thing for name, thing in things.items() if isinstance(thing, ExchangeBase)}
        norms = {name: exchange.total.residual_norm for name, exchange in exchanges.items()}
        everyone = self._collectives.all_gather_objects((step, sorted(things), norms))
        if any(theirs[:2] != everyone[0][:2] for theirs in everyone):
            told = (f"{names} at step {number}" for number, names, _ in everyone)
            raise ClusterError(
                "all ranks must save the same things at the same step, got "
                f"{by_rank(told, self._collectives.ranks)}"
            )
        return Manifest(
            step=step,
            run=self._run,
            rank=self._collectives.rank,
            files={},
            num_ranks=len(everyone),
            file_systems=self._file_systems,
            weights={name: exchange.weights for name, exchange in exchanges.items()},
            norms={name: [theirs[name] for *_, theirs in everyone] for name in exchanges},
            meshes=meshes,
            shared=shared,
        )

    def _remove_old(self) -> None:
        """Keep the newest complete saves. Older ones go: this run's, and those it knew when it loaded."""
        self._removable.update(self._complete)
        self._complete = self._complete[-self.keep :]
        if not self._is_writer or len(self._complete) < self.keep:
            return
        for save in saves_in(self.folder):
            if save in self._removable and save.step < self._complete[0].step:
                remove(self.folder / save.folder)
        for path in self.folder.glob("removed-*"):  # by a rank that was killed
            remove(path)
        for probe in self.folder.glob("probe-*"):
            probe.unlink(missing_ok=True)
