"""Models of several seeds trained by one method, side by side where the method allows it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regtopk.core.algorithm import Algorithm
from regtopk.core.clipping import clip_scales, norm_of
from regtopk.core.link import Link
from regtopk.core.timer import Timer
from regtopk.core.worker import Layout
from regtopk.lab.experiments.tasks.task import Task
from regtopk.lab.experiments.training.optimizers import Descent, recipe_of
from regtopk.lab.method import Method
from regtopk.rounds import LocalRounds, RoundMaker, cut_evenly
from regtopk.simulate import Cluster

Quality = dict[str, float | None]  # by the name of what was measured, such as "accuracy"
LINK = Link(bandwidth=100e6, latency_s=1e-3, compute_s=20e-3)  # what methods that adapt to time are told


class ModelPart(NamedTuple):
    """A part of the models that is exchanged in one round."""

    at: slice  # where it lies in the vectors
    clusters: list[Cluster]  # one for all seeds, or one for each
    models: Tensor  # its part of the models, (R, j), a view


class Trainer(RoundMaker):
    """R models (R, J), what moves them, and the clusters that aggregate what their workers send.

    Where gradients are exchanged, one optimizer for each seed takes the aggregate. Where updates are, every
    worker has a model and an optimizer of its own, (R, N, J): `models` are those of the last exchange.
    An optimizer that clips does it with the aggregate in the first case, and with each worker's own gradient
    in the second.

    A seed has diverged once its loss or its model is not finite. It then keeps the model of the last stop
    before that, and the other seeds go on. A step looks at losses alone: models are looked at where
    `run_until` stops, so that steps stay as fast as they are and the host never waits for a GPU.

    Optimizers whose learning rate has a schedule ask how many steps there will be: `num_steps`.
    """

    def __init__(
        self, task: Task, algorithm: Algorithm[Any], method: Method, *, lr: float, num_steps: int = 0
    ) -> None:
        self.task = task
        self.algorithm = algorithm
        self.rounds = rounds = method.rounds
        self.models = task.start()
        self.num_steps = 0
        are_alike = all(weights == task.weights[0] for weights in task.weights)
        own_weights = task.weights[:1] if are_alike and "replicates" in algorithm.promises else task.weights

        self._parts: list[ModelPart] = []
        for at, layout in parts_of(task.layout, rounds.fragments):
            clusters = [
                Cluster(
                    algorithm,
                    num_workers=task.num_workers,
                    weights=by_steps(weights, rounds.by_worker),
                    layout=layout,
                    index_code=method.index_code,
                    link=LINK,
                    is_checked=False,  # what is not finite is looked for here
                    residual_dtype=method.residual_dtype,
                )
                for weights in own_weights
            ]
            self._parts.append(ModelPart(at, clusters, self.models[:, at]))
        self.lr = lr
        # what workers compute gradients at: the models themselves, or one for each worker
        self._local = self.models
        if rounds.has_updates:
            self._local = self.models.unsqueeze(1).repeat(1, task.num_workers, 1)
        # of updates alone: the aggregate of gradients goes to the workers' optimizers
        self._outer = rounds.make_outer([part.models for part in self._parts])
        self._rounds = LocalRounds(rounds, self)
        # what has an optimizer of its own: all workers together, or each where some make fewer steps
        self._trained = list(self._local.unbind(1)) if rounds.by_worker else [self._local]
        how = recipe_of(method), lr, num_steps, task.layout
        self._descents = [Descent(own, *how) for own in self._trained]
        self._timer = Timer(self.models.device)
        self._exchange_s = 0.0  # spent in exchanges before the state was loaded
        self._at_stop = self.models.clone()  # the models at the last stop, all finite
        self.is_diverged = torch.zeros(len(task.seeds), dtype=torch.bool, device=self.models.device)
        self._losses: Tensor | None = None  # of the last step
        self._step_losses = torch.empty(0)  # the same, those of diverged seeds too
        self._loss_sum: Tensor | None = None  # since they were last taken
        self._num_summed = 0
        self._seen: list[Quality] = [{} for _ in task.seeds]  # the last finite numbers of each seed

    def run_until(self, step: int) -> None:
        """Train up to a step, and put back the models of seeds that diverged on the way."""
        while self.num_steps < step:
            self._step()
        self.is_diverged |= ~torch.isfinite(self.models).all(-1)
        self.models.copy_(self.models.where(~self.is_diverged[:, None], self._at_stop))
        self._at_stop.copy_(self.models)

    def evaluate(self) -> list[Quality]:
        """How good each seed's model is; instead of a number that is not finite, the last finite one."""
        now = self.task.evaluate(self.models)
        is_lost = [not all(map(math.isfinite, quality.values())) for quality in now]
        self.is_diverged |= torch.tensor(is_lost, device=self.models.device)
        self._seen = [
            {name: value if math.isfinite(value) else seen.get(name) for name, value in quality.items()}
            for seen, quality in zip(self._seen, now, strict=True)
        ]
        return self._seen

    def take_losses(self) -> list[float | None]:
        """Training loss of each seed: the mean since the last call, or the last step's, as the task wants."""
        if self._losses is None or self._loss_sum is None:  # before the first step
            losses = self.task.grads(self._local, self.num_steps)[1]
        else:
            losses = self._loss_sum / self._num_summed if self.task.is_loss_averaged else self._losses
        self._loss_sum, self._num_summed = None, 0
        return [loss if math.isfinite(loss) else None for loss in losses.tolist()]

    def moved_bytes(self, name: str) -> list[float]:
        """A count of `core.traffic` so far, such as received_bytes: the mean over workers, for each seed."""
        counts = [[getattr(c.total, name).double().mean(-1) for c in part.clusters] for part in self._parts]
        # a part not yet sent has one zero
        by_part = [torch.stack(own).flatten().expand(len(self.models)) for own in counts]
        return [float(count) for count in torch.stack(by_part).sum(0)]

    def own(self, fragment: int) -> list[Tensor]:
        """The workers' models, (R, N, j)."""
        return [self._local[..., self._parts[fragment].at]]

    def start(self, fragment: int) -> list[Tensor]:
        """The models they began from, (R, 1, j)."""
        return [self._parts[fragment].models.unsqueeze(1)]

    def send(self, fragment: int, num_steps: int) -> None:
        """Let the outer optimizer apply the aggregate to the models."""
        part, (own,), (start,) = self._parts[fragment], self.own(fragment), self.start(fragment)
        part.models.grad = self._aggregate(part, start - own)
        self._outer.step()
        part.models.grad = None

    @property
    def exchange_s(self) -> float:
        """Seconds spent in exchanges so far; waits for the GPU."""
        return self._exchange_s + self._timer.seconds()["exchange"]

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on later to the same bits; to be asked for after losses were taken."""
        return {
            "models": self.models,
            "local": self._local,
            "num_steps": self.num_steps,
            "is_diverged": self.is_diverged,
            "losses": self._losses,
            "seen": self._seen,
            "exchange_s": self.exchange_s,
            "optimizer": [descent.optimizers[0].state_dict() for descent in self._descents],
            "outer": self._outer.state_dict(),
            "clusters": [[c.state_dict() for c in part.clusters] for part in self._parts],
            "sent": self._rounds.sent,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` of a trainer of the same kind returned."""
        for own, saved in ((self.models, "models"), (self._at_stop, "models"), (self._local, "local")):
            own.copy_(state[saved])
        self.num_steps, self._exchange_s = state["num_steps"], state["exchange_s"]
        self.is_diverged, self._losses, self._seen = state["is_diverged"], state["losses"], state["seen"]
        for descent, saved in zip(self._descents, state["optimizer"], strict=True):
            descent.optimizers[0].load_state_dict(saved)
        if self.rounds.has_updates:
            self._outer.load_state_dict(state["outer"])
            self._rounds.load(self.num_steps, state["sent"], is_start=False)
        for part, clusters in zip(self._parts, state["clusters"], strict=True):
            for cluster, own_state in zip(part.clusters, clusters, strict=True):
                cluster.load_state_dict(own_state)

    def _step(self) -> None:
        grads, losses = self.task.grads(self._local, self.num_steps)
        self._step_losses = losses
        if not self.rounds.has_updates:
            grads = self._aggregate(self._parts[0], grads)
        parts = grads.unbind(1) if self.rounds.by_worker else [grads]
        for worker, (own, grad) in enumerate(zip(self._trained, parts, strict=True)):
            if self.rounds.makes_step(worker, self.num_steps):
                own.grad = grad
                self._descents[worker].step(self.num_steps)
        if self.rounds.has_updates:
            self._rounds.after_step()
        self.is_diverged |= ~torch.isfinite(losses)
        kept = losses if self._losses is None else self._losses
        self._losses = losses.where(~self.is_diverged, kept)
        self._loss_sum = self._losses.clone() if self._loss_sum is None else self._loss_sum + self._losses
        self._num_summed += 1
        self.num_steps += 1

    def _aggregate(self, part: ModelPart, sent: Tensor) -> Tensor:
        """What the clusters make of what the workers send, (R, N, j) in and (R, j) out."""
        clusters, losses = part.clusters, self._step_losses
        if self.task.config.bad_worker != 1:
            sent[:, -1] *= self.task.config.bad_worker
        if self.rounds.clip_norm is not None:
            norms = torch.stack([norm_of([own]) for own in sent.flatten(0, 1)]).view(sent.shape[:2])
            scales = clip_scales(norms, clusters[0].weights.to(norms.device), self.rounds.clip_norm)
            sent = sent * scales.unsqueeze(-1).to(sent.dtype)
        with self._timer.phase("exchange"):
            if len(clusters) == 1:
                found = clusters[0].step(sent if len(sent) > 1 else sent[0]).reshape(part.models.shape)
                losses = losses.mean(0, keepdim=True)
            else:
                found = torch.stack([cluster.step(own) for cluster, own in zip(clusters, sent, strict=True)])
        if self.algorithm.listens:
            for cluster, loss in zip(clusters, losses, strict=True):
                cluster.report(loss=float(loss))
        return found


def by_steps(weights: list[float], by_worker: Sequence[int]) -> list[float]:
    """Weights that follow the workers' numbers of steps, if these differ."""
    products = [weight * steps for weight, steps in zip(weights, by_worker, strict=False)]
    return [product / sum(products) for product in products] or weights


def parts_of(layout: Layout, num_fragments: int) -> list[tuple[slice, Layout]]:
    """Where each fragment lies in the vectors, and its own layout."""
    parts = []
    for part in cut_evenly([layer.numel for layer in layout.layers], num_fragments):
        layers = [layout.layers[i] for i in part]
        own = Layout.of_shapes((layer.name, layer.shape, layer.kind) for layer in layers)
        parts.append((slice(layers[0].start, layers[0].start + own.numel), own))
    return parts
