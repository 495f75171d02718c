"""What tests on ranks rely on."""

import time
import warnings

import pytest
import torch.distributed as dist

from tests.distributed.ranks import Ranks, on_ranks

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
