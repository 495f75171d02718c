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


@pytest.mark.filterwarnings("ignore:forgiven")
def test_a_mark_of_the_test_reaches_the_ranks(two_ranks: Ranks) -> None:
    assert two_ranks.run(warnings.warn, "forgiven here") == [None, None]


def test_and_no_other_test(two_ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="forgiven there"):
        two_ranks.run(warnings.warn, "forgiven there")


def test_a_rank_that_hangs_says_where(two_ranks: Ranks) -> None:
    with pytest.raises(TimeoutError, match=r"(?s)only \[\] answered within 1 s; .*rank 1:.*in _serve"):
        two_ranks.run(time.sleep, 60, timeout_s=1)


def test_ranks_that_do_not_meet_are_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, fork, num_forks = Ranks(2), Ranks._fork, []

    def fork_and_lose_one(self: Ranks) -> None:
        fork(self)
        num_forks.append(1)
        if len(num_forks) == 1:
            self.kill(1)

    monkeypatch.setattr(Ranks, "_fork", fork_and_lose_one)
    try:
        assert ranks.run(int, "7") == [7, 7] and len(num_forks) == 2
    finally:
        ranks.stop()


@pytest.mark.xfail(raises=AssertionError, strict=True)
@on_ranks(2)
def test_what_one_rank_asserts_counts() -> None:
    assert dist.get_rank() == 0
