"""What calls on CUDA plan, also for rows that no memory here would hold: sizes alone are looked at."""

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from regtopk.kernels import Damped
from regtopk.kernels.cuda import rows as cuda_rows
from regtopk.kernels.cuda import selection as cuda
from regtopk.kernels.cuda.plan import SelectionPlan, plan_for
from regtopk.kernels.cuda.programs.guess import offset_of_sample

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_SAMPLES = 1 << 15
GIVEN_OR_K_LONG = {"residual", "grad", "damped", "listed", "scores", "saved", "indices", "values"}


@pytest.mark.parametrize("item_bytes", [4, 8])
@pytest.mark.parametrize("numel", [2**19, 2**22 + 1, 124_000_000, 2**31, 2**35])
@pytest.mark.parametrize("density", [1e-5, 1e-3, 0.004, 0.01])
def test_candidates_take_a_sixteenth_of_a_byte_an_entry(item_bytes: int, numel: int, density: float) -> None:
    plan = plan_for(numel, round(density * numel), 1 << 11, item_bytes)
    assert plan.capacity * item_bytes <= numel / 16
    needs_a_wide_one = density > 0.04 / item_bytes  # as docs/kernels.md says
    assert plan.is_wide == (needs_a_wide_one and numel > 2**19)  # below, its sample is larger than that
    assert (plan == SelectionPlan()) == (needs_a_wide_one and not plan.is_wide)


@pytest.mark.parametrize("density", [0.02, 0.05, 0.1, 0.2, 0.4, 0.9])
def test_wide_plans(density: float) -> None:
    """They hold up to a density of an eighth, and the k-th largest is between guess and limit."""
    numel = 10_000_000
    plan = plan_for(numel, round(density * numel), 1 << 11, 4)
    assert plan.is_wide == (density < 1 / 8)
    if plan.is_wide:
        low, high = (
            (1 - (1 - n / plan.num_keys) ** (1 / plan.per_key)) for n in (plan.rank_of_limit, plan.rank)
        )
        assert low < density < high and (high - low) * numel < plan.capacity <= numel / 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [2**16, 2**19, 124_000_000, 2**31 - 1, 2**31])
@pytest.mark.parametrize("density", [1e-3, 0.004, 0.01, 0.1])
def test_no_temporary_is_larger_than_promised(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, numel: int, density: float
) -> None:
    temporaries: dict[str, int] = {}

    def note_sizes(_program: Any, _grid: Any, arguments: dict[str, Any], *_options: Any) -> None:
        for name, value in arguments.items():
            if isinstance(value, Tensor) and name not in GIVEN_OR_K_LONG:
                temporaries[name] = max(value.nbytes, temporaries.get(name, 0))

    monkeypatch.setattr(cuda_rows, "launch", note_sizes)
    residual, k = torch.empty(numel, dtype=dtype, device="meta"), round(density * numel)
    damped = Damped(torch.empty(k, dtype=torch.int64, device="meta"), residual[:k])
    cuda.take_largest_(residual, residual, k, damped)
    assert {"work", "keys", "offsets", "slots", "tile_counts", "stops", "taken"} <= set(temporaries)
    for name, num_bytes in temporaries.items():
        assert num_bytes <= max(math.ceil(numel / 2048) * 128, 1 << 15), name


def test_samples_lie_all_over_rows_of_any_size() -> None:
    for numel in (4, 5_003, 124_000_000, 2**31, 2**33, 2**33 + 12_345, 2**36, 2**37 - 1):
        num_groups = numel // 4
        offsets = torch.empty(NUM_SAMPLES, dtype=torch.int64, device=DEVICE)
        _store_offsets[(1,)](offsets, num_groups, NUM_SAMPLES)
        group, place = (offsets // 4).cpu(), (offsets % 4).cpu()
        assert torch.equal(place, torch.arange(NUM_SAMPLES) % 4)
        assert bool(((group >= 0) & (group < num_groups)).all())
        if num_groups > 10 * NUM_SAMPLES:
            gaps = group[place == 0].sort().values.diff() / num_groups * (NUM_SAMPLES // 4)
            assert bool(((gaps > 0.5) & (gaps < 1.5)).all())  # of the mean


@triton.jit  # type: ignore[untyped-decorator]
def _store_offsets(out, num_groups, NUM: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, NUM)
    tl.store(out + i, offset_of_sample(i, num_groups))
