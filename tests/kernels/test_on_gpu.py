"""What `on_gpu` checks, where there is a GPU."""

from collections.abc import Callable

import pytest
import torch

from tests.kernels import on_gpu


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("check", on_gpu.CHECKS, ids=lambda check: check.__name__)
def test_on_gpu(check: Callable[[], None]) -> None:
    on_gpu.run(check)
