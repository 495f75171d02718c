"""One process group per world size, shared by all cases, and new processes for those that need them."""

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two gloo processes."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture
def new_ranks() -> Iterator[Ranks]:
    """Two processes that nothing has run in."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four gloo processes."""
    with Ranks(4) as ranks:
        yield ranks
