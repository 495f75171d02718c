"""Compiled code that reads indices agrees with the tensor operations: on sound messages and on damage."""

from importlib import import_module

import pytest
import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.sparse import SparseGradient
from regtopk.kernels.dispatch import unpacks
from regtopk.wire import decode_rows, encode

pytest.importorskip("numba")
# J, k: narrow fields, wide ones, a bitmap, all entries, and indices beyond 2^32
SIZES = [(100_000, 2_500), (1 << 30, 3_000), (40_000, 30_000), (20_000, 20_000), (1 << 34, 2_500)]


def messages_of(numel: int, k: int) -> Tensor:
    """Three of them."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(3):
        steps = torch.randint(1, numel // k + 1, (k,), generator=generator)
        indices = steps.cumsum(0) - 1
        found.append(encode(SparseGradient(indices, torch.randn(k, generator=generator), numel)))
    return torch.stack(found)


def decoded(
    messages: Tensor, numel: int, k: int, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> tuple[SparseGradient, Tensor]:
    monkeypatch.setenv("REGTOPK_KERNELS", kernels)
    assert unpacks(messages.view(torch.int32)) == (kernels == "auto")
    return decode_rows(messages, numel, k)


@pytest.fixture(params=["cpu", "cuda"])
def num_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Messages are read by numba's loop, or by Triton's programs in their interpreter, which is slow."""
    if request.param == "cpu":
        return 30
    codes = import_module("regtopk.kernels.cuda_codes")
    monkeypatch.setattr(kernels, "unpack_elias_fano", codes.unpack_elias_fano)
    if not torch.cuda.is_available():
        monkeypatch.setattr(codes, "_BITS", 1 << 15)  # fewer programs
    return 5


def check_both(messages: Tensor, numel: int, k: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    found, status = decoded(messages, numel, k, monkeypatch, "auto")
    expected, expected_status = decoded(messages, numel, k, monkeypatch, "reference")
    assert torch.equal(status, expected_status)
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.counts, expected.counts)
    return status


@pytest.mark.parametrize(("numel", "k"), SIZES)
@pytest.mark.usefixtures("num_trials")
def test_sound_messages(numel: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not check_both(messages_of(numel, k), numel, k, monkeypatch).any()


@pytest.mark.parametrize(("numel", "k"), SIZES)
def test_damaged_messages(numel: int, k: int, num_trials: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = messages_of(numel, k)
    generator = torch.Generator().manual_seed(1)
    for trial in range(num_trials):
        messages = whole.clone()
        num_bytes = messages.shape[1]
        first = 0 if trial % 2 else 32 + 4 * k  # anywhere, or where the indices are
        where = torch.randint(first, num_bytes, (1 + trial,), generator=generator)
        messages[1, where] ^= torch.randint(1, 256, (1 + trial,), generator=generator).to(torch.uint8)
        if trial % 5 == 4:
            messages[2, num_bytes // 2 :] = 0
        status = check_both(messages, numel, k, monkeypatch)
        assert status[0] == 0 and status[1] != 0
