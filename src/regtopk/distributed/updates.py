"""An exchange of updates: the optimizer runs first, and what it changed is sent."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from regtopk.distributed.background import Background
from regtopk.distributed.base import ExchangeBase
from regtopk.distributed.buckets import Bucket
from regtopk.distributed.collectives import Collectives, group_or_default, new_group_like
from regtopk.distributed.fragments import Flight, Fragment
from regtopk.distributed.handshake import end_group, roll_call
from regtopk.distributed.layout import subtract_
from regtopk.distributed.local_model import Anchors, LocalModel
from regtopk.distributed.model_buffers import How
from regtopk.distributed.optimizers import Outer
from regtopk.distributed.options import Collective, Options, ResidualDtype, Skip, Writer, names_typos
from regtopk.distributed.parameters import NamedParameters
from regtopk.distributed.record import summarise
from regtopk.distributed.sharded import Shards, group_of
from regtopk.distributed.step import Kind, Steps
from regtopk.errors import ArgumentError, ClusterError, StateError
from regtopk.rounds import Rounds, cut_evenly

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
    With `delay`, the exchange is made beside training: the rank goes on by itself, and when the aggregate is
    there it adds what it has learned since it sent its update,

    theta_n := theta_start - outer(d) + mix (theta_n - theta_n as it was sent)

    and with `fragments` parts of the model take turns, so that no more than one part is sent at a time (as
    Streaming DiLoCo does). Nothing is lost: every local step is part of exactly one update. Ranks then never
    hold the same parameters by themselves: call `finish()` where they must, at the end of training say.

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
        delay: how many optimizer steps there are from sending an update to applying the aggregate, 0 to
            every - 1. It needs the memory of one more model.
        fragments: how many parts of the model take turns, 1 to every; parts are of about the same size.
        mix: in [0, 1], how much is kept of what the rank has learned during the delay.
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
        delay: int = 0,
        fragments: int = 1,
        mix: float = 1.0,
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
        rounds = Rounds("updates", every=every, delay=delay, fragments=fragments, mix=mix)
        rounds.check_times()
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
        self._fragments = _fragments_of(model, fragments)
        if fragments > 1 and getattr(algorithm, "k", None) is not None:
            raise ArgumentError("k must be None with fragments, which differ in size: give a density")
        if delay and (model.is_sharded or anchors == "cpu"):
            what = "a model that fully_shard has sharded" if model.is_sharded else "anchors='cpu'"
            raise ArgumentError(f"delay must be 0 with {what}, got {delay}")
        if model.is_sharded:
            process_group = group_of("process_group", process_group)
            model.shards = Shards(model.parameters.whole, process_group)
        elif isinstance(process_group, DeviceMesh):
            process_group = group_of("process_group", process_group)
        collectives = Collectives(group_or_default(process_group))
        if optimizer in _attached:
            raise ClusterError("optimizer must have one UpdateExchange, got a second: close() the first one")
        times = {"every": every, "delay": delay, "fragments": fragments, "mix": mix}
        settings = tuple({**times, **model.describe()}.items())
        parts = tuple(fragment.names for fragment in self._fragments) if fragments > 1 else ()
        kind = Kind("regtopk.UpdateExchange", _WARNING, settings, every, parts)
        steps = Steps(model.parameters, algorithm, collectives, options, kind, model.shards)
        super().__init__(steps, model.sharding() if model.is_sharded else None)
        self._warn_of_one_rank("updates")
        self.every, self.delay = every, delay
        self._rounds = rounds
        self._model = model
        self._num_steps = 0
        self._is_whole = True  # whether the model is theta_start, the same on all ranks
        self._is_agreed = False
        self._handshake_timeout_s = handshake_timeout_s
        with torch.no_grad(), model.at_hand():
            model.begin(collectives, self._steps.buckets.all)
        self._background: Background | None = None
        if delay:  # whose thread must not mix its collectives with the user's own
            self._steps.rank.collectives = Collectives(new_group_like(collectives.group, self.device))
            self._background = Background(self.device)
        before, after = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        self._hooks = [before(self._before_step), after(self._after_step), *model.hooks]
        _attached.add(optimizer)

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
        self._land()
        steps = self._steps
        norm = self.total.residual_norm
        num_parts = len(self._fragments)
        return summarise(steps.ledger, self.num_workers, steps.algorithm.name, norm, self.every, num_parts)

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs to go on, on the CPU, for `torch.save`: inside a round too.

        It holds the rank's optimizer state, and theta_start with the outer optimizer's state. Inside a round
        it holds the rank's own parameters too. A round that is under way is waited for, and saved with what
        was sent. `gather_state_dict` makes one of all ranks'.
        """
        self._refuse_in_agreed("state_dict")
        skipped = [bool(fragment.sent) and not fragment.land() for fragment in self._fragments]
        sent = {name: tensor for fragment in self._fragments for name, tensor in fragment.sent.items()}
        return update_checkpoint.add_to(
            self._steps.state_dict(),
            self._model,
            self._rounds,
            self.num_steps,
            None if self._is_whole else sent,
            skipped,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, which also sets parameters, buffers and both optimizers.

        With the ranks and weights that were saved, training continues bit for bit, also from inside a round.
        With others the dict must hold all ranks. Then sum_n w_n e_n is conserved, the outer optimizer's state
        is kept, and every rank's own optimizer gets the weighted mean of the states that were saved. Inside a
        round, what each rank has learned since it began goes into its residual first.

        Raises:
            StateError: it does not fit; nothing was changed.
        """
        self._refuse_in_agreed("load_state_dict")
        super().load_state_dict(state_dict)

    def _loaded(self, state_dict: dict[str, Any]) -> Any:
        if not isinstance(state_dict, dict) or "updates" not in state_dict:
            raise StateError("a saved UpdateExchange must hold 'updates': this was saved by something else")
        steps = self._steps
        state_dict = update_checkpoint.at_a_rounds_end(
            state_dict, self.weights, is_sharded=self._model.is_sharded
        )
        progress = steps.loaded({key: part for key, part in state_dict.items() if key != "updates"})
        return progress, update_checkpoint.loaded(
            self._model, state_dict, self._rounds, self.rank, self.weights
        )

    @torch.no_grad()
    def _go_on_from(self, loaded: Any) -> None:
        progress, model = loaded
        for fragment in self._fragments:
            if fragment.flight is not None:
                fragment.flight.wait()
        self._steps.go_on_from(progress)
        update_checkpoint.load_into(self._model, model)
        self._num_steps = model.num_steps
        self._is_whole = not model.parameters
        for number, fragment in enumerate(self._fragments):
            there = {name: tensor for name, tensor in model.sent.items() if name in fragment.names}
            fragment.clear()
            fragment.sent = {name: t.to(self.device, copy=True) for name, t in there.items()}
            fragment.is_skipped = number < len(model.skipped) and model.skipped[number]
        self._model.notice.has_loaded = False

    def close(self) -> None:
        """End the exchange: the optimizer's steps stay on this rank from now on. Call it on every rank."""
        background, self._background = self._background, None
        if background is not None:
            background.close()  # what has begun on all ranks ends on all
        super().close()
        for hook in self._hooks:
            hook.remove()
        _attached.discard(self._model.optimizer)
        if background is not None:
            end_group(self._steps.rank.collectives)

    @torch.no_grad()
    def finish(self) -> None:
        """Give all ranks the same model now. Call it on every rank, after equally many steps.

        Rounds that are under way are applied, and what was learned since is exchanged too. Where rounds are
        neither delayed nor in fragments, the model is the same on all ranks after every round anyway.
        """
        self._refuse_in_agreed("finish")
        self._steps.check_usable()
        roll_call(self._collectives, "finish", "handshake_timeout_s", self._handshake_timeout_s)
        for fragment in self._fragments:
            if fragment.sent:
                self._receive(fragment)
        for fragment in self._fragments if not self._is_whole else ():
            with self._model.at_hand():
                self._make_round(fragment)
        self._is_whole = True

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """While this lasts, the model is theta_start, the same on all ranks: for evaluation, say.

        >>> with exchange.agreed():
        ...     loss = evaluate(model)

        Then the rank gets its own parameters back. Buffers stay its own.
        """
        self._refuse_in_agreed("agreed")
        self._land()
        own = self._model.copies(list(self._model.start))
        with torch.no_grad():
            self._model.write_back()
        self._is_agreed = True
        try:
            yield
        finally:
            self._is_agreed = False
            with torch.no_grad():
                self._model.put_back(own)

    def _refuse_in_agreed(self, call: str) -> None:
        if self._is_agreed:
            raise ClusterError(
                f"{call}() must not be called inside agreed(): the model is not the rank's own"
            )

    def _before_step(self, *_: Any) -> None:
        self._refuse_in_agreed("optimizer.step")
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
        for fragment in self._fragments:
            if fragment.flight is not None:
                fragment.flight.raise_failure()
        self._steps.check_usable()
        step = self._num_steps + 1
        self._is_whole = False
        for number, fragment in enumerate(self._fragments):
            if self._rounds.receives_at(number, step) and fragment.sent:
                self._receive(fragment)
            if self._rounds.sends_at(number, step):
                if self._background is None:
                    with self._model.at_hand():
                        self._make_round(fragment)
                else:
                    self._send(fragment, self._background)
        self._num_steps = step

    def _make_round(self, fragment: Fragment) -> None:
        """Exchange an update, and go on from the aggregate."""
        steps = self._steps
        self._model.parameters.check()
        self._model.parameters.check_trainable()
        steps.begin()
        with steps.rank.timer.phase("select_s"):
            update = self._model.take_update(self._buckets_of(fragment))
        self._meet(fragment, *update, self._model.outer, then=self._go_on)

    def _send(self, fragment: Fragment, background: Background) -> None:
        """Start the exchange of an update, which goes on beside training."""
        self._model.parameters.check()
        self._model.parameters.check_trainable()
        flats, is_finite = self._model.take_update(self._buckets_of(fragment))
        fragment.sent = self._model.copies(fragment.names)
        outer = self._model.outer_as_it_is()

        def make_round() -> bool:
            with self._steps.lock:  # whoever looks at the counts meanwhile waits
                self._keep_for_this_stream(fragment, flats)
                self._steps.begin()
                return self._meet(fragment, flats, is_finite, outer)

        fragment.flight = Flight(background, make_round, self.device)

    def _receive(self, fragment: Fragment) -> None:
        """Wait for the aggregate, and go on from it with what was learned meanwhile."""
        is_finite = fragment.land()
        with self._steps.half_way():
            self._go_on(fragment, is_finite)
        fragment.clear()

    def _meet(
        self,
        fragment: Fragment,
        flats: list[Tensor],
        is_finite: Tensor,
        outer: Optimizer | None,
        then: Callable[[Fragment, bool], None] | None = None,
    ) -> bool:
        """What ranks do together in a round: the aggregate gets into theta_start.

        Args:
            fragment: whose round it is.
            flats: its update, as the buckets' vectors.
            is_finite: whether that is finite.
            outer: what applies the aggregate.
            then: what follows, if it is applied at once.

        Returns:
            Whether all ranks' updates were finite; if not, nothing has changed.
        """
        steps, buckets = self._steps, self._buckets_of(fragment)
        self._agree(buckets, is_finite)
        steps.agree_with_shards()
        with steps.half_way():
            if steps.is_finite:
                self._exchange(fragment, buckets, flats, outer)
            if then is not None:
                with steps.rank.timer.phase("decode_s"):
                    then(fragment, steps.is_finite)
        steps.end(buckets)
        return steps.is_finite

    def _exchange(
        self, fragment: Fragment, buckets: list[Bucket], flats: list[Tensor], outer: Optimizer | None
    ) -> None:
        model = self._model
        if outer is None:
            self._steps.exchange(buckets, flats, model.start, subtract_)
        else:
            self._steps.exchange(buckets, flats, model.update)
            model.apply_outer(
                outer, fragment.names
            )  # theta_start is its parameters, the update their gradients

    def _go_on(self, fragment: Fragment, is_finite: bool) -> None:
        """Begin a fragment's next round, the aggregate being in theta_start; or return to its beginning."""
        model = self._model
        if not is_finite:
            under_way = [other for other in self._fragments if other.sent]
            are_finite = [other.land() for other in under_way]
            model.take_back()  # the whole model: a NaN spreads
            for other, other_is_finite in zip(under_way, are_finite, strict=True):
                if other_is_finite:
                    other.sent = model.copies(other.names)  # what they learned before is gone
                else:  # this take-back is theirs, too
                    other.clear()
            self._is_whole = not any(other.sent for other in self._fragments if other is not fragment)
            return
        model.go_on(fragment.names, fragment.sent, self._rounds.mix)
        if fragment is self._fragments[-1] and model.buffers.are_joined:
            self._join_buffers()
        elif fragment is self._fragments[-1]:
            model.buffers.keep()
        self._is_whole = self._fragments == [fragment] and not fragment.sent

    def _join_buffers(self) -> None:
        """Make the buffers the same on all ranks."""
        self._land()  # whose collectives must not mix with these
        steps = self._steps
        if self.delay == 0:
            self._model.buffers.join(steps.rank, self.device)
            return
        steps.rank.begin(self.device)  # the round they belong to is counted already
        self._model.buffers.join(steps.rank, self.device)
        steps.ledger.add_to_total(steps.rank.record, steps.rank.timer)

    def _keep_for_this_stream(self, fragment: Fragment, flats: list[Tensor]) -> None:
        """Memory of another stream must not be reused there before this stream is done with it."""
        if self.device.type == "cuda":
            states = [t for bucket in self._buckets_of(fragment) for t in bucket.state.state_dict().values()]
            for tensor in (*flats, *states, *self._model.start.values()):
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream(self.device))

    def _buckets_of(self, fragment: Fragment) -> list[Bucket]:
        names = set(fragment.names)
        return [bucket for bucket in self._steps.buckets.all if names.issuperset(bucket.names)]

    def _land(self) -> None:
        """Wait for what is under way; it is applied when its time has come."""
        for fragment in self._fragments:
            if fragment.flight is not None:
                fragment.flight.land()

    def _agree(self, buckets: list[Bucket], is_finite: Tensor) -> None:
        """Wait until all ranks are here."""
        try:
            self._steps.agree(buckets, is_finite)
        except ClusterError as error:
            if error.__cause__ is None:  # all ranks are here, but differ
                raise
            raise ClusterError(
                f"round {self.num_rounds} did not begin at step {self.num_steps + 1} of this rank: did every "
                "rank call optimizer.step() equally often? A step that a GradScaler skips on one rank is "
                f"none: count by num_steps, not by batches. {error}"
            ) from error


def _fragments_of(model: LocalModel, num_fragments: int) -> list[Fragment]:
    """The parameters in so many parts of about the same size; those without entries are in none."""
    sizes = {name: p.numel() for name, p in model.parameters.named.items() if p.numel() > 0}
    if num_fragments > len(sizes):
        raise ArgumentError(
            f"fragments must be at most the number of parameters, {len(sizes)}, got {num_fragments}"
        )
    names = list(sizes)
    parts = cut_evenly(list(sizes.values()), num_fragments)
    return [Fragment(tuple(names[i] for i in part)) for part in parts]
