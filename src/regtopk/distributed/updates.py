"""An exchange of updates: the optimizer runs first, and what it changed is sent."""

import logging
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from regtopk.core.algorithm import Algorithm
from regtopk.core.options import check_integer
from regtopk.distributed import update_checkpoint
from regtopk.distributed.base import ExchangeBase
from regtopk.distributed.collectives import Collectives, group_or_default
from regtopk.distributed.layout import subtract_
from regtopk.distributed.local_model import Anchors, LocalModel
from regtopk.distributed.model_buffers import How
from regtopk.distributed.optimizers import Outer
from regtopk.distributed.options import Collective, Options, ResidualDtype, Skip, Writer, names_typos
from regtopk.distributed.parameters import NamedParameters
from regtopk.distributed.record import summarise
from regtopk.distributed.sharded import Shards, group_of
from regtopk.distributed.step import Kind, Steps
from regtopk.errors import ClusterError, StateError

_WARNING = (
    "after round %d a rank's update was not finite: all ranks went back to where the round began; "
    "total.num_skipped counts such rounds"
)
_log = logging.getLogger("regtopk")
_attached: "WeakSet[Optimizer]" = WeakSet()


class UpdateExchange(ExchangeBase):
    """Exchange what the optimizer changed, after every `every`-th `optimizer.step()`.

    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)          # any optimizer of torch's
    >>> exchange = UpdateExchange(model, optimizer, TopK(density=0.01))     # on every rank
    >>> ...                                  # train as on one process: model is plain, without DDP
    >>> print(exchange.summary())

    theta_n := optimizer(theta_n)                                   `every` times, each rank by itself
    d_n     := theta_start - theta_n                                the update of a round
    d       := sum_n w_n d_n, as the algorithm exchanges it         with its residual and codes
    theta   := theta_start - d, or theta_start - outer(d)           the same on all ranks, bit for bit

    This is what to use with Adam: it sees gradients as they are, not the late pulses of a sparse aggregate.
    All ranks start from rank 0's parameters and buffers. Between rounds their parameters differ. Load weights
    before: whatever else changes parameters counts as part of the update.

    A step is an `optimizer.step()` that was made. A step that a GradScaler skips on a rank is none: that rank
    reaches the end of the round one batch later, and the others wait for it. So count by `num_steps`, not by
    batches, where a loop ends and where it saves. A rank that makes fewer steps than the others ends their
    wait with an error after the process group's timeout.

    If any rank's update is not finite, all ranks return to where the round began, and `num_skipped` counts
    the round. Where the NaN has reached an optimizer's state of a parameter, that state starts anew.

    Args:
        parameters: a module, which torch.compile may be around; or parameters, as optimizers take them, or
            (name, parameter) pairs, in the same order on every rank. Buffers are a module's alone.
        optimizer: what trains exactly these parameters; frozen ones may be among them.
        algorithm: what is run on the updates; the same on every rank. Its steps are rounds.
        every: how many optimizer steps a round has.
        outer: makes the optimizer that applies the aggregate to theta_start from a list of parameters. DiLoCo
            uses ``lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)``. None subtracts it.
        process_group: the ranks that take part; the default group if None. Of a model that fully_shard has
            sharded it must be given: the replicate axis, as a group or a mesh of one dimension. Every rank
            then exchanges its part of the model, and `outer` gets parts as its parameters.
        weight: this rank's w_n; 1/N if None. The weights of all ranks must sum to one within 1e-6.
        index_code: how indices are coded: "elias-fano", "rice" or "raw32".
        skip: a callable of (name, parameter): True sends that parameter dense.
        dense_steps: how many first optimizer steps are exchanged dense, in whole rounds.
        buffers: what becomes of a module's buffers (batch norm) that change in a round: "mean" averages
            floating-point ones by weight and takes rank 0's of the others, "rank0" takes rank 0's of all,
            "local" leaves each rank its own.
        deterministic: sum uncoded dense vectors in rank order too, not in the order of the backend.
        writer: a TensorBoard SummaryWriter (or anything with add_scalar) that gets every round's numbers.
        collective: how sparse sums run: "auto" (computed), "all_gather" or "split".
        handshake_timeout_s: how long to wait for every rank to make this call.
        residual_dtype: how residuals are kept between steps: "float32", or in half the memory "bfloat16",
            rounded at random.
        anchors: where theta_start is between rounds: on the parameters' "device", or in the "cpu"'s memory,
            pinned. A round then copies it there and back.

    Raises:
        ArgumentError: an option breaks its rule, or the optimizer trains other parameters.
        ClusterError: a model in DDP or FSDP1, an optimizer that has an exchange already, ranks that differ,
            or a rank that did not make this call; nothing was changed.
    """

    @names_typos
    def __init__(
        self,
        parameters: nn.Module | NamedParameters,
        optimizer: Optimizer,
        algorithm: Algorithm[Any],
        *,
        every: int = 1,
        outer: Outer | None = None,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        weight: float | None = None,
        index_code: str = "elias-fano",
        skip: Skip | None = None,
        dense_steps: int = 0,
        buffers: How = "mean",
        deterministic: bool = True,
        writer: Writer | None = None,
        collective: Collective = "auto",
        handshake_timeout_s: float = 60.0,
        residual_dtype: ResidualDtype = "float32",
        anchors: Anchors = "device",
    ) -> None:
        check_integer("every", every, at_least=1)
        check_integer("dense_steps", dense_steps, at_least=0)
        options = Options(
            index_code=index_code,
            weight=weight,
            dense_steps=-(-dense_steps // every),
            skip=skip,
            collective=collective,
            deterministic=deterministic,
            writer=writer,
            handshake_timeout_s=handshake_timeout_s,
            residual_dtype=residual_dtype,
        )
        model = LocalModel(parameters, optimizer, outer, buffers, anchors)
        if model.is_sharded:
            process_group = group_of("process_group", process_group)
            model.shards = Shards(model.parameters.whole, process_group)
        elif isinstance(process_group, DeviceMesh):
            process_group = group_of("process_group", process_group)
        collectives = Collectives(group_or_default(process_group))
        if optimizer in _attached:
            raise ClusterError("optimizer must have one UpdateExchange, got a second: close() the first one")
        settings = tuple({"every": every, **model.describe()}.items())
        kind = Kind("regtopk.UpdateExchange", _WARNING, settings, num_dense=every)
        steps = Steps(model.parameters, algorithm, collectives, options, kind, model.shards)
        super().__init__(steps, model.sharding() if model.is_sharded else None)
        self._warn_of_one_rank("updates")
        self.every = every
        self._model = model
        self._num_steps = 0
        with torch.no_grad(), model.at_hand():
            model.begin(collectives, self._steps.buckets.all)
        before, after = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        self._hooks = [before(self._before_step), after(self._after_step), *model.hooks]
        _attached.add(optimizer)

    @property
    def num_steps(self) -> int:
        """How many steps this rank's optimizer has made, those of skipped rounds included."""
        return self._num_steps

    @property
    def num_rounds(self) -> int:
        """How many rounds were made, without those skipped because an update was not finite."""
        return self._steps.num_steps

    @property
    def outer(self) -> Optimizer | None:
        """The outer optimizer, for a learning rate that changes."""
        return self._model.outer

    def summary(self) -> str:
        """What this rank sent, against dense gradients in every step, and where the time went."""
        steps = self._steps
        norm = self.total.residual_norm
        return summarise(steps.ledger, self.num_workers, steps.algorithm.name, norm, self.every)

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs to go on, on the CPU, for `torch.save`: inside a round too.

        It holds the rank's optimizer state, and theta_start with the outer optimizer's state. Inside a round
        it holds the rank's own parameters too. `gather_state_dict` makes one of all ranks'.
        """
        return update_checkpoint.add_to(self._steps.state_dict(), self._model, self.every, self.num_steps)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, which also sets parameters, buffers and both optimizers.

        With the ranks and weights that were saved, training continues bit for bit, also from inside a round.
        With others the dict must hold all ranks and be from a round's end. Then sum_n w_n e_n is conserved,
        the outer optimizer's state is kept, and every rank's own optimizer gets the weighted mean of the
        states that were saved.

        Raises:
            StateError: it does not fit; nothing was changed.
        """
        super().load_state_dict(state_dict)

    def _loaded(self, state_dict: dict[str, Any]) -> Any:
        if not isinstance(state_dict, dict) or "updates" not in state_dict:
            raise StateError("a saved UpdateExchange must hold 'updates': this was saved by something else")
        steps = self._steps
        progress = steps.loaded({key: part for key, part in state_dict.items() if key != "updates"})
        return progress, update_checkpoint.loaded(
            self._model, state_dict, self.every, self.rank, self.weights
        )

    @torch.no_grad()
    def _go_on_from(self, loaded: Any) -> None:
        progress, model = loaded
        self._steps.go_on_from(progress)
        update_checkpoint.load_into(self._model, model)
        self._num_steps = model.num_steps
        self._model.notice.has_loaded = False

    def close(self) -> None:
        """End the exchange: the optimizer's steps stay on this rank from now on. Call it on every rank."""
        super().close()
        for hook in self._hooks:
            hook.remove()
        _attached.discard(self._model.optimizer)

    def _before_step(self, *_: Any) -> None:
        if self._model.notice.has_loaded:
            _log.warning(
                "the model has loaded weights after UpdateExchange was made: they count as an update, of "
                "which only a part is sent. Load them before it is made, or all by its own load_state_dict"
            )
            self._model.notice.has_loaded = False

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # GradScaler calls fused optimizers to skip, too
        if found_inf is not None and bool(found_inf):
            return
        self._steps.check_usable()
        if (self._num_steps + 1) % self.every == 0:
            with self._model.at_hand():
                self._make_round()
        self._num_steps += 1

    def _make_round(self) -> None:
        steps, model = self._steps, self._model
        model.parameters.check()
        model.parameters.check_trainable()
        steps.begin()
        with steps.rank.timer.phase("select_s"):
            flats, is_finite = model.take_update()
        self._agree(is_finite)
        steps.agree_with_shards()
        with steps.half_way():
            if steps.is_finite:
                self._exchange(flats)
            else:
                model.take_back()
        steps.end()

    def _exchange(self, flats: list[Tensor]) -> None:
        steps, model = self._steps, self._model
        if model.outer is None:
            steps.exchange(steps.buckets.all, flats, model.start, subtract_)
        else:
            steps.exchange(steps.buckets.all, flats, model.update)
            model.outer.step()  # theta_start is its parameters, and the update their gradients
        with steps.rank.timer.phase("decode_s"):
            model.go_on(steps.rank)

    def _agree(self, is_finite: Tensor) -> None:
        """Wait until all ranks are here."""
        try:
            self._steps.agree(self._steps.buckets.all, is_finite)
        except ClusterError as error:
            if error.__cause__ is None:  # all ranks are here, but differ
                raise
            raise ClusterError(
                f"round {self.num_rounds} did not begin at step {self.num_steps + 1} of this rank: did every "
                "rank call optimizer.step() equally often? A step that a GradScaler skips on one rank is "
                f"none: count by num_steps, not by batches. {error}"
            ) from error
