"""What tests on ranks, and in processes, rely on."""

import sys
import time
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.ranks import Ranks, on_ranks
from tests.processes import run_all

ON_OLD_ARM = "mkldnn_matmul failed, switching to BLAS gemm:mkldnn_matmul: mkldnn_matmul bf16 path needs ..."


def test_our_warnings_are_errors_and_torchs_of_the_cpu_is_not(two_ranks: Ranks) -> None:
    assert two_ranks.run(warnings.warn, ON_OLD_ARM) == [None, None]
    with pytest.raises(AssertionError, match="UserWarning: we should not"):
        two_ranks.run(warnings.warn, "we should not")


def test_a_rank_that_hangs_says_where(two_ranks: Ranks) -> None:
    with pytest.raises(TimeoutError, match=r"(?s)only \[\] answered within 1 s; .*rank 1:.*in _serve"):
        two_ranks.run(time.sleep, 60, timeout_s=1)


@pytest.mark.xfail(raises=AssertionError, strict=True)
@on_ranks(2)
def test_what_one_rank_asserts_counts() -> None:
    assert dist.get_rank() == 0


WAIT, FAIL = "import time; time.sleep(1000)", "raise SystemExit('no luck')"


@pytest.mark.parametrize("programs", [(WAIT, FAIL), (FAIL, WAIT)])
def test_one_that_fails_is_shown_and_ends_the_others(tmp_path: Path, programs: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match="no luck"):
        run_all([[sys.executable, "-c", program] for program in programs], tmp_path)


def test_one_that_does_not_end_is_ended(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run_all([[sys.executable, "-c", WAIT]], tmp_path, timeout_s=0.5)
