"""One process group per world size, shared by all cases, and new processes for those that need them."""

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two gloo processes."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture
def new_ranks() -> Iterator[Ranks]:
    """Two processes that nothing has run in."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four gloo processes."""
    ranks = Ranks(4)
    yield ranks
    ranks.stop()
