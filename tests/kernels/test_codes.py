"""Compiled code that writes and reads messages agrees with the tensor operations, on damage too."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regtopk import kernels
from regtopk.core.codes import VALUE_CODES, quantise
from regtopk.core.sparse import SparseGradient
from regtopk.errors import WireFormatError
from regtopk.wire import decode, decode_rows, encode, encode_rows

pytest.importorskip("numba")
# J, k: narrow fields, wide ones, a bitmap, all entries, and indices beyond 2^32
SIZES = [(25_000, 600), (1 << 30, 700), (10_000, 7_500), (5_000, 5_000), (1 << 34, 600)]


def sparse_of(numel: int, k: int, seed: int = 0, code: str = "float32") -> SparseGradient:
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, numel // max(k, 1) + 1, (k,), generator=generator)
    values = quantise(torch.randn(k, generator=generator), code)
    return SparseGradient(steps.cumsum(0) - 1, values, numel, code=code)


def messages_of(numel: int, k: int, code: str = "float32", index_code: str = "elias-fano") -> Tensor:
    """Three of them, followed by zeros if they are not equally long."""
    messages = [encode(sparse_of(numel, k, seed, code), index_code) for seed in range(3)]
    return pad_sequence(messages, batch_first=True)


@pytest.fixture(params=["cpu", "cuda"])
def num_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Messages are read by numba's loop, or by Triton's programs in their interpreter, which is slow."""
    if request.param == "cpu":
        return 30
    use_programs(monkeypatch)
    return 5


def use_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = import_module("regtopk.kernels.cuda.codes")

    def message_programs(_: Tensor, index_code: str) -> Any:
        return codes if index_code == "elias-fano" and kernels.describe("cpu").kernel == "cpu" else None

    monkeypatch.setattr(kernels, "message_programs", message_programs)
    if not torch.cuda.is_available():
        monkeypatch.setattr(codes, "_BITS", 1 << 13)  # fewer programs
        monkeypatch.setattr(codes, "_BLOCK", 1 << 11)


def check_both(
    messages: Tensor,
    numel: int,
    k: int,
    monkeypatch: pytest.MonkeyPatch,
    code: str = "float32",
    index_code: str = "elias-fano",
) -> Tensor:
    found, status = decode_rows(messages, numel, k, index_code, code)
    with monkeypatch.context() as patch:
        patch.setenv("REGTOPK_KERNELS", "reference")
        expected, expected_status = decode_rows(messages, numel, k, index_code, code)
    assert torch.equal(status, expected_status)
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.counts, expected.counts)
    return status


@pytest.mark.parametrize("index_code", ["elias-fano", "rice"])
@pytest.mark.parametrize(("numel", "k"), SIZES)
@pytest.mark.usefixtures("num_trials")
def test_sound_messages(numel: int, k: int, index_code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = messages_of(numel, k, index_code=index_code)
    assert not check_both(messages, numel, k, monkeypatch, index_code=index_code).any()


@pytest.mark.parametrize("code", VALUE_CODES)
@pytest.mark.parametrize(("numel", "k"), [(100_000, 700), (900, 700), (100, 0)])
def test_programs_write_and_read_the_same_bytes(
    numel: int, k: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = messages_of(numel, k, code)
    use_programs(monkeypatch)
    assert torch.equal(messages_of(numel, k, code), expected)
    assert not check_both(expected, numel, k, monkeypatch, code).any()


@pytest.mark.parametrize("bad", ["order", "end", "nan", "both"])
def test_programs_mark_what_nobody_can_use(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = sparse_of(10_000, 500)
    if bad in ("order", "both"):
        sparse.indices[[7, 8]] = sparse.indices[[8, 7]]
    if bad == "end":
        sparse.indices[-1] = 10_000
    if bad in ("nan", "both"):
        sparse.values[9] = torch.nan
    expected = encode(sparse)
    use_programs(monkeypatch)
    message = encode(sparse)
    if bad in ("end", "nan"):  # two indices out of order may share a bit, so their bytes mean nothing
        assert torch.equal(message, expected)
    assert check_both(torch.stack([message, expected]), 10_000, 500, monkeypatch).all()


@pytest.mark.parametrize("index_code", ["elias-fano", "rice"])
@pytest.mark.parametrize(("numel", "k"), [size for size in SIZES if size[0] != size[1]])
def test_damaged_messages(
    numel: int, k: int, index_code: str, num_trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = messages_of(numel, k, index_code=index_code)
    generator = torch.Generator().manual_seed(1)
    for trial in range(num_trials):
        messages = whole.clone()
        num_bytes = messages.shape[1]
        first = 0 if trial % 2 else 32 + 4 * k  # anywhere, or where the indices are
        where = torch.randint(first, num_bytes, (1 + trial,), generator=generator)
        messages[1, where] ^= torch.randint(1, 256, (1 + trial,), generator=generator).to(torch.uint8)
        if trial % 5 == 4:
            messages[2, num_bytes // 2 :] = 0
        status = check_both(messages, numel, k, monkeypatch, index_code=index_code)
        assert status[0] == 0 and status[1] != 0


def test_programs_write_many_messages_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [sparse_of(5_000, 333, seed) for seed in range(3)]
    parts[1].values[5] = torch.inf
    indices, values = (torch.stack([getattr(part, name) for part in parts]) for name in ("indices", "values"))
    batch = SparseGradient(indices, values, 5_000)
    expected = encode(batch)
    use_programs(monkeypatch)
    assert torch.equal(encode(batch), expected)


@pytest.mark.parametrize("index_code", ["elias-fano", "rice", "raw32"])
@pytest.mark.parametrize(("numel", "k"), [(1 << 30, 5_000), (20_000, 15_000), (5_000, 5_000)])
def test_the_loop_that_packs_indices_agrees_with_torch(
    numel: int, k: int, index_code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [sparse_of(numel, k - 7 * seed, seed) for seed in range(3)]
    padded = SparseGradient(
        pad_sequence([row.indices for row in rows], batch_first=True, padding_value=numel),
        pad_sequence([row.values for row in rows], batch_first=True),
        numel,
        torch.tensor([k, k - 7, k - 14]),
    )
    by_loop = [encode_rows(padded, index_code)[0], *(encode(row, index_code) for row in rows)]
    monkeypatch.setattr(kernels, "index_loops", lambda _: None)
    by_torch = [encode_rows(padded, index_code)[0], *(encode(row, index_code) for row in rows)]
    assert all(map(torch.equal, by_loop, by_torch))


def test_the_loop_that_packs_indices_writes_nothing_outside() -> None:
    """Indices that break the contract are marked in the frame, and the loop stays in its memory."""
    indices = torch.randint(-(1 << 40), 1 << 40, (5_000,), generator=torch.Generator().manual_seed(0))
    for index_code in "elias-fano", "rice", "raw32":
        message = encode(SparseGradient(indices, torch.ones(5_000), 1 << 20), index_code)
        with pytest.raises(WireFormatError, match="ascend"):
            decode(message, 1 << 20)
