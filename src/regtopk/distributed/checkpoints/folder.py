"""Checkpoints of a whole run, for ranks that come and go: what the ranks agree on when they save and load.

checkpoint_files.py has the files. No rank waits for another while files are written: a save is complete when
the parts of all its ranks are there, which those who load find out.
"""

import logging
import secrets
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from regtopk.core.options import check_choice, check_integer
from regtopk.distributed.checkpoints.choice import choose
from regtopk.distributed.checkpoints.copies import Copies, copies_of
from regtopk.distributed.checkpoints.files import Manifest, Save, parts_in, saves_in, write_part
from regtopk.distributed.checkpoints.loading import Loading
from regtopk.distributed.options import names_typos
from regtopk.distributed.steps.base import ExchangeBase
from regtopk.distributed.transport.collectives import Alone, Collectives, group_or_default, is_one_process
from regtopk.errors import ArgumentError, ClusterError, OutputError

_log = logging.getLogger("regtopk")


class Checkpoints:
    """The newest checkpoints of a run, in a folder: what a launcher that restarts ranks needs.

    >>> checkpoints = regtopk.Checkpoints("out/run")                             # on every rank
    >>> extra = checkpoints.load(model=model, optimizer=optimizer, exchange=exchange)
    >>> step = 0 if extra is None else extra["step"]
    >>> ...
    >>> checkpoints.save(step, model=model, optimizer=optimizer, exchange=exchange, epoch=epoch)

    Every rank calls `save` and `load`, with the same names. What a name stands for decides who writes it:

    - a module or an optimizer is the same on all ranks, so it is written once; if it is sharded
      (fully_shard), every rank writes its part;
    - an exchange has a state of its own on every rank, so every rank writes its own. That of an
      `UpdateExchange` holds model and optimizer, which then need not be named;
    - anything else with `state_dict()` (a scheduler, a GradScaler), and plain values (numbers, strings,
      tensors, dicts, lists), are each rank's own.

    A run goes on from the newest complete checkpoint. One that is half-written or damaged is skipped for the
    one before, and the log says so. On as many ranks as before each gets back what it saved, and training
    continues bit for bit. On other numbers sum_n w_n e_n of the exchange is conserved, as `load_state_dict`
    of it says, and rank n gets the values of rank n mod N. A sharded model needs the mesh it was saved on.

    The folder may be on one file system for all ranks, or on every machine's own disk. This is found out:
    what the ranks have the same is then written once on each, and parts are sent to ranks that do not see
    them. If a disk is lost with its machine, and no complete checkpoint is left, the others go on from their
    parts. How much residual is lost is in the log and in `exchange.total.lost_residual`.

    Args:
        folder: of this run alone; it is made if it is not there.
        keep: how many complete checkpoints stay. While one is written there is one more.
        asynchronous: whether `save` copies and returns, and a thread writes. The next `save` waits for it.
        on_error: what to do when a checkpoint cannot be written (the disk is full): "warn" in the log and
            train on, or "raise" an OutputError on all ranks.
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
        is_alone = process_group is None and not dist.is_initialized() and is_one_process()
        self._collectives = Alone() if is_alone else Collectives(group_or_default(process_group))
        self.folder = Path(folder)
        self.keep = keep
        self.asynchronous = asynchronous
        self.on_error = on_error
        self._pool = ThreadPoolExecutor(1, "regtopk-checkpoints")
        self._writing: tuple[Save, Future[None]] | None = None
        self._run = ""  # which start of all ranks this is: a killed one's files are never mixed with it
        self._file_systems: list[list[int]] = []  # the ranks that see one another's files
        self._complete: list[Save] = []
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
        rank, copies, error = self._collectives.rank, Copies(), None
        try:
            copies = copies_of(things, writes_shared=rank == self._writer_here)
        except Exception as problem:  # heard by all ranks: none may save alone
            error = problem
        facts = self._facts(step, things, error)
        facts["meshes"], facts["shared"] = copies.meshes, copies.shared_names
        contents = {f"rank-{rank}.pt": copies.own}
        if copies.shared:
            contents[f"shared-{rank}.pt"] = copies.shared
        save = Save(step, self._run)
        writing = self._pool.submit(write_part, self.folder / save.folder, rank, contents, facts)
        self._writing = save, writing
        if not self.asynchronous:
            self.wait()

    def load(self, **things: Any) -> dict[str, Any] | None:
        """Load the newest complete checkpoint into things. Call it on every rank, with the same names.

        Returns:
            Its step, and what was saved but not named here, by name; None if there is no checkpoint.

        Raises:
            ArgumentError: a thing has no `load_state_dict()`.
            StateError: the checkpoint does not fit the things; no module, optimizer or exchange was changed.
        """
        for name, thing in things.items():
            if not hasattr(thing, "load_state_dict"):
                raise ArgumentError(
                    f"{name} must have load_state_dict() to be loaded, got {type(thing).__name__}"
                )
        self._begin()
        self.wait()
        self._has_loaded = True
        damaged: set[Save] = set()
        while True:
            seen = self._collectives.all_gather_objects(parts_in(self.folder))
            save, parts, skipped, older = choose(seen, damaged)
            if save is None or not damaged:
                self._tell(skipped)
            if save is None:
                return None
            loading = Loading(self._collectives, self.folder / save.folder, parts, things)
            loading.check_meshes()
            files = loading.read([theirs.get(save, {}) for theirs in seen])
            if files is not None:
                break
            self._tell([f"checkpoint of step {save.step} is skipped ({save.folder}): it is damaged"])
            damaged.add(save)
        extra = loading.take_over(files)
        self._tell(loading.told)
        self._complete = [*older, save]
        return {"step": save.step, **extra}

    def wait(self) -> None:
        """Wait until the last checkpoint is written, by all ranks. Call it on every rank.

        Raises:
            OutputError: a rank could not write, with on_error="raise".
        """
        if self._writing is None:
            return
        (save, writing), self._writing = self._writing, None
        error = writing.exception()
        told_error = None if error is None else str(error) or type(error).__name__
        errors = self._collectives.all_gather_objects(told_error)
        if error is not None and not isinstance(error, OSError):
            raise error
        failed = {rank: theirs for rank, theirs in enumerate(errors) if theirs is not None}
        if not failed:
            self._complete.append(save)
            self._remove_old()
            return
        if self._collectives.rank == self._writer_here:
            shutil.rmtree(self.folder / save.folder, ignore_errors=True)
        last = f"of step {self._complete[-1].step}" if self._complete else "none"
        told = ", ".join(f"rank {rank}: {theirs}" for rank, theirs in failed.items())
        message = f"checkpoint of step {save.step} was not written ({told}); the last complete one is {last}"
        if self.on_error == "raise":
            raise OutputError(message)
        if self._collectives.rank in (0, *failed):
            _log.warning("%s; training goes on", message)

    def close(self) -> None:
        """Let this rank finish its writing, and end the thread. It waits for no other rank.

        Raises:
            OutputError: this rank could not write, with on_error="raise".
        """
        self._pool.shutdown()
        self._is_closed = True
        if self._writing is None:
            return
        (save, writing), self._writing = self._writing, None
        error = writing.exception()
        if error is not None:
            message = f"checkpoint of step {save.step} was not written: {type(error).__name__}: {error}"
            if self.on_error == "raise":
                raise OutputError(message) from error
            _log.warning("%s", message)

    @property
    def _writer_here(self) -> int:
        """The rank that writes what all have the same, on this rank's file system."""
        return next(ranks[0] for ranks in self._file_systems if self._collectives.rank in ranks)

    def _begin(self) -> None:
        """Once: agree on a name for this start of all ranks, and find out who sees whose files."""
        if self._is_closed:
            raise ArgumentError("checkpoints must not be used after close()")
        if self._run:
            return
        ask, rank = self._collectives.all_gather_objects, self._collectives.rank
        run: str = ask(secrets.token_hex(4))[0]
        probe, error = self.folder / f"probe-{run}-{rank}", None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
        except OSError as problem:
            error = f"folder must be writable on every rank, got {self.folder} on rank {rank}: {problem}"
        for message in ask(error):
            if message is not None:
                raise OutputError(message)
        here = sorted(int(path.name.rpartition("-")[2]) for path in self.folder.glob(f"probe-{run}-*"))
        self._file_systems = [list(ranks) for ranks in sorted({tuple(ranks) for ranks in ask(here)})]
        probe.unlink()
        self._run = run
        if len(self._file_systems) > 1 and rank == 0:
            _log.warning(
                "%s is on several file systems, seen by ranks %s: a lost disk takes its ranks' parts along",
                self.folder,
                self._file_systems,
            )

    def _check(self, step: int, things: dict[str, Any]) -> None:
        check_integer("step", step, at_least=0)
        if self._complete and step <= self._complete[-1].step:
            raise ArgumentError(
                f"step must be greater than the last one, {self._complete[-1].step}, got {step}"
            )
        if not self._has_loaded:  # a new run in an old one's folder would be taken for it
            found = self._collectives.all_gather_objects(max(saves_in(self.folder), default=None))
            if any(theirs is not None for theirs in found):
                raise ArgumentError(
                    f"folder must be empty, or what it holds must be loaded first: {self.folder} has "
                    f"{next(str(theirs[1]) for theirs in found if theirs)}"
                )
            self._has_loaded = True
        num_ranks = self._collectives.num_workers
        for name, thing in things.items():
            is_whole = isinstance(thing, ExchangeBase) and not thing.is_sharded
            if is_whole and thing.num_workers != num_ranks:
                raise ArgumentError(
                    f"{name} must be an exchange over the ranks of the checkpoints, {num_ranks}, got one "
                    f"over {thing.num_workers}: pass its process_group to Checkpoints, too"
                )

    def _facts(self, step: int, things: dict[str, Any], error: Exception | None) -> Manifest:
        """What every part tells of the whole, should other parts be lost.

        Raises:
            Exception: the error, or another rank's.
        """
        exchanges = {name: thing for name, thing in things.items() if isinstance(thing, ExchangeBase)}
        norms = {name: exchange.total.residual_norm for name, exchange in exchanges.items()}
        told_error = None if error is None else f"{type(error).__name__}: {error}"
        everyone = self._collectives.all_gather_objects((step, sorted(things), norms, told_error))
        if error is not None:
            raise error
        for rank, (*_, theirs) in enumerate(everyone):
            if theirs is not None:
                raise ClusterError(f"rank {rank} cannot save: {theirs}")
        if any(theirs[:2] != everyone[0][:2] for theirs in everyone):
            told = ", ".join(f"{names} at step {n} on rank {r}" for r, (n, names, *_) in enumerate(everyone))
            raise ClusterError(f"all ranks must save the same things at the same step, got {told}")
        return {
            "num_ranks": self._collectives.num_workers,
            "file_systems": self._file_systems,
            "weights": {name: exchange.weights for name, exchange in exchanges.items()},
            "norms": {name: [theirs[2][name] for theirs in everyone] for name in exchanges},
        }

    def _tell(self, messages: list[str]) -> None:
        for message in messages if self._collectives.rank == 0 else []:
            _log.warning("%s", message)

    def _remove_old(self) -> None:
        """Keep the newest complete saves; those before them, and what killed runs have left, go."""
        self._complete = self._complete[-self.keep :]
        if self._collectives.rank != self._writer_here or len(self._complete) < self.keep:
            return
        for save, path in list(saves_in(self.folder)):
            if save.step < self._complete[0].step:
                shutil.rmtree(path, ignore_errors=True)
        for probe in self.folder.glob("probe-*"):
            probe.unlink(missing_ok=True)
