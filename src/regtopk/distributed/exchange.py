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
from regtopk.core.state import State
from regtopk.core.traffic import all_reduce_bytes
from regtopk.core.worker import Report, Worker
from regtopk.distributed import checkpoint, layout
from regtopk.distributed.collectives import Collectives, group_of_its_own
from regtopk.distributed.driver import Collective, ProcessGroupDriver
from regtopk.distributed.groups import Group, Groups
from regtopk.distributed.handshake import agree, share_report
from regtopk.distributed.record import StepRecord, Stopwatch, summarise
from regtopk.errors import ArgumentError, ClusterError

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

    def __init__(
        self,
        parameters: nn.Module | layout.NamedParameters,
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
        if type(dense_steps) is not int or dense_steps < 0:
            raise ArgumentError(f"dense_steps must be an integer of at least 0, got {dense_steps!r}")
        if not dist.is_initialized():
            raise ClusterError("torch.distributed must be initialised first: call init_process_group()")
        module = parameters if isinstance(parameters, nn.Module) else None
        self.algorithm = algorithm
        self.dense_steps = dense_steps
        self.grad_scaler = grad_scaler
        self.writer = writer
        self.parameters = layout.named_parameters(parameters)
        self.shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        self._kinds = layout.kinds_of(module)
        self._skipped = {n for n, p in self.parameters.items() if skip is not None and skip(n, p)}
        collectives = Collectives(group_of_its_own(process_group))
        weights = agree(collectives, algorithm, self.shapes, weight, self._settings(index_code, collective))
        self.driver = ProcessGroupDriver(
            collectives, weights, index_code=index_code, collective=collective, deterministic=deterministic
        )
        self.num_steps = 0
        self.groups = Groups(self._make_group, self.cut(tuple(self.parameters)))
        self._total = StepRecord()
        self._last_step = StepRecord()
        self._unread: list[Stopwatch] = []
        self._report: Report | None = None
        self._shared_report: Report | None = None

    def report(self, *, loss: float, time_s: float) -> None:
        """Tell adaptive algorithms the loss and the time of a step; of all ranks' reports rank 0's counts."""
        self._report = Report(float(loss), float(time_s))

    def step(self) -> None:
        """Turn every parameter's `.grad` into the aggregate; a missing gradient counts as zero.

        If any rank's gradients are not finite, nothing changes but `.grad`, which becomes NaN everywhere, so
        that a GradScaler (or you) can see it; the step is counted in `num_skipped`.
        """
        self.check_parameters()
        for name, p in self.parameters.items():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.grad.is_sparse:
                raise ClusterError(f"gradient of {name!r} has a sparse layout, which is not supported")
        grads = {name: p.grad for name, p in self.parameters.items()}
        self.exchange_all(grads)  # type: ignore[arg-type]

    def exchange_all(self, grads: dict[str, Tensor]) -> None:
        """One step over all groups: the gradients, by name, become the aggregate in place."""
        self.begin_step()
        flats = [self.flat_gradient(group, grads) for group in self.groups.groups]
        is_finite = self.agree_finite(flats)
        for group, flat in zip(self.groups.groups, flats, strict=True):
            aggregate = self.aggregate(group, flat) if is_finite else flat.fill_(math.nan)
            layout.copy_from_flat_([grads[name] for name in group.names], aggregate)
        self.end_step(is_finite=is_finite)

    # What a step consists of; DDP's hook calls these bucket by bucket.

    def begin_step(self) -> None:
        """Start counting, and share rank 0's report with an algorithm that listens."""
        self.driver.begin(self.device)
        if self.algorithm.listens:
            self._shared_report = share_report(self.driver.collectives, self._report, self.device)
            self._report = None

    def flat_gradient(self, group: Group, grads: dict[str, Tensor]) -> Tensor:
        """A group's gradient as one vector, in at least float32 and without the loss scale."""
        flat = group.flat
        layout.copy_to_flat_(flat, [grads[name] for name in group.names])
        return flat if self.grad_scaler is None else flat.div_(self.grad_scaler.get_scale())

    def agree_finite(self, flats: list[Tensor]) -> bool:
        """Whether no rank has a NaN or inf: one small all_reduce and one small read."""
        bad = torch.stack([_is_not_finite(flat) for flat in flats]).any().long().reshape(1)
        with self.driver.watch.phase("collective_s"):
            return not bool(self.driver.collectives.maximum(bad))

    def aggregate(self, group: Group, flat: Tensor) -> Tensor:
        """Run the algorithm on one group: from this rank's gradient to the aggregate."""
        worker = replace(group.worker, step=self.num_steps, report=self._shared_report)
        algorithm, state = group.algorithm, group.state
        if self.num_steps < self.dense_steps:
            algorithm = Dense()
            state = algorithm.init(worker)
        kept = _copy_of_own(state) if self.driver.is_idle else {}
        with self.driver.watch.phase("select_s"):
            total = converse(algorithm.exchange(flat, state, worker), self.driver.answer)
        for name, tensor in kept.items():
            setattr(state, name, tensor)
        return total if self.grad_scaler is None else total.mul_(self.grad_scaler.get_scale())

    def end_step(self, *, is_finite: bool) -> None:
        """Add this step to the counts."""
        record = self.driver.record
        numel = sum(group.layout.numel for group in self.groups.groups)
        record.dense_bytes = all_reduce_bytes(4 * numel, self.num_workers)
        record.num_skipped = int(not is_finite)
        self.num_steps += is_finite
        self._last_step = record
        self._total.add(record)
        self._unread.append(self.driver.watch)
        if len(self._unread) > 100:  # keep few clocks unread; by now the old ones have long stopped
            self._read_clocks()
        if self.writer is not None:
            for name, number in self.last_step.as_dict().items():
                self.writer.add_scalar(f"regtopk/{name}", number, self.num_steps)

    def cut(self, names: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Parameters that arrive together, divided into those exchanged sparsely and those sent dense."""
        sparse = tuple(name for name in names if name not in self._skipped)
        return [sparse, tuple(name for name in names if name in self._skipped)]

    def check_parameters(self) -> None:
        """Refuse parameters that changed their shape."""
        for name, p in self.parameters.items():
            if tuple(p.shape) != self.shapes[name]:
                raise ClusterError(
                    f"parameter {name!r} must keep its shape {self.shapes[name]}, got {tuple(p.shape)}"
                )

    # What was sent.

    @property
    def last_step(self) -> StepRecord:
        """Bytes, entries and times of the last step on this rank."""
        times = self._unread[-1].seconds() if self._unread else {}
        record = replace(self._last_step, residual_norm=self.residual_norm())
        record.set_times(times)
        return record

    @property
    def total(self) -> StepRecord:
        """The sum of all steps on this rank."""
        self._read_clocks()
        return replace(self._total, residual_norm=self.residual_norm())

    def residual_norm(self) -> float:
        """The Euclidean norm of all that this rank has not sent yet."""
        squares = [
            torch.linalg.vector_norm(group.state.state_dict()["residual"]) ** 2
            for group in self.groups.groups
            if "residual" in group.state.rules()
        ]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    def summary(self) -> str:
        """What was sent, against dense, and where the time went, as a few lines of text."""
        return summarise(self.total, self.num_steps, self.num_workers, self.algorithm.name)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: names, tensors and numbers, which `torch.load(weights_only=True)` reads.

        Tensors are under ``workers[rank]``, so that checkpoints that merge equal keys keep every rank's.
        """
        return checkpoint.state_dict(self)

    def gather_state_dict(self, dst: int = 0) -> dict[str, Any] | None:
        """All ranks' state in one, on rank `dst` of the group (None elsewhere); loads on any number."""
        return checkpoint.gather_state_dict(self, dst)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state; refused as a whole if it does not fit.

        With as many ranks as were saved, training continues bit for bit. With another number the dict must
        hold all ranks (`gather_state_dict`, or `merge_state_dicts` of the rank files); then sum_n w_n e_n is
        conserved, and what only meant something to a single rank starts anew.
        """
        checkpoint.load_state_dict(self, state_dict)

    def set_total(self, total: StepRecord) -> None:
        """Go on counting from a saved total."""
        self._total, self._unread = total, []

    # Facts.

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.parameters.values())).device

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.driver.rank

    @property
    def num_workers(self) -> int:
        """N."""
        return self.driver.num_workers

    def _make_group(self, names: tuple[str, ...]) -> Group:
        parameters = [self.parameters[name] for name in names]
        dtype = layout.flat_dtype(parameters)
        weight = self.driver.weights[self.rank].to(device=self.device, dtype=dtype)
        worker = Worker(
            weight,
            torch.tensor(self.rank, device=self.device),
            self.num_workers,
            self.num_steps,
            layout.layout_of(names, self.shapes, self._kinds),
            idle=self.driver.idle,
        )
        algorithm = Dense() if names[0] in self._skipped else self.algorithm
        return Group(names, worker.layout, algorithm, worker, algorithm.init(worker), worker.zeros())

    def _settings(self, index_code: str, collective: str) -> dict[str, Any]:
        """What must be the same on every rank, besides the algorithm and the parameters."""
        return {
            "index_code": index_code,
            "collective": collective,
            "dense_steps": self.dense_steps,
            "skip": sorted(self._skipped),
            "grad_scaler": self.grad_scaler is not None,
        }

    def _read_clocks(self) -> None:
        for watch in self._unread[:-1]:
            self._add_times(watch)
        self._unread = self._unread[-1:]

    def _add_times(self, watch: Stopwatch) -> None:
        for phase, seconds in watch.seconds().items():
            setattr(self._total, phase, getattr(self._total, phase) + seconds)


def _is_not_finite(flat: Tensor) -> Tensor:
    low, high = torch.aminmax(flat)
    return ~(torch.isfinite(low) & torch.isfinite(high))


def _copy_of_own(state: State) -> dict[str, Tensor]:
    return {n: getattr(state, n).clone() for n, rule in state.rules().items() if rule != "shared"}
