"""Ranks that are killed and come back, and a long run: small versions of what benchmarks/ measures."""

import random
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import failures
from benchmarks.soak import Gradients, Updates, soak
from tests.distributed.ranks import on_ranks


@pytest.mark.usefixtures("capfd")  # killed ranks do not print into the report
@pytest.mark.parametrize("part", ["kills", "kills-delay", "kills-returned"])
def test_a_killed_rank_comes_back_with_the_same_bits(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "STEPS", 12)
    monkeypatch.setattr(failures, "SAVE_EVERY", 4)
    found = failures.PARTS[part][0](1, random.Random(1), tmp_path)
    assert (found["ended"], found["same_bits"]) == (1, 1)
    (run,) = found["runs"]
    assert run["num_starts"] == 2 and 0 <= run["killed_at"] - run["went_on_from"] <= 4


@pytest.mark.usefixtures("capfd")
def test_ranks_killed_while_they_write_find_a_whole_state(tmp_path: Path) -> None:
    found = failures.writing(2, random.Random(0), tmp_path)
    assert found["has_ended"] and found["do_ranks_start_alike"] and found["is_never_back"]
    assert len(found["starts"]) == 3


@pytest.mark.parametrize("way", [Gradients, Updates])
@on_ranks(2)
def test_a_long_run_stays_as_it_was(way: type[Gradients | Updates], tmp_path: Path) -> None:
    """The first run compiles kernels, which may open files that stay."""
    soak(20, 10, tmp_path / "first", way)
    seen = soak(80, 10, tmp_path / "second", way)
    first, last = seen["looks"][1], seen["looks"][-1]  # with six checkpoints between them
    assert last["threads"] <= first["threads"]  # one of the first run may have ended in between
    assert last["files"] <= first["files"] + 2  # a file and its folder may be open to be written
    assert seen["are_parameters_equal"] and seen["law_error"] <= seen["law_bound"] < 1e-4
    dist.barrier()
    assert seen["checkpoints"] == ["step-0000000070", "step-0000000080"]
