"""What exchanges of updates have in common, whoever brings the workers together."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from regtopk.distributed.requests.record import summarise
from regtopk.distributed.steps.base import Counted
from regtopk.distributed.steps.step import Kind, Steps
from regtopk.distributed.updates.model import LocalModel
from regtopk.distributed.updates.rounds import RankRounds
from regtopk.errors import ClusterError
from regtopk.rounds import LocalRounds, Rounds

_log = logging.getLogger("regtopk")


def kind_of(
    call: str, model: LocalModel, rounds: Rounds, peer: str = "rank", has_thread: bool = False
) -> Kind:
    """What an exchange of updates compares on its ranks, or replicas, and warns of."""
    warning = (
        f"after round %d a {peer}'s update was not finite: all {peer}s went back to where the round began; "
        "total.num_skipped counts such rounds"
    )
    times = {name: getattr(rounds, name) for name in ("every", "delay", "fragments", "mix")}
    takes_turns = rounds.fragments > 1
    parts = tuple(model.fragments) if takes_turns else ()
    return Kind(call, warning, tuple({**times, **model.describe()}.items()), parts, takes_turns, has_thread)


class UpdatesBase(Counted):
    """Counts the steps of an optimizer, and makes the rounds that are due."""

    _peer = "rank"

    def _follow(self, steps: Steps, model: LocalModel, rounds: Rounds, maker: RankRounds) -> None:
        """Make rounds after the optimizer's steps from now on."""
        self._steps, self._model, self._maker = steps, model, maker
        self._rounds = LocalRounds(rounds, maker)
        self.every, self.delay = rounds.every, rounds.delay
        self._num_steps = 0
        self._is_agreed = False
        before, after = model.optimizer.register_step_pre_hook, model.optimizer.register_step_post_hook
        self._hooks = [before(self._before_step), after(self._after_step), *model.hooks]

    @property
    def num_steps(self) -> int:
        """How many steps this rank's optimizer has made, those of skipped rounds included."""
        return self._num_steps

    @property
    def num_rounds(self) -> int:
        """How many rounds of the whole model were made, without those with an update that was not finite."""
        return self._steps.num_turns

    @property
    def outer(self) -> Optimizer | None:
        """The outer optimizer, for a learning rate that changes."""
        return self._model.outer

    def summary(self) -> str:
        """What this rank sent, against dense gradients in every step, and where the time went."""
        self._maker.land_all()
        steps, norm = self._steps, self.total.residual_norm
        counts = self.every, len(self._model.fragments), self._peer
        return summarise(steps.ledger, steps.rank.num_workers, steps.algorithm.name, norm, *counts)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """While this lasts, the model is theta_start, the same on all ranks: for evaluation, say.

        >>> with exchange.agreed():
        ...     loss = evaluate(model)

        Then the rank gets its own parameters back. Buffers stay its own.
        """
        self._refuse_in_agreed("agreed")
        self._maker.land_all()
        with self._model.being_start():
            self._is_agreed = True
            try:
                yield
            finally:
                self._is_agreed = False

    def close(self) -> None:
        """End the exchange: the optimizer's steps stay on this rank from now on. Call it on every rank."""
        self._maker.close()
        for hook in self._hooks:
            hook.remove()

    def _refuse_in_agreed(self, call: str) -> None:
        if self._is_agreed:
            raise ClusterError(
                f"{call}() must not be called inside agreed(): the model is not the rank's own"
            )

    def _before_step(self, *_: Any) -> None:
        self._refuse_in_agreed("optimizer.step")
        if self._model.notice.has_loaded:
            _log.warning(
                "the model has loaded weights after its exchange of updates was made: they count as an "
                "update, of which only a part is sent. Load them before it is made, or all by its own "
                "load_state_dict"
            )
            self._model.notice.has_loaded = False

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # GradScaler calls fused optimizers to skip, too
        if found_inf is not None and bool(found_inf):
            return
        self._maker.check_usable()
        self._rounds.after_step()
        self._num_steps += 1
