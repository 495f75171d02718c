"""Models of several seeds trained by one method, side by side: rounds of local steps and an exchange."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regtopk.experiments.deep.config import DeepConfig
from regtopk.experiments.deep.engine import Engine, Quality
from regtopk.experiments.deep.method import Method
from regtopk.experiments.fleet import LINK, OPTIMIZERS
from regtopk.experiments.splits import batch_order, divide, weights_of
from regtopk.simulate import Cluster


class Training:
    """R models (R, J), their optimizer, and the clusters that aggregate what their workers send.

    A seed whose parameters are not finite any more has diverged. That is looked for between evaluations, not
    in every round, so that the host runs ahead of a GPU.

    Args:
        engine: gives gradients and judges models; shared with other trainings.
        config: of all of them.
        method: its own method.
        density: k / J, where the method's words leave it open.
        start: the first parameters (R, J).
        seeds: R of them: of the shards and of the batches.
    """

    def __init__(
        self,
        engine: Engine,
        config: DeepConfig,
        method: Method,
        *,
        density: float | None,
        start: Tensor,
        seeds: Sequence[int],
    ) -> None:
        self.engine = engine
        self.config = config
        self.params = start.clone()
        self.num_rounds = 0
        self.is_diverged = [False] * len(seeds)
        shards = [divide(engine.examples.labels, config.num_workers, config.split, seed) for seed in seeds]
        num_steps = config.num_rounds * config.local_steps
        self._order = torch.stack(
            [batch_order(own, config.batch_size, num_steps, s) for own, s in zip(shards, seeds, strict=True)],
            1,
        ).to(start.device)  # (T H, R, N, B)
        self.algorithm = method.algorithm(density, config.value_code)
        weights = [None if config.uniform_weights else weights_of(own, config.split) for own in shards]
        is_batch = "replicates" in self.algorithm.promises and all(w == weights[0] for w in weights)
        self.clusters = [
            Cluster(
                self.algorithm,
                num_workers=config.num_workers,
                weights=own,
                layout=engine.layout,
                index_code=method.index_code,
                link=LINK,
                is_checked=False,
            )
            for own in (weights[:1] if is_batch else weights)
        ]
        self._lr = method.lr
        outer_lr = 1.0 if config.sends == "difference" else method.lr
        self._optimizer = OPTIMIZERS[config.optimizer]([self.params], lr=outer_lr)
        self._loss = torch.zeros(len(seeds), dtype=torch.float64, device=start.device)
        self._num_losses = 0
        self.compress = Stopwatch(start.device)

    def run_until(self, num_rounds: int) -> None:
        """Train up to a round."""
        while self.num_rounds < num_rounds:
            self._round()
            self.num_rounds += 1
        self.is_diverged = (~torch.isfinite(self.params).all(-1)).tolist()

    def evaluate(self) -> list[Quality]:
        """How good each model is now."""
        return self.engine.evaluate(self.params)

    @property
    def payload_bytes(self) -> list[float]:
        """What a worker has contributed so far, on average, for each seed."""
        found = torch.stack([c.total.payload_bytes.double().mean(-1) for c in self.clusters]).flatten()
        counts: list[float] = found.expand(len(self.params)).tolist()
        return counts

    def take_losses(self) -> list[float]:
        """Mean training loss of each seed since this was last asked."""
        losses: list[float] = (self._loss / max(1, self._num_losses)).tolist()
        self._loss.zero_()
        self._num_losses = 0
        return losses

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on later."""
        return {
            "params": self.params,
            "num_rounds": self.num_rounds,
            "compress_s": self.compress.total_s,
            "optimizer": self._optimizer.state_dict(),
            "clusters": [cluster.state_dict() for cluster in self.clusters],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` saved."""
        self.params.copy_(state["params"])
        self.num_rounds = state["num_rounds"]
        self.compress = Stopwatch(self.params.device, spent_s=state["compress_s"])
        self._optimizer.load_state_dict(state["optimizer"])
        for cluster, own in zip(self.clusters, state["clusters"], strict=True):
            cluster.load_state_dict(own)

    def _round(self) -> None:
        messages, losses = self._local_steps()
        with self.compress:
            self.params.grad = self._exchange(messages)
        self._loss += losses.double().mean(-1)
        self._num_losses += 1
        if self.algorithm.listens:
            own = [losses.mean()] if len(self.clusters) == 1 else losses.mean(-1)
            for cluster, loss in zip(self.clusters, own, strict=True):
                cluster.report(loss=float(loss))
        self._optimizer.step()

    def _exchange(self, messages: Tensor) -> Tensor:
        if len(self.clusters) == 1:
            return self.clusters[0].step(messages if len(messages) > 1 else messages[0]).view_as(self.params)
        return torch.stack([c.step(own) for c, own in zip(self.clusters, messages, strict=True)])

    def _local_steps(self) -> tuple[Tensor, Tensor]:
        """What the workers send, (R, N, J), and their losses at the last local step, (R, N)."""
        num, first = self.config.local_steps, self.num_rounds * self.config.local_steps
        if num == 1 and self.config.sends != "difference":
            return self.engine.grads(self.params, self._order[first])
        start = self.params.unsqueeze(1)
        local = start.repeat(1, self.config.num_workers, 1)
        total = torch.zeros_like(local) if self.config.sends == "mean-gradient" else None
        for step in range(first, first + num):
            grads, losses = self.engine.grads(local, self._order[step])
            local.sub_(grads, alpha=self._lr)
            if total is not None:
                total.add_(grads, alpha=1 / num)
        if total is not None:
            return total, losses
        return (start - local if self.config.sends == "difference" else grads), losses


class Stopwatch:
    """Adds up the time of `with` blocks; on a GPU by events, without waiting for it."""

    def __init__(self, device: torch.device, spent_s: float = 0.0) -> None:
        self._is_cuda = device.type == "cuda"
        self._pairs: list[tuple[Any, Any]] = []
        self._total_s = spent_s

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *error: object) -> None:
        if self._is_cuda:
            self._pairs.append((self._start, self._now()))
        else:
            self._total_s += self._now() - self._start

    @property
    def total_s(self) -> float:
        """Seconds so far; waits for the GPU."""
        if self._pairs:
            torch.cuda.synchronize()
            self._total_s += sum(start.elapsed_time(end) for start, end in self._pairs) / 1e3
            self._pairs.clear()
        return self._total_s

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
