"""Exchanges of updates: the optimizer runs first, and what it changed is sent."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from regtopk.core.algorithm import Algorithm
from regtopk.core.options import check_choice, check_number
from regtopk.distributed.options import ExchangeOptions, Options, names_typos, refuse_k
from regtopk.distributed.requests.record import summarise
from regtopk.distributed.state.parameters import NamedParameters
from regtopk.distributed.state.saved_shards import from_shard
from regtopk.distributed.state.shards import Shards, replicas_of
from regtopk.distributed.steps import attached
from regtopk.distributed.steps.agreement import Scaling
from regtopk.distributed.steps.base import Counted, ExchangeBase
from regtopk.distributed.steps.handshake import compare, difference, roll_call, together
from regtopk.distributed.steps.step import Kind, Steps
from regtopk.distributed.transport.collectives import Collectives, group_or_default
from regtopk.distributed.updates import saved as update_checkpoint
from regtopk.distributed.updates.inner import Inner
from regtopk.distributed.updates.model import Anchors, How, LocalModel
from regtopk.distributed.updates.optimizers import Outer
from regtopk.distributed.updates.rank_rounds import RankRounds
from regtopk.errors import ArgumentError, ClusterError, StateError, log
from regtopk.rounds import LocalRounds, Rounds

TIMES = ("every", "delay", "fragments", "mix", "clip_norm")


class UpdateOptions(ExchangeOptions, total=False):
    """What every exchange of updates takes, as keywords: see `UpdateExchange`."""

    every: int
    delay: int
    fragments: int
    mix: float
    clip_norm: float | None
    outer: Outer | None
    buffers: How
    grad_scaler: torch.amp.GradScaler | None


def checked(given: Mapping[str, Any]) -> tuple[Rounds, Options, dict[str, Any]]:
    """Of options: the times, what all kinds of exchange share, and the rest, as `LocalModel` takes it."""
    rest = dict(given)
    rounds = Rounds("updates", **{name: rest.pop(name) for name in TIMES if name in given})
    rounds.check_times()
    check_choice("buffers", rest.get("buffers", "mean"), get_args(How))
    check_choice("anchors", rest.get("anchors", "device"), get_args(Anchors))
    shared = {name: rest.pop(name) for name in Options.__dataclass_fields__ if name in given}
    if shared.get("weight") in ("steps", "tokens"):
        shared["weight"] = rounds.every if shared["weight"] == "steps" else None
    return rounds, Options(**shared), rest


class UpdatesBase(Counted):
    """Counts the steps of optimizers, and makes the rounds that are due."""

    _call, _peer = "regtopk.UpdateExchange", "rank"

    def _prepared(
        self,
        parameters: nn.Module | NamedParameters,
        optimizer: Inner,
        algorithm: Algorithm[Any],
        options: Mapping[str, Any],
    ) -> tuple[Rounds, LocalModel, Options, Kind]:
        """The times, the model and the other options, checked; and what tells this exchange from others."""
        rounds, shared, rest = checked(options)
        model = LocalModel(parameters, optimizer, rounds.fragments, shared.grad_scaler, **rest)
        if takes_turns := rounds.fragments > 1:
            refuse_k(algorithm)
        warning = (
            f"after round %d a {self._peer}'s update was not finite: all {self._peer}s went back to where "
            "the round began; total.num_skipped counts such rounds"
        )
        weight, parts = options.get("weight"), tuple(model.fragments) if takes_turns else ()
        settings = {name: getattr(rounds, name) for name in TIMES if name != "every"} | model.describe()
        settings["kind of weight"] = weight if weight in ("steps", "tokens") else "a number"
        scaling = Scaling(rounds.clip_norm, weight == "tokens")
        kind = Kind(self._call, warning, settings, parts, takes_turns, scaling=scaling, every=rounds.every)
        return rounds, model, replace(shared, grad_scaler=None), kind  # updates have no loss scale

    def _follow(self, steps: Steps, model: LocalModel, rounds: Rounds, maker: RankRounds) -> None:
        """Start from rank 0's model, and make rounds after the optimizers' steps from now on."""
        with torch.no_grad(), model.at_hand():
            model.begin(steps.collectives, steps.buckets.all, attached.Notices(self._is_inside_a_round))
        self._steps, self._model, self._maker = steps, model, maker
        self._rounds = LocalRounds(rounds, maker)
        self._is_agreed = False
        for optimizer in model.inner.all:
            model.hooks.append(optimizer.register_step_pre_hook(self._before_step))
            model.hooks.append(optimizer.register_step_post_hook(self._after_step))
            attached.warn(steps.algorithm, optimizer)
        if model.outer is not None:
            attached.warn(steps.algorithm, model.outer, "let outer make a")

    @property
    def num_steps(self) -> int:
        """How many steps this rank's optimizers have made, those of skipped rounds included."""
        return self._rounds.num_steps

    @property
    def num_rounds(self) -> int:
        """How many rounds of the whole model were made, without those with an update that was not finite."""
        return self._steps.num_turns

    @property
    def everys(self) -> list[int]:
        """Every rank's steps per round."""
        return self._steps.everys

    @property
    def outer(self) -> Optimizer | None:
        """The outer optimizer, for a learning rate that changes."""
        return self._model.outer

    def summary(self) -> str:
        """What this rank sent, by finish() too, against dense gradients in every step; and its time."""
        self._maker.land_all()
        steps, norm = self._steps, self.total.residual_norm
        rounds, dense_bytes = self._rounds.rounds, steps.dense_bytes(steps.buckets.all)
        counts = self.num_steps, rounds.fragments, self._peer, dense_bytes
        text = summarise(steps.ledger, steps.rank.num_workers, steps.algorithm.name, norm, *counts)
        if rounds.by_worker:
            waits = zip(rounds.by_worker, steps.ledger.waits.values(), strict=False)  # none before a round
            by_rank = ", ".join(f"{every} ({waited_s:.3g} s)" for every, waited_s in waits)
            text += f"\n  by rank   steps per round, and time spent waiting: {by_rank}"
        return text

    @contextmanager
    @torch.no_grad()  # not of what the caller does meanwhile
    def agreed(self) -> Iterator[None]:
        """While this lasts, the model is theta_start, the same on all ranks: for evaluation, say.

        >>> with exchange.agreed():
        ...     loss = evaluate(model)

        Then the rank gets its own parameters back. Buffers stay its own.
        """
        self._refuse_in_agreed("agreed")
        self._maker.land_all()
        model = self._model
        kept = [own.detach().clone() for own in model.own(model.start)]
        model.write_back()
        self._is_agreed = True
        try:
            yield
        finally:
            self._is_agreed = False
            torch._foreach_copy_(model.own(model.start), kept)

    def close(self) -> None:
        """End the exchange: the optimizer's steps stay on this rank from now on. Call it on every rank."""
        self._maker.close()
        for hook in self._model.hooks:
            hook.remove()
        self._steps.close()
        attached.OPTIMIZERS.difference_update(self._model.inner.all)

    def _is_inside_a_round(self) -> bool:
        return not self._is_agreed and not self._rounds.is_start

    def _refuse_in_agreed(self, call: str) -> None:
        if self._is_agreed:
            raise ClusterError(f"{call}() must not be called inside agreed(): the model is not this rank's")

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._refuse_in_agreed("optimizer.step")
        self._model.inner.check_turn(optimizer)
        if self._model.notices.taken():
            log.warning(
                "the model has loaded weights after its exchange of updates was made: they count as an "
                "update, of which only a part is sent. Load them before it is made, or all by its own "
                "load_state_dict"
            )

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # GradScaler calls fused optimizers to skip, too
        if found_inf is not None and bool(found_inf):
            return
        self._maker.check_usable()
        if self._model.inner.ends_step(optimizer):
            self._rounds.after_step()


class UpdateExchange(UpdatesBase, ExchangeBase):
    """Exchange what the optimizer changed, after every `every`-th `optimizer.step()`.

    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)          # any optimizer of torch's
    >>> topk = regtopk.TopK(density=0.01, value_code="4bit", impute=0.35)
    >>> exchange = regtopk.UpdateExchange(model, optimizer, topk, every=2, fragments=2)  # on every rank
    >>> ...                                  # train as on one process: model is plain, without DDP
    >>> print(exchange.summary())

    theta_n := optimizer(theta_n)                                   `every` times, each rank by itself
    d_n     := theta_start - theta_n                                the update of a round
    d       := sum_n w_n d_n, as the algorithm exchanges it         with its residual and codes
    theta   := theta_start - d, or theta_start - outer(d)           the same on all ranks, bit for bit

    Use this with Adam, which then sees every gradient as it is, not the rare entries of a sparse one.

    With `delay` or `fragments` the ranks' parameters always differ: call `finish()` where they must not, at
    the end say. All ranks start from rank 0's parameters and buffers. `state_dict()` holds the model
    and both optimizers, too. docs/training.md has more: on skipped rounds, GradScalers and loaded weights.

    Args:
        parameters: a module, which torch.compile may be around; or parameters, or (name, parameter) pairs, in
            the same order on every rank: without buffers, and without a warning of a state_dict() in a round.
        optimizer: what trains exactly these parameters; frozen ones may be among them. Several, such as
            ``[muon, adamw]``, have each parameter once, and step equally often, in one order.
        algorithm: what is run on the updates; the same on every rank. Its steps are rounds.
        every: how many optimizer steps a round of this rank has; 1 if not given. It may differ by rank.
        delay: how many optimizer steps there are from sending an update to applying the aggregate, 0 (if not
            given) to every - 1. It needs the memory of one more model.
        fragments: how many parts, of about the same size, take turns, 1 (if not given) to every.
        mix: in [0, 1], how much is kept of what the rank has learned during the delay; 1 if not given.
        clip_norm: an update whose norm is more than so many times the median of all ranks' is scaled down to
            that, by fragment; None (if not given): never.
        outer: makes the optimizer that applies the aggregate to theta_start from a list of parameters. DiLoCo
            uses ``lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)``. None subtracts it.
        buffers: what becomes of a module's buffers (batch norm) that change in a round: "mean" (if not
            given) averages floating-point ones by weight and takes rank 0's of the others, "rank0" takes rank
            0's of all, "local" leaves each rank its own.
        grad_scaler: the torch.amp.GradScaler in use, if there are several optimizers: it may skip one alone.
        anchors: where theta_start is kept between rounds: "device", where the parameters are; or "cpu", in
            pinned memory, from which every round copies it and back.
        options: see `regtopk.ExchangeOptions`. Of a sharded model, `outer` gets this rank's parts.

    Raises:
        ArgumentError: an option breaks its rule, or the optimizers train other parameters.
        ClusterError: a wrapped model, a second exchange, ranks that differ or that did not make this call.
    """

    @names_typos
    def __init__(
        self,
        parameters: nn.Module | NamedParameters,
        optimizer: Inner,
        algorithm: Algorithm[Any],
        *,
        anchors: Anchors = "device",
        **options: Unpack[UpdateOptions],
    ) -> None:
        given = {**options, "anchors": anchors}
        rounds, model, shared, kind = self._prepared(parameters, optimizer, algorithm, given)
        if rounds.delay and (model.is_sharded or anchors == "cpu"):
            what = "a model that fully_shard has sharded" if model.is_sharded else "anchors='cpu'"
            raise ArgumentError(f"delay must be 0 with {what}, got {rounds.delay}")
        group = (replicas_of if model.is_sharded else group_or_default)(shared.process_group)
        shards = Shards(model.parameters.whole, group) if model.is_sharded else None
        inner = model.inner.all
        if not attached.OPTIMIZERS.isdisjoint(inner):
            raise ClusterError("optimizer must have one UpdateExchange, got a second: close() the first one")
        kind = replace(kind, has_thread=rounds.delay > 0)
        steps = Steps(model.parameters, algorithm, Collectives(group, shared.link), shared, kind, shards)
        if len(set(steps.everys)) > 1:
            rounds = rounds._replace(by_worker=tuple(steps.everys))
        pause = min(steps.everys) // rounds.fragments
        if rounds.by_worker and rounds.delay >= pause:  # some would send again before they receive
            steps.close()
            raise ArgumentError(
                f"delay must be less than the smallest every // fragments, {pause}, where every differs by "
                f"rank, got {rounds.delay}"
            )
        ExchangeBase.__init__(self, steps, model.sharding() if model.is_sharded else None)
        self._warn_of_one_rank("updates")
        self._handshake_timeout_s = shared.handshake_timeout_s
        self._follow(steps, model, rounds, RankRounds(steps, model, rounds))
        attached.OPTIMIZERS.update(inner)

    def count(self, tokens: float) -> None:
        """Where `weight` is "tokens": how many tokens or examples the coming `optimizer.step()` learns from.

        The weights are t_n / T: what a rank has counted in a round, of what all ranks have.
        """
        check_number("tokens", tokens, "finite and >= 0", lambda x: 0 <= x < math.inf)
        if not self._steps.kind.scaling.by_tokens:
            raise ArgumentError("weight must be 'tokens' where count() is called")
        self._maker.count(tokens)

    def _saved(self) -> dict[str, Any]:
        self._refuse_in_agreed("state_dict")
        self._model.inner.check_whole("state_dict")
        rounds = self._rounds
        skipped = [bool(sent) and not self._maker.land(part) for part, sent in enumerate(rounds.sent)]
        tokens = self._maker.tokens if self._steps.kind.scaling.by_tokens else []
        return update_checkpoint.add_to(self._steps.state_dict(), self._model, rounds, skipped, tokens)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every exchange, but call it on every rank: what one rank cannot load, no rank loads.

        theta_start and the outer optimizer's state must be the same on all ranks, and the step, too.
        """
        roll_call(self._collectives, "load_state_dict", "handshake_timeout_s", self._handshake_timeout_s)
        with self._together():
            loaded = self._loaded(state_dict)
        with self._together():
            self._compare_loaded(loaded)
        self._go_on_from(loaded)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Let replicas, and the shards of each, load all or nothing."""
        others = self._steps.others
        of_shards = nullcontext() if others is None else together(others, "load the state", StateError)
        with together(self._collectives, "load the state", StateError), of_shards:
            yield

    def _compare_loaded(self, loaded: Any) -> None:
        different = difference(self._collectives, update_checkpoint.common(loaded[1], self._rounds.rounds))
        if different is not None:
            raise StateError(f"saved states must be of one moment of one run, with the same {different}")

    def _loaded(self, state_dict: dict[str, Any]) -> Any:
        self._refuse_in_agreed("load_state_dict")
        saved, rounds = from_shard(state_dict, self._steps.shard), self._rounds.rounds
        steps, model = update_checkpoint.loaded(self._model, saved, rounds, self.rank, self.weights)
        return self._steps.loaded(steps), model

    @torch.no_grad()
    def _go_on_from(self, loaded: Any) -> None:
        progress, model = loaded
        self._maker.load(model.skipped, model.tokens)
        sent = [
            [model.sent[name].to(self.device, copy=True) for name in names if name in model.sent]
            for names in self._model.fragments
        ]
        self._rounds.load(model.num_steps, sent, is_start=not model.parameters)
        self._steps.go_on_from(progress)
        update_checkpoint.load_into(self._model, model)

    @torch.no_grad()
    def finish(self) -> None:
        """Give all ranks the same model now. Call it on every rank, when all have sent equally often.

        With `delay`, all must have received equally often, too: call it after equally many steps, or, where
        `every` differs, after a whole number of rounds.

        It applies the rounds that are under way, and exchanges every fragment, unless all ranks' models are
        theta_start, as they are after a round without `delay` and `fragments`. Residuals stay unsent.
        """
        self._refuse_in_agreed("finish")
        self._model.inner.check_whole("finish")
        self._steps.check_usable()
        roll_call(self._collectives, "finish", "handshake_timeout_s", self._handshake_timeout_s)
        rounds, ranks = self._rounds, self._collectives
        compare(ranks, {"number of exchanges": rounds.rounds.num_sent(rounds.clock)})
        rounds.finish(lambda is_start: all(ranks.all_gather_objects(is_start)))
