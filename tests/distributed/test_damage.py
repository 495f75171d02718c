"""What is damaged, or claims sizes that cannot be, is refused by all ranks at once: nobody waits."""

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from regtopk.core.requests import Broadcast, DenseSum, Gather, Peek, Request, SenderSum, SparseSum, ToOwners
from regtopk.core.sparse import SparseGradient
from regtopk.distributed.options import Collective, Options
from regtopk.distributed.requests.rank import Rank, SumBuffer
from regtopk.distributed.steps import driver
from regtopk.distributed.transport.collectives import Collectives, group_or_default
from regtopk.errors import RegtopkError
from tests.distributed.ranks import Ranks

J = 1000
WEIGHT = torch.tensor(0.5)
FLIPPED, TOO_LONG = 60, 1 << 60


class FlipsABit(Collectives):
    """A network that damages what rank 0 gets from rank 1, but what tells of lengths."""

    def all_to_all(self, parts: Sequence[Tensor], sizes: list[int]) -> list[Tensor]:
        received = super().all_to_all(parts, sizes)
        if self.rank == 0 and len(received[1]) > FLIPPED:
            received[1][FLIPPED] ^= 1
        return received


def boasting(head: Tensor) -> Tensor:
    """What goes before a message, with lengths and counts that cannot be."""
    first, *numbers, _ = head.view(torch.int64).tolist()
    row = [first, *(TOO_LONG for _ in numbers)]
    return torch.tensor([*row, crc32(repr(row).encode())]).view(torch.uint8)


class Boasts(Collectives):
    """A rank 1 that announces far more than it sends."""

    def all_to_all(self, parts: Sequence[Tensor], sizes: list[int]) -> list[Tensor]:
        return super().all_to_all([*map(boasting, parts)] if self.rank == 1 else parts, sizes)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return super().broadcast(torch.full_like(tensor, TOO_LONG) if self.rank == 1 else tensor, source)


def answer(
    network: Callable[[dist.ProcessGroup], Collectives],
    request: Request,
    collective: Collective = "all_gather",
    index_code: str = "elias-fano",
    *,
    group: dist.ProcessGroup | None = None,
) -> str:
    """What a rank says to a request that must fail."""
    collectives = network(group_or_default(group))
    weights = torch.full((collectives.num_workers,), 1 / collectives.num_workers, dtype=torch.float64)
    rank = Rank(collectives, weights, Options(index_code=index_code, collective=collective))
    try:
        driver.answer(rank, [request], [SumBuffer()])
        rank.raise_refusals()
    except RegtopkError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def answer_in_a_subgroup(*arguments: Any) -> str:
    group = dist.new_group([1, 3])
    return answer(*arguments, group=group) if dist.get_rank() in (1, 3) else ""


def two_say(four_ranks: Ranks, *arguments: Any) -> list[str]:
    """What ranks 1 and 3 say in a group of their own: each is told of by its global name."""
    return four_ranks.run(answer_in_a_subgroup, *arguments, timeout_s=30)[1::2]


def a_sparse(count: int | None = None) -> SparseGradient:
    at = torch.arange(0, J, 7)
    return SparseGradient(at, at.float() + 1, J, None if count is None else torch.tensor(count))


@pytest.mark.parametrize("sum_code", ["float32", "4bit"])
def test_a_damaged_segment(four_ranks: Ranks, sum_code: str) -> None:
    loss = None if sum_code == "float32" else torch.zeros(J)
    request = DenseSum(torch.linspace(1, 2, J), WEIGHT, sum_code=sum_code, loss=loss)
    owner, other = two_say(four_ranks, FlipsABit, request)
    assert owner == "WireFormatError: message of rank 3 is refused: checksum must be that of the words"
    refused = "WireFormatError: message of rank 1 is refused:"
    assert other.startswith(f"{refused} the sender's values must be finite")


@pytest.mark.parametrize("kind", [SparseSum, SenderSum])
def test_a_damaged_piece_of_a_split_sum(four_ranks: Ranks, kind: type[SparseSum]) -> None:
    owner, other = two_say(four_ranks, FlipsABit, kind(a_sparse(), WEIGHT), "split")
    assert owner.startswith("WireFormatError: rank 3: message is refused: checksum must be that of the words")
    assert "the sender's values must be finite" in other and "it has refused a message itself" in other


BOASTS: dict[str, tuple[Any, ...]] = {
    "messages of unequal length": (SparseSum(a_sparse(50), WEIGHT),),
    "pieces of a split sum": (SparseSum(a_sparse(), WEIGHT), "split"),
    "index sets": (Gather(torch.arange(9), torch.tensor(5), numel=J),),
    "vectors": (Gather(torch.arange(9)),),
    "a broadcast": (Broadcast(torch.arange(9), 1, numel=J), "all_gather", "rice"),
}


@pytest.mark.parametrize("case", BOASTS)
def test_sizes_that_cannot_be_are_refused_before_memory_is_taken(four_ranks: Ranks, case: str) -> None:
    assert are_refused(two_say(four_ranks, Boasts, *BOASTS[case]), 3)


def test_messages_to_owners(four_ranks: Ranks) -> None:
    places, count = torch.arange(12).view(4, 3), torch.tensor([3, 2, 3, 0])
    request = ToOwners(SparseGradient(places, torch.ones(4, 3), J // 4, count), WEIGHT)
    assert four_ranks.run(answer, Collectives, request, timeout_s=30) == ["nothing"] * 4
    assert are_refused(four_ranks.run(answer, Boasts, request, timeout_s=30), 1)


def are_refused(said: list[str], rank: int) -> bool:
    """Whether all ranks refuse what one announces."""
    start = f"ClusterError: rank {rank} announces {TOO_LONG} bytes or entries, but there can be 0 to "
    end = ": it runs another program, or its memory is damaged; restart all ranks from the last checkpoint"
    return all(words.startswith(start) and words.endswith(end) for words in said)


def test_a_driver_cannot_peek(two_ranks: Ranks) -> None:
    expected = (
        "OracleError: peeks at the sum of all workers' vectors before anything is sent: "
        "only a simulator can answer that (regtopk.simulate.Cluster), a real cluster cannot"
    )
    assert two_ranks.run(answer, Collectives, Peek(torch.zeros(J), WEIGHT)) == [expected] * 2
