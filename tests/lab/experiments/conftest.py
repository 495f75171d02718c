from collections.abc import Iterator

import pytest

from regtopk.lab.experiments.settings import threads_for


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """As an experiment does for models as small as these, which several threads make slower."""
    with threads_for(1):
        yield
