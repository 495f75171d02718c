from collections.abc import Iterator

import pytest
import torch

from regtopk.lab.experiments.settings import threads_for


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """As an experiment does for models as small as these, which several threads make slower."""
    with threads_for(1):
        yield


@pytest.fixture
def small_products() -> Iterator[None]:
    """No oneDNN: on an ARM CPU it takes a millisecond for the smallest product."""
    before = torch.backends.mkldnn.set_flags(False, _fp32_precision=None)[0]
    yield
    torch.backends.mkldnn.set_flags(before, _fp32_precision=None)
