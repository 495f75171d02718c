"""An exchange: one rank's parameters, its algorithm's state, and the process group it talks over."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regtopk.algorithms.dense import Dense
from regtopk.core.algorithm import Algorithm, converse
from regtopk.core.codes import check_index_code
from regtopk.core.state import State
from regtopk.core.traffic import all_reduce_bytes
from regtopk.core.worker import Report, Worker
from regtopk.distributed import checkpoint, layout
from regtopk.distributed.checks import check_options
from regtopk.distributed.collectives import Collectives, group_or_default
from regtopk.distributed.driver import Collective, ProcessGroupDriver
from regtopk.distributed.groups import Group, Groups
from regtopk.distributed.handshake import agree, agree_on_step, refuse_oracles, share_report
from regtopk.distributed.parameters import NamedParameters, Parameters
from regtopk.distributed.record import Ledger, StepRecord, summarise
from regtopk.errors import ClusterError

Skip = Callable[[str, nn.Parameter], bool]


class Exchange:
    """Exchange gradients over a process group, between backward and the optimizer's step.

    >>> exchange = Exchange(model, RegTopK(density=0.001))     # on every rank
    >>> loss.backward()
    >>> exchange.step()                                        # p.grad becomes the aggregate
    >>> optimizer.step()

    The vector exchanged is all trainable parameters in the module's order, as in the paper. For models
    wrapped in DistributedDataParallel use `regtopk.attach`, which does this during backward.

    Args:
        parameters: a module, or (name, parameter) pairs with the same names and order on every rank.
        algorithm: what is run; the same on every rank.
        process_group: the ranks that take part; the default group if None.
        index_code: how indices are coded: "elias-fano", "rice" or "raw32".
        weight: this rank's w_n; 1/N if None. All ranks' must sum to one within 1e-6.
        dense_steps: how many first steps send everything.
        skip: a callable of (name, parameter): True sends that parameter dense.
        grad_scaler: the torch.amp.GradScaler in use: residuals are then kept unscaled.
        collective: how sparse sums run: "auto" (computed), "all_gather" or "split".
        deterministic: sum uncoded dense vectors in rank order too, not in the backend's.
        writer: a TensorBoard SummaryWriter (or anything with add_scalar) that gets every step's numbers.
    """

    scope = "model"

    def __init__(
        self,
        parameters: nn.Module | NamedParameters | Parameters,
        algorithm: Algorithm[Any],
        *,
        process_group: dist.ProcessGroup | None = None,
        index_code: str = "elias-fano",
        weight: float | None = None,
        dense_steps: int = 0,
        skip: Skip | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        collective: Collective = "auto",
        deterministic: bool = True,
        writer: Any = None,
    ) -> None:
        check_options(algorithm, dense_steps, skip, grad_scaler)
        collectives = Collectives(group_or_default(process_group))
        self.parameters = parameters if isinstance(parameters, Parameters) else Parameters(parameters)
        self.algorithm = algorithm
        self.dense_steps = dense_steps
        self.grad_scaler = grad_scaler
        self.writer = writer
        named = self.parameters.named
        self.skipped = {name for name, p in named.items() if skip is not None and skip(name, p)}
        sparse = layout.layout_of(self.cut(tuple(named))[0], self.parameters)
        check_index_code(index_code, sparse.numel)
        refuse_oracles(algorithm, sparse if sparse.numel else None, self.parameters.device)
        settings = {
            "scope": self.scope,
            "index_code": index_code,
            "collective": collective,
            "deterministic": deterministic,
            "dense_steps": dense_steps,
            "skip": sorted(self.skipped),
            "grad_scaler": grad_scaler is not None,
            "parameters": self.parameters.describe(),
        }
        weights = agree(collectives, algorithm, weight, settings)
        self.driver = ProcessGroupDriver(
            collectives, weights, index_code=index_code, collective=collective, deterministic=deterministic
        )
        self.num_steps = 0
        self.groups = Groups(self._make_group, self.cut(tuple(named)))
        self.ledger = Ledger()
        self.pending_report: Report | None = None
        self._shared_report: Report | None = None
        self._obstacle: str | None = None  # why no step can be made

    def report(self, *, loss: float, time_s: float) -> None:
        """Tell adaptive algorithms the loss and the time of a step; of all ranks' reports rank 0's counts."""
        self.pending_report = Report(float(loss), float(time_s))

    @torch.no_grad()
    def step(self) -> None:
        """Turn every parameter's `.grad` into the aggregate; a missing gradient counts as zero.

        If any rank's gradients are not finite, nothing changes but `.grad`, which becomes NaN everywhere, so
        that a GradScaler (or you) can see it; the step is counted in `num_skipped`.
        """
        self.parameters.check()
        self.parameters.check_trainable()
        grads = {name: p.grad for name, p in self.parameters.named.items()}
        for name, grad in grads.items():
            if grad is not None and grad.layout != torch.strided:
                raise ClusterError(f"gradient of {name!r} has a sparse layout, which is not supported")
        for name, p in self.parameters.named.items():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
                grads[name] = p.grad
        self.exchange_all(grads)  # type: ignore[arg-type]

    def exchange_all(self, grads: dict[str, Tensor]) -> None:
        """One step over all groups: the gradients, by name, become the aggregate in place."""
        self.begin_step()
        groups = self.groups.groups
        flats = [self.flat_gradient(group, grads) for group in groups]
        is_finite = self.agree_finite(groups, flats)
        try:
            for group, flat in zip(groups, flats, strict=True):
                aggregate = self.aggregate(group, flat) if is_finite else flat.fill_(math.nan)
                self.write_back(group, grads, aggregate)
        except BaseException as error:  # what was taken from the residual has not arrived
            self._obstacle = (
                f"step {self.num_steps} failed half-way ({type(error).__name__}: {error}): restart all ranks "
                "from the last checkpoint"
            )
            raise
        self.end_step(is_finite=is_finite)

    # What a step consists of; DDP's hook calls these bucket by bucket.

    def begin_step(self) -> None:
        """Start counting, and share rank 0's report with an algorithm that listens."""
        self.check_usable()
        self.driver.begin(self.device)
        if self.algorithm.listens:
            self._shared_report = share_report(self.driver.collectives, self.pending_report, self.device)

    def flat_gradient(self, group: Group, grads: dict[str, Tensor]) -> Tensor:
        """A group's gradient as one vector, in at least float32 and without the loss scale."""
        tensors = [grads[name] for name in group.names]
        with self.driver.watch.phase("select_s"):
            flat = layout.as_flat(tensors, group.dtype)
            if flat is None:
                flat = group.flat = group.worker.zeros() if group.flat is None else group.flat
                layout.copy_to_flat_(flat, tensors)
            return flat if self.grad_scaler is None else flat.div_(self.grad_scaler.get_scale())

    def write_back(self, group: Group, grads: dict[str, Tensor], aggregate: Tensor) -> None:
        """Turn a group's gradients into the aggregate."""
        with self.driver.watch.phase("decode_s"):
            layout.copy_from_flat_([grads[name] for name in group.names], aggregate)

    def agree_finite(self, groups: list[Group], flats: list[Tensor]) -> bool:
        """Whether no rank has a NaN or inf in these groups' gradients."""
        with self.driver.watch.phase("select_s"):
            is_bad = torch.zeros((), dtype=torch.bool, device=self.device)
            for flat in flats:
                is_bad |= ~torch.isfinite(torch.stack(torch.aminmax(flat))).all()
        names = [name for group in groups for name in group.names]
        with self.driver.watch.phase("collective_s"):
            return agree_on_step(self.driver.collectives, is_bad, self.num_steps, names)

    def aggregate(self, group: Group, flat: Tensor) -> Tensor:
        """Run the algorithm on one group: from this rank's gradient to the aggregate."""
        worker = group.worker.at(self.num_steps, self._shared_report)
        algorithm, state = group.algorithm, group.state
        if self.num_steps < self.dense_steps:
            algorithm = Dense()
            state = algorithm.init(worker)
        kept = _copy_of_own(state) if self.driver.is_idle else {}
        self.driver.room = group.room
        with self.driver.watch.phase("select_s"):
            total = converse(algorithm.exchange(flat, state, worker), self.driver.answer)
        for name, tensor in kept.items():
            setattr(state, name, tensor)
        group.recycle(total, flat)
        # not in place: the algorithm may have kept what it returned
        return total if self.grad_scaler is None else total * self.grad_scaler.get_scale()

    def end_step(self, *, is_finite: bool) -> None:
        """Add this step to the counts."""
        record = self.driver.record
        numel = sum(group.layout.numel for group in self.groups.groups)
        record.dense_bytes = all_reduce_bytes(4 * numel, self.num_workers)
        record.num_skipped = int(not is_finite)
        if is_finite:
            self.num_steps += 1
            self.pending_report = None
        self.ledger.add(record, self.driver.watch)
        if self.writer is not None:
            for name, number in self.last_step.as_dict().items():
                self.writer.add_scalar(f"regtopk/{name}", number, self.num_steps)

    def cut(self, names: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Parameters that arrive together, divided into those exchanged sparsely and those sent dense."""
        named = self.parameters.named
        names = tuple(name for name in names if named[name].numel() > 0)
        sparse = tuple(name for name in names if name not in self.skipped)
        return [sparse, tuple(name for name in names if name in self.skipped)]

    def check_usable(self) -> None:
        """Refuse to go on from a state that a failure has left incomplete."""
        if self._obstacle is not None:
            raise ClusterError(self._obstacle)

    # What was sent.

    @property
    def last_step(self) -> StepRecord:
        """Bytes, entries and times of the last step on this rank."""
        return replace(self.ledger.last_step, residual_norm=self.groups.residual_norm())

    @property
    def total(self) -> StepRecord:
        """The sum of all steps on this rank."""
        return replace(self.ledger.total, residual_norm=self.groups.residual_norm())

    def summary(self) -> str:
        """What was sent, against dense, and where the time went, as a few lines of text."""
        return summarise(self.total, self.ledger.num_steps, self.num_workers, self.algorithm.name)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, on the CPU: what `torch.load(path, weights_only=True)` reads.

        Tensors are under ``workers[rank]``, so that checkpoints that merge equal keys keep every rank's.
        """
        return checkpoint.state_dict(self)

    def gather_state_dict(self, dst: int = 0) -> dict[str, Any] | None:
        """All ranks' state in one, on rank `dst` of the group (None elsewhere); loads on any number."""
        return checkpoint.gather_state_dict(self, dst)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state; refused as a whole if it does not fit.

        With the ranks and weights that were saved, training continues bit for bit. With others the dict must
        hold all ranks (`gather_state_dict`, or `merge_state_dicts` of the rank files); then sum_n w_n e_n is
        conserved, and what only meant something to a single rank starts anew.
        """
        checkpoint.load_state_dict(self, state_dict)
        self._obstacle = None

    def groups_to_resume(self, saved: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Which groups to go on with, given those that were saved: here always the whole model."""
        return [part for part in self.cut(tuple(self.parameters.named)) if part]

    # Facts.

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.parameters.device

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.driver.rank

    @property
    def num_workers(self) -> int:
        """N."""
        return self.driver.num_workers

    def _make_group(self, names: tuple[str, ...]) -> Group:
        dtype = layout.flat_dtype(self.parameters.named[name] for name in names)
        weight = self.driver.weights[self.rank].to(device=self.device, dtype=dtype)
        worker = Worker(
            weight,
            torch.tensor(self.rank, device=self.device),
            self.num_workers,
            self.num_steps,
            layout.layout_of(names, self.parameters),
            idle=self.driver.idle,
            index_code=self.driver.index_code,
        )
        algorithm = Dense() if names[0] in self.skipped else self.algorithm
        return Group(names, worker.layout, algorithm, worker, algorithm.init(worker))


def _copy_of_own(state: State) -> dict[str, Tensor]:
    return {n: getattr(state, n).clone() for n, rule in state.rules().items() if rule != "shared"}
