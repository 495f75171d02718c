"""Messages whose lengths only their senders know: one trip as soon as the last ones foretell them."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from math import inf
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from regtopk import Exchange, Link, TopK
from regtopk.core.traffic import goes_directly
from regtopk.distributed.transport import told
from regtopk.distributed.transport.collectives import Collectives, group_or_default
from regtopk.distributed.transport.rooms import Rooms
from regtopk.distributed.transport.told import Received, Sent
from regtopk.errors import ClusterError
from tests.distributed.ranks import on_ranks

LIMITS = (1 << 20, 100)
# in rounds: as long as before, a little longer, much longer, shorter, and nothing at all
BASES = (1000, 1000, 1010, 5000, 300, 0)
TRIPS = (2, 1, 1, 2, 1, 1)


class Counts(Collectives):
    """Counts the trips over the network."""

    num_trips = 0
    last_sizes: Sequence[int] = ()

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.num_trips += 1
        return super().all_gather(tensor)

    def all_to_all(self, parts: Sequence[Tensor], sizes: list[int]) -> list[Tensor]:
        self.num_trips += 1
        self.last_sizes = sizes
        return super().all_to_all(parts, sizes)


class FlipsABit(Collectives):
    """A network that damages what tells rank 0 how long rank 1's message is."""

    def all_to_all(self, parts: Sequence[Tensor], sizes: list[int]) -> list[Tensor]:
        received = super().all_to_all(parts, sizes)
        received[1][8] ^= self.rank == 0
        return received


def message(source: int, to: int, base: int, place: int) -> Tensor:
    """What a rank has for another one: some have nothing."""
    length = 0 if (source + to) % 4 == 3 else base + (base > 0) * (3 * source + to + 7 * place)
    return torch.arange(length).add(50 * source + 10 * to + place).to(torch.uint8)


def check(received: list[Received], expected: Callable[..., Tensor]) -> None:
    for place, found in enumerate(received):
        theirs = [expected(source=source, place=place) for source in range(4)]
        assert found.sizes == [each.numel() for each in theirs] and found.rows.shape[1] == max(found.sizes)
        assert found.counts == [10 * source + place for source in range(4)]
        assert all(map(torch.equal, found.messages, theirs))
        assert all(not row[size:].any() for row, size in zip(found.rows, found.sizes, strict=True))


@pytest.mark.parametrize("num_vectors", [1, 3])
@on_ranks(4)
def test_what_is_sent_arrives_in_one_trip(num_vectors: int) -> None:
    collectives = Counts(group_or_default(None))
    mine, places = collectives.rank, range(num_vectors)
    for base, num_trips in zip(BASES, TRIPS, strict=True):
        before = collectives.num_trips
        collectives.rooms.begin()

        def had(source: int, to: int, place: int, base: int = base) -> Tensor:
            return message(source, to, base, place)

        counts = [10 * mine + place for place in places]
        sent = [
            Sent([had(mine, to, place) for to in range(4)], [counts[place]] * 4, LIMITS) for place in places
        ]
        check(told.exchange(collectives, sent), partial(had, to=mine))
        assert collectives.num_trips - before == num_trips, base

        sent = [Sent([had(mine, 0, place)], [counts[place]], LIMITS) for place in places]
        check(told.exchange(collectives, sent), partial(had, to=0))
        assert collectives.num_trips - before == 2 * num_trips, base


@on_ranks(4)
def test_a_count_that_cannot_be_is_refused_by_those_too_whom_it_is_not_for() -> None:
    collectives = Counts(group_or_default(None))
    counts = [1 << 60 if collectives.rank == 1 else 0, 0, 0, 0]
    with pytest.raises(
        ClusterError, match=f"^rank 1 announces {1 << 60} bytes or entries, but there can be 0 to 100:"
    ):
        told.exchange(collectives, [Sent([torch.zeros(8, dtype=torch.uint8)] * 4, counts, LIMITS)])


@on_ranks(4)
def test_long_messages_go_round_a_ring_without_room_to_spare() -> None:
    collectives = Counts(group_or_default(None))
    short, long = (
        torch.full((length + collectives.rank,), collectives.rank, dtype=torch.uint8)
        for length in (1 << 10, 1 << 17)
    )
    told.exchange(collectives, [Sent([short], [0], LIMITS)])
    for _ in range(2):
        collectives.rooms.begin()
        (found,) = told.exchange(collectives, [Sent([long], [0], LIMITS)])
        assert all(torch.equal(each, torch.full_like(each, n)) for n, each in enumerate(found.messages))
        assert found.sizes == [(1 << 17) + n for n in range(4)]
    assert collectives.num_trips == 6
    assert collectives.last_sizes == [32] * 4  # nothing of a message before its second trip


@on_ranks(4)
def test_on_a_known_link_with_latency_long_messages_go_to_each_rank_directly() -> None:
    long = torch.full((1 << 18,), dist.get_rank(), dtype=torch.uint8)
    for latency_s, is_direct in ((0.0, False), (0.02, True)):
        collectives = Counts(group_or_default(None), Link(bandwidth=1e8, latency_s=latency_s))
        assert collectives.goes_directly(long.nbytes, long.device) == is_direct
        for _ in range(2):
            collectives.rooms.begin()
            (found,) = told.exchange(collectives, [Sent([long], [0], LIMITS)])
            assert all(torch.equal(each, torch.full_like(each, n)) for n, each in enumerate(found.messages))
        assert collectives.num_trips == (3 if is_direct else 4)  # the second one is foretold


def test_the_shorter_way_is_reckoned() -> None:
    link, fast = Link(bandwidth=1e8, latency_s=0.02), Link(bandwidth=1e8)
    assert goes_directly(1 << 17, 8) and not goes_directly(1 + (1 << 17), 8)
    assert goes_directly(1 << 17, 8, fast) and not goes_directly(1 + (1 << 17), 8, fast)
    assert goes_directly(340_000, 8, link) and not goes_directly(3_000_000, 8, link)
    assert goes_directly(1 << 20, 2, fast) and not goes_directly(1 << 20, 3, fast)  # two are a ring
    endless = Link(bandwidth=1e8, latency_s=inf)
    assert goes_directly(1 << 21, 8, endless) and not goes_directly(1 << 22, 8, endless)  # copies for all


@on_ranks(4)
def test_a_message_for_all_follows_one_for_each() -> None:
    """As where the density falls, and a sum that was split is gathered: the pieces had other lengths."""
    collectives = Counts(group_or_default(None))
    for to_all in (False, True):
        collectives.rooms.begin()
        pieces = [torch.zeros(1000 * (to + 1), dtype=torch.uint8) for to in range(4)]
        messages = [torch.full((5000,), collectives.rank, dtype=torch.uint8)] if to_all else pieces
        (found,) = told.exchange(collectives, [Sent(messages, [0] * len(messages), LIMITS)])
    assert all(torch.equal(each, torch.full((5000,), n)) for n, each in enumerate(found.messages))


@on_ranks(2)
def test_a_head_that_is_damaged_is_refused_by_its_receiver() -> None:
    collectives = FlipsABit(group_or_default(None))
    sent = [Sent([torch.empty(0, dtype=torch.uint8)] * 2, [5, 5], LIMITS)]
    if collectives.rank == 1:
        told.exchange(collectives, sent)
    else:
        with pytest.raises(ClusterError, match="the length of a message must arrive as rank 1 sent it"):
            told.exchange(collectives, sent)


@on_ranks(4)
def test_ranks_that_failed_in_different_places_go_on_from_a_saved_state() -> None:
    """Rank 0 is interrupted before it notes how long the messages were, the others afterwards."""
    model = torch.nn.Linear(40, 400)
    algorithm = TopK(density=0.05, returned=0.05)
    exchange = Exchange(model, algorithm)

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        exchange.step()

    for number in range(3):
        step(number)
    saved = deepcopy(exchange.state_dict())
    owner, name = (Rooms, "keep") if dist.get_rank() == 0 else (told, "_by_vector")
    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(owner, name, Mock(side_effect=KeyboardInterrupt))
        step(3)
    exchange.load_state_dict(saved)
    for number in range(3, 6):
        step(number)
    sums = [parameter.grad.double().sum() for parameter in model.parameters() if parameter.grad is not None]
    everyones = Collectives(group_or_default(None)).all_gather(torch.stack(sums))
    assert (everyones == everyones[0]).all() and exchange.num_steps == 6
