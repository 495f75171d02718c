"""`on_gpu`, where there is a GPU; and a part of it by gloo's ranks, so that it stays fit to run."""

import pytest
import torch

from tests.distributed.on_gpu import run_checks


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_gpu() -> None:
    assert run_checks("cuda", [])


def test_some_by_gloo(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_checks("cpu", ["a_damaged_message", "ranks_that_disagree", "sharded_checkpoints"], (2,))
    assert capsys.readouterr().out.endswith("3 of 3 pass\n")
