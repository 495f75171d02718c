"""What users call on every kind of exchange, whoever makes its steps."""

from collections.abc import Iterable
from os import PathLike
from typing import Any

import torch
from torch import nn

from regtopk.core.options import check_positive, true_or_false
from regtopk.core.worker import Report
from regtopk.distributed.requests.record import StepRecord, summarise
from regtopk.distributed.state.saved import merge_state_dicts
from regtopk.distributed.state.saved_shards import Sharding, from_shard, put_together, take_apart, under_shard
from regtopk.distributed.steps.handshake import roll_call
from regtopk.distributed.steps.step import Steps
from regtopk.errors import ClusterError, StateError, log


class Counted:
    """What the steps of an exchange have sent, and who takes part."""

    _steps: Steps

    @property
    def weights(self) -> list[float]:
        """Every rank's w_n."""
        return list(self._steps.rank.weights.tolist())

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._steps.device

    @property
    def last_step(self) -> StepRecord:
        """Bytes, entries and times of the last step on this rank."""
        return self._steps.with_residual_norm(self._steps.ledger.last_step)

    @property
    def total(self) -> StepRecord:
        """The sum of all steps on this rank."""
        return self._steps.with_residual_norm(self._steps.ledger.total)


class ExchangeBase(Counted):
    """What every kind of exchange offers: counts, a summary, and checkpoints.

    `close()` ends an exchange: no step and no checkpoint follows. `detach()` goes back to dense training, and
    drops what was not sent: to go on from it later, save `state_dict()` before. Call them on every rank,
    between two steps. What follows then:

    kind                   after close()                             after detach()
    attach, DDP            backward is refused                       backward averages as plain DDP does
    attach, fully_shard    backward is refused                       backward averages over the replicas
    attach, one process    the model trains as before                the model trains as before
    Exchange               step() is refused                         leave step() out, and close it
    UpdateExchange         optimizer.step() trains this rank alone   close it, and wrap the model in DDP
    """

    _is_detached = False

    def __init__(self, steps: Steps, sharding: Sharding | None = None) -> None:
        self._steps = steps
        self._sharding = sharding
        self._collectives = steps.collectives

    def _trained(self) -> Iterable[nn.Parameter]:
        """What an optimizer of the user's holds."""
        return self._steps.parameters.whole.values()

    def _warn_of_one_rank(self, vectors: str = "gradients") -> None:
        if self.num_workers == 1:
            log.warning("there is one rank: its %s are sparsified, but no bytes are saved", vectors)

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self._steps.rank.index

    @property
    def num_workers(self) -> int:
        """N, how many ranks take part."""
        return self._steps.rank.num_workers

    @property
    def is_sharded(self) -> bool:
        """Whether every rank holds a part of the model."""
        return self._steps.shard is not None

    @property
    def is_closed(self) -> bool:
        """Whether nothing follows: no step, and no checkpoint."""
        return self._steps.is_closed

    @property
    def num_steps(self) -> int:
        """How many steps were made, without those skipped because a gradient was not finite."""
        return self._steps.num_steps

    def summary(self) -> str:
        """What this rank sent, against dense, and where the time went, as a few lines of text."""
        steps, norm = self._steps, self.total.residual_norm
        text = summarise(steps.ledger, self.num_workers, steps.algorithm.name, norm)
        if self._is_detached:
            text += "\n  detached  the residual was dropped; the dense steps since are not counted here"
        return text

    def report(self, *, loss: float, time_s: float) -> None:
        """Tell adaptive algorithms the loss and the time of a step. All ranks use what rank 0 reports."""
        self._steps.pending_report = Report(float(loss), float(time_s))

    def stop_when(self, flag: bool) -> bool:
        """Whether any rank says so: where one must leave the loop, all leave it. Call it on every rank.

        >>> if exchange.stop_when(batch is None):  # its data are at an end; or its loss is good enough
        ...     break

        It takes one small collective, so ask before a step or less often, but on all ranks after equally many
        steps, as `num_steps` counts them.
        """
        true_or_false("flag", flag)
        self._steps.check_usable()
        if len(set(everys := self._steps.everys)) > 1:  # others' rounds come between
            raise ClusterError(
                f"every must be the same on all ranks where stop_when() is called, got {everys} by rank: "
                "stop at a number of num_rounds"
            )
        wants = torch.tensor([int(flag)], device=self._collectives.device_for_flags(self.device))
        for ranks in (self._collectives, self._steps.others):  # the replicas, and the shards of each
            wants = wants if ranks is None else ranks.maximum(wants)
        return bool(wants)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state after the last finished step, on the CPU, for `torch.save`.

        `torch.load(path, weights_only=True)` reads it. Tensors are under ``workers[rank]``, so that
        checkpoints that merge equal keys keep every rank's. Of a sharded model all is under ``shards[part]``.
        """
        return under_shard(self._saved(), self._steps.shard)

    def _saved(self) -> dict[str, Any]:
        """This rank's state, of its part of the model."""
        return self._steps.state_dict()

    def gather_state_dict(self, dst: int = 0, *, timeout_s: float = 300.0) -> dict[str, Any] | None:
        """All ranks' state in one, on rank `dst` of the group; None on the others. Call it on every rank.

        The result loads on any number of ranks. Of a sharded model every part has a state of its own, on rank
        `dst` of the replicas that hold it: `sharded_state_dict` is meant for those.

        It waits `timeout_s` for the last rank, which may be evaluating.

        Raises:
            ClusterError: a rank has not called it by then. Nothing was changed: all ranks may call it again.
        """
        check_positive("timeout_s", timeout_s)
        mine = self.state_dict()
        roll_call(self._collectives, "gather_state_dict", "timeout_s", timeout_s)
        parts = self._collectives.gather_objects(mine, dst)
        return None if parts is None else merge_state_dicts(parts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state; refused as a whole if it does not fit.

        With the ranks and weights that were saved, training continues bit for bit. With others the dict must
        hold all ranks (`gather_state_dict`, or `merge_state_dicts` of the rank files). Then sum_n w_n e_n is
        conserved, and what only made sense for a single rank starts anew. Ranks that are named under "lost"
        may be missing: what they had not sent is gone, and the sum is that of the others.
        """
        self._go_on_from(self._loaded(state_dict))

    def _loaded(self, state_dict: dict[str, Any]) -> Any:
        """What a saved state holds, checked as a whole; nothing changes yet."""
        return self._steps.loaded(from_shard(state_dict, self._steps.shard))

    def _compare_loaded(self, loaded: Any) -> None:
        """Refuse, on all ranks, what they have loaded if it does not go together; steps compare the rest."""

    def _go_on_from(self, loaded: Any) -> None:
        self._steps.go_on_from(loaded)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Of a sharded model: this rank's part of the state, for torch.distributed.checkpoint.

        >>> dcp.save({"exchange": exchange.sharded_state_dict()}, checkpoint_id=path)    # on every rank

        Residuals are DTensors, cut as their parameters are, under keys that name the replica.
        """
        return take_apart(self._saved(), self._known_sharding())

    def load_sharded(
        self, checkpoint_id: str | PathLike[str], *, key: str = "exchange", storage_reader: Any = None
    ) -> None:
        """Go on from what `sharded_state_dict` gave and torch.distributed.checkpoint saved. On every rank.

        On the same mesh training continues bit for bit. On another number of replicas, or with other weights,
        sum_n w_n e_n is conserved; this takes room on the CPU for the parts of all saved replicas. On another
        number of shards what has an entry for each of a parameter's is cut anew, and the rest starts anew.

        Args:
            checkpoint_id: the folder that was saved to.
            key: what the state was saved under.
            storage_reader: as dcp.load takes it, for checkpoints that are in no folder.

        Raises:
            StateError: there is no such state, or it does not fit; nothing was changed.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        sharding, steps = self._known_sharding(), self._steps
        assert steps.shard is not None

        def fill(tree: dict[str, Any]) -> None:
            load({key: tree}, checkpoint_id=checkpoint_id, storage_reader=storage_reader)

        try:
            saved = put_together(fill, sharding, steps.buckets, steps.shard)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            first_line = f"{cause}".partition("\n")[0]
            raise StateError(
                f"{checkpoint_id} must hold a sharded exchange of this model, which was saved as "
                f"{{{key!r}: exchange.sharded_state_dict()}}, got {type(cause).__name__} on rank {rank}: "
                f"{first_line} (what was saved as {{{key!r}: exchange}} is loaded by dcp.load alike)"
            ) from error
        self.load_state_dict(saved)

    def _known_sharding(self) -> Sharding:
        if self._sharding is None:
            raise ClusterError("the model must be sharded by fully_shard: of this one save state_dict()")
        return self._sharding

    def close(self) -> None:
        """End the exchange: no step and no checkpoint follows. Call it on every rank."""
        self._steps.close("close")
