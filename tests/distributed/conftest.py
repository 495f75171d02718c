"""One process group per world size, shared by all cases of a file."""

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two gloo processes."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four gloo processes."""
    ranks = Ranks(4)
    yield ranks
    ranks.stop()
