"""A cluster of N simulated workers: gradients in, the aggregate out."""

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.algorithm import Algorithm, converse
from regtopk.core.codes import check_index_code
from regtopk.core.link import Link
from regtopk.core.options import check_choice, check_integer
from regtopk.core.precision import RESIDUAL_DTYPES, exchange, initial_state
from regtopk.core.state import State, accumulation_dtype
from regtopk.core.traffic import Traffic
from regtopk.core.worker import Layout, Report, Worker, check_weights
from regtopk.errors import ArgumentError, GradientError, StateError
from regtopk.simulate.driver import SimulatedDriver


class Cluster:
    """N workers running one algorithm, as one batch.

    >>> cluster = Cluster(TopK(density=0.01), num_workers=8)
    >>> aggregate = cluster.step(grads)          # (8, J) in, (J,) out
    >>> cluster.last_step.payload_bytes          # (8,): bytes each worker contributed

    Gradients may have a leading dimension of independent replicas, (R, N, J) in and (R, J) out: R
    clusters that share nothing but the call (the seeds of an experiment).

    Args:
        algorithm: what the workers run.
        num_workers: N, at least 1.
        weights: w_n, finite, >= 0, summing to one within 1e-6; 1/N each if None. A worker of weight
            zero sends nothing and keeps its state.
        layout: which parameter owns which entries; one anonymous layer if None.
        index_code: how sent indices are counted: "elias-fano", "rice" or "raw32".
        link: a link model that `report` takes the time of a step from.
        is_checked: whether gradients that are not finite are refused. The check makes the host wait for a GPU
            in every step; without it the caller must keep such gradients away.
        residual_dtype: how residuals are kept between steps: "float32" or "bfloat16", rounded at random.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        *,
        num_workers: int,
        weights: Sequence[float] | Tensor | None = None,
        layout: Layout | None = None,
        index_code: str = "elias-fano",
        link: Link | None = None,
        is_checked: bool = True,
        residual_dtype: str = "float32",
    ) -> None:
        check_integer("num_workers", num_workers, at_least=1)
        self.algorithm = algorithm
        self.num_workers = num_workers
        self.weights = check_weights(weights, num_workers)
        self._idle = tuple((self.weights == 0).nonzero().flatten().tolist())
        self.layout = layout
        self.index_code = check_index_code(index_code)
        self.link = link
        self.is_checked = is_checked
        check_choice("residual_dtype", residual_dtype, RESIDUAL_DTYPES)
        self.residual_dtype = residual_dtype
        self.num_rounds = 0
        self._report: Report | None = None
        self.state: State | None = None
        self.num_steps = 0
        self.last_step = self.total = Traffic.zeros(num_workers)
        self._worker: Worker | None = None

    @torch.no_grad()
    def step(self, grads: Tensor) -> Tensor:
        """Run one step of all workers: finite gradients (N, J) in, the aggregate (J,) out, in their dtype.

        Raises `GradientError` if the gradients do not fit; no state has changed then.
        """
        self._check(grads)
        worker = self._worker_at_this_step(grads)
        state = self.state or initial_state(self.algorithm, worker, self.residual_dtype)
        driver = SimulatedDriver(worker)
        aggregate = self._converse(grads, state, worker, driver)
        self.last_step = driver.traffic
        self.total = self.last_step if self.num_steps == 0 else self.total + self.last_step
        self._worker, self.state = worker, state
        self.num_steps += 1
        self.num_rounds, self._report = driver.num_rounds, None
        return aggregate.squeeze(-2).to(grads.dtype) if grads.dim() > 2 else aggregate.to(grads.dtype)

    def report(self, *, loss: float, time_s: float | None = None) -> None:
        """Tell adaptive algorithms the loss, and the time of a step (from the link model if not given)."""
        if time_s is None:
            if self.link is None:
                raise ArgumentError("report needs time_s, or a cluster with a link model, got neither")
            num_bytes = float(self.last_step.sent_bytes.max())
            time_s = self.link.time_s(num_bytes, self.num_rounds)
        self._report = Report(float(loss), float(time_s))

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on later, in a cluster of the same kind; tensors are copied."""
        tensors = {} if self.state is None else self.state.state_dict()
        return {
            "algorithm": self.algorithm.name,
            "num_workers": self.num_workers,
            "weights": self.weights.clone(),
            "num_steps": self.num_steps,
            "num_rounds": self.num_rounds,
            "report": None if self._report is None else astuple(self._report),
            "weight": None if self._worker is None else self._worker.weight.clone(),
            "grads_shape": None if self._worker is None else (*self._worker.batch_shape, self._worker.numel),
            "state": {name: tensor.clone() for name, tensor in tensors.items()},
            "last_step": {name: count.clone() for name, count in self.last_step.state_dict().items()},
            "total": {name: count.clone() for name, count in self.total.state_dict().items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` saved; refused as a whole if it does not fit."""
        if state_dict.keys() != (known := self.state_dict()).keys():
            raise StateError(f"a saved cluster must hold {sorted(known)}, got {sorted(state_dict)}")
        for key, own in (("algorithm", self.algorithm.name), ("num_workers", self.num_workers)):
            if state_dict[key] != own:
                raise StateError(f"{key} must be that of the saved state, {state_dict[key]!r}, got {own!r}")
        if not torch.equal(state_dict["weights"].cpu(), self.weights):
            raise StateError(
                f"weights of the saved state must be {self.weights.tolist()}, "
                f"got {state_dict['weights'].tolist()}"
            )
        worker, state = None, None
        if state_dict["weight"] is not None:
            worker = self._make_worker(state_dict["weight"], state_dict["grads_shape"])
            state = initial_state(self.algorithm, worker, self.residual_dtype)
            state.load_state_dict(state_dict["state"])
        self._worker, self.state = worker, state
        self.num_steps, self.num_rounds = state_dict["num_steps"], state_dict["num_rounds"]
        self._report = None if state_dict["report"] is None else Report(*state_dict["report"])
        self.last_step = Traffic.from_state_dict(state_dict["last_step"])
        self.total = Traffic.from_state_dict(state_dict["total"])

    def _check(self, grads: Tensor) -> None:
        """Refuse gradients that do not fit, before anything changes."""
        if not isinstance(grads, Tensor) or not grads.is_floating_point():
            kind = grads.dtype if isinstance(grads, Tensor) else type(grads).__name__
            raise GradientError(f"grads must be a floating point tensor, got {kind}")
        if grads.dim() not in (2, 3) or grads.shape[-2] != self.num_workers or grads.numel() == 0:
            raise GradientError(
                f"grads must have shape (N, J) = ({self.num_workers}, J) with J >= 1, "
                f"got {tuple(grads.shape)}"
            )
        if self.layout is not None and self.layout.numel != grads.shape[-1]:
            raise GradientError(
                f"grads must have the layout's J = {self.layout.numel} entries, got {grads.shape[-1]}"
            )
        if grads.dim() == 3 and "replicates" not in self.algorithm.promises:
            raise GradientError(
                f"grads must have shape (N, J): {self.algorithm.name!r} does not run replicas, "
                f"got {tuple(grads.shape)}"
            )
        if self.is_checked and (row := kernels.find_non_finite_row(grads)) is not None:
            raise GradientError(f"grads of worker {row % self.num_workers} must be finite, got NaN or inf")

    def _worker_at_this_step(self, grads: Tensor) -> Worker:
        dtype = accumulation_dtype(grads.dtype)
        known = self._worker
        if known is None:
            weight = self.weights.to(device=grads.device, dtype=dtype).unsqueeze(-1)
            known = self._make_worker(weight, tuple(grads.shape))
        want = (*known.batch_shape, known.numel), known.weight.dtype, known.weight.device
        if (tuple(grads.shape), dtype, grads.device) != want:
            raise GradientError(
                f"grads must stay of shape {want[0]} with sums in {want[1]} on {want[2]}, "
                f"got {tuple(grads.shape)}, {dtype}, {grads.device}"
            )
        return known.at(self.num_steps, self._report)

    def _make_worker(self, weight: Tensor, grads_shape: tuple[int, ...]) -> Worker:
        *batch_shape, numel = grads_shape
        index = torch.arange(self.num_workers, device=weight.device).unsqueeze(-1)
        layout = self.layout or Layout.anonymous(numel)
        facts = weight, index, self.num_workers, 0, layout, tuple(batch_shape)
        return Worker(*facts, idle=self._idle, index_code=self.index_code)

    def _converse(self, grads: Tensor, state: State, worker: Worker, driver: SimulatedDriver) -> Tensor:
        """The aggregate. Idle workers keep their states, but for a selection whose size has changed."""
        idle = torch.tensor(self._idle, dtype=torch.int64, device=grads.device)
        own = [name for name, rule in state.rules().items() if self._idle and rule != "shared"]
        kept = {name: getattr(state, name).index_select(-2, idle) for name in own}
        aggregate = converse(exchange(self.algorithm, grads, state, worker), driver.answer)
        for name, old in kept.items():
            now = getattr(state, name)
            if old.shape[-1] == now.shape[-1]:
                setattr(state, name, now.index_copy(-2, idle, old))
        return aggregate
