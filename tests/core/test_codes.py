"""Value codes: what quantise promises, for any finite values."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regtopk.algorithms import TopK
from regtopk.core.blocks import BLOCK
from regtopk.core.codes import (
    INDEX_CODES,
    VALUE_CODES,
    check_index_code,
    full_message_bytes,
    index_layout,
    longest_message_bytes,
    message_bytes,
    quantise,
    segment_bytes,
)
from regtopk.errors import ArgumentError

BLOCK_CODES = ("int8", "4bit", "2bit", "sign")
FLOATS = {torch.float32: (torch.int32, 32), torch.float64: (torch.int64, 64)}

codes = st.sampled_from(VALUE_CODES)


@st.composite
def vectors(draw: st.DrawFn, max_size: int = 300) -> Tensor:
    """Finite vectors of every kind: spread over all exponents, or close together, with zeros and extremes."""
    dtype = draw(st.sampled_from(list(FLOATS)))
    largest = torch.finfo(dtype).max
    exponent = draw(st.integers(-150, 127) if dtype == torch.float32 else st.integers(-1060, 1023))
    spread = draw(st.sampled_from([0.0, 1e-7, 1.0, 20.0, 300.0]))
    size = draw(st.one_of(st.integers(0, 5), st.integers(0, max_size)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    power = exponent + spread * torch.rand(size, generator=generator, dtype=torch.float64)
    sign = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
    vector = (sign * torch.exp2(power)).clamp(-largest, largest).to(dtype)
    width = FLOATS[dtype][1]
    some = draw(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=width), max_size=4))  # type: ignore[arg-type]
    some = (some + [0.0] * draw(st.integers(0, 2)))[:size]
    vector[torch.randperm(size, generator=generator)[: len(some)]] = torch.tensor(some, dtype=dtype)
    return vector


def same_bits(a: Tensor, b: Tensor) -> bool:
    as_integers = FLOATS[a.dtype][0]
    return a.dtype == b.dtype and torch.equal(a.view(as_integers), b.view(as_integers))


@settings(deadline=None, max_examples=100)
@given(vectors(), codes)
def test_quantise_is_idempotent_odd_finite_and_keeps_zeros(x: Tensor, code: str) -> None:
    q = quantise(x, code)
    assert q.shape == x.shape
    assert bool(torch.isfinite(q).all())
    assert same_bits(quantise(q, code), q)
    assert same_bits(quantise(-x, code), -q)
    assert code == "sign" or not bool(q[x == 0].any())
    if code == "float32":
        assert q is x


@settings(deadline=None, max_examples=100)
@given(vectors(), vectors(), codes, st.integers(0, 300))
def test_padding_and_batch_do_not_touch_the_values(x: Tensor, garbage: Tensor, code: str, more: int) -> None:
    alone = quantise(x, code)
    count = torch.tensor([x.numel(), 0])
    padding = garbage.to(x.dtype).nan_to_num()[:more]
    rows = torch.stack([torch.cat([x, padding]), torch.cat([padding, x])])
    coded = quantise(rows, code, count)
    assert same_bits(coded[0, : x.numel()], alone)
    if code in BLOCK_CODES:
        assert not bool(coded[0, x.numel() :].any() or coded[1].any())
    assert same_bits(quantise(rows[0], code, count[0])[: x.numel()], alone)


@settings(deadline=None, max_examples=100)
@given(vectors(), st.sampled_from(BLOCK_CODES))
def test_the_loss_is_a_contraction(x: Tensor, code: str) -> None:
    """||x - Q(x)||^2 <= (1 - 1/128) ||x||^2 in every block, but for the rounding of its float32 scales."""
    x = x.double().clamp(-1e38, 1e38)
    x = x.where(x.abs() > 1e-30, 0)  # below, float32 itself has no digits left
    lost = (x - quantise(x, code)).square()
    for block, kept in zip(lost.split(BLOCK), x.square().split(BLOCK), strict=True):
        assert float(block.sum()) <= (1 - 1 / BLOCK) * (1 + 1e-6) * float(kept.sum())


@pytest.mark.parametrize("tail", ["one peak", "many halves", "two sizes"])
def test_the_contraction_bound_holds_at_its_edge(tail: str) -> None:
    """Blocks that make each code lose as much as it can, exact zeros included."""
    x = torch.full((BLOCK,), 0.49)
    x[0] = 1.0
    if tail == "one peak":
        x[1:] = 0.0
    if tail == "many halves":
        x[-1] = 0.0
    for code in BLOCK_CODES:
        lost = float((x - quantise(x, code)).square().sum())
        assert lost <= (1 - 1 / BLOCK) * float(x.square().sum())


def survivors(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1_000_000, generator=generator)
    if kind == "heavy":  # Student's t with 3 degrees of freedom
        x /= (torch.randn(3, 1_000_000, generator=generator).square().mean(0)).sqrt()
    return x[x.abs().topk(5000).indices.sort().values]


@pytest.mark.parametrize(
    ("code", "gauss", "heavy"),
    [
        ("bfloat16", 0.002, 0.002), ("float16", 3e-4, 3e-4), ("int8", 0.004, 0.02), ("4bit", 0.02, 0.09),
        ("2bit", 0.06, 0.31),
    ],
)  # fmt: skip
def test_relative_error_on_what_top_k_sends(code: str, gauss: float, heavy: float) -> None:
    for kind, bound in (("gauss", gauss), ("heavy", heavy)):
        x = survivors(kind)
        assert float((x - quantise(x, code)).norm() / x.norm()) < bound


@pytest.mark.parametrize(
    ("code", "values", "coded"),
    [
        # lo + (hi - lo) i (i + 1) / 56, on both sides, nearest
        ("4bit", [1.0, 29.0, -1.9, 3.1, 7.5, -23.0], [1.0, 29.0, -2.0, 4.0, 7.0, -22.0]),
        ("2bit", [1.0, -1.5, 8.0, -9.0], [1.25, -1.25, 8.5, -8.5]),  # the means of small and large
        ("sign", [1.0, -1.5, 8.0, -9.0], [4.5, -5.25, 4.5, -5.25]),  # the means of either side
    ],
)
def test_codes_by_hand(code: str, values: list[float], coded: list[float]) -> None:
    assert quantise(torch.tensor(values), code).tolist() == coded


def test_signs_of_one_size_are_exact() -> None:
    same = torch.tensor(0.1) * torch.tensor([1, -1, -1] * 100)
    assert torch.equal(quantise(same, "sign"), same)


def test_saturation() -> None:
    x = torch.tensor([1e300, -1e300, 1e5, 3.4e38], dtype=torch.float64)
    assert quantise(x, "float16").tolist() == [65504.0, -65504.0, 65504.0, 65504.0]
    assert quantise(x, "bfloat16").abs().max().item() == torch.finfo(torch.bfloat16).max
    assert quantise(x, "4bit")[0].item() == torch.finfo(torch.float32).max


def test_unknown_codes_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"got '8bit' \(did you mean 'int8'\?\)$"):  # '4bit' is nearer
        TopK(k=1, value_code="8bit")
    with pytest.raises(ArgumentError, match=r"index_code must be one of elias-fano, .* got 'bitmap'"):
        check_index_code("bitmap")
    for numel, largest, code in ((2**32 + 1, 2**32, "raw32"), (2**40 + 1, 2**40, "rice")):
        with pytest.raises(ArgumentError, match=rf"numel must be in 0\.\.{largest} .*'{code}', got {numel}"):
            index_layout(torch.tensor(1), numel, code)


def test_sizes_meet_the_budget_of_resnet18_at_a_thousandth() -> None:
    numel, k = 11_173_962, 11_173
    sizes = ((torch.float32, "float32"), (torch.float32, "4bit"), (torch.float64, "float32"))
    plain, coded, wide = (
        int(message_bytes(torch.tensor(k), numel, dtype=dtype, value_code=code)) for dtype, code in sizes
    )
    assert plain <= (12.1 + 32) * k / 8 + 64
    assert 8 * coded / k <= 16.6
    assert wide == plain + 4 * k


def test_segments_need_no_indices() -> None:
    assert segment_bytes(1000, dtype=torch.float32, value_code="float32") == 32 + 4000
    assert segment_bytes(1000, dtype=torch.float32, value_code="2bit") == 32 + 64 + 252
    assert segment_bytes(1000, dtype=torch.float32, value_code="sign") == 32 + 64 + 128
    assert segment_bytes(0, dtype=torch.float32, value_code="4bit") == 32


@pytest.mark.parametrize("index_code", INDEX_CODES)
@pytest.mark.parametrize("value_code", VALUE_CODES)
@pytest.mark.parametrize("numel", [1, 2, 33, 1000])
def test_no_message_is_longer_than_the_longest(numel: int, value_code: str, index_code: str) -> None:
    for k in {1, max(1, numel // 100), numel}:
        for start in {0, numel - k}:  # the last entries: the largest gap
            codes = {"dtype": torch.float64, "value_code": value_code, "index_code": index_code}
            entries: Any = {**codes, "indices": torch.arange(start, start + k)}
            size = message_bytes(torch.tensor(k), numel, **entries)
            assert int(size) <= longest_message_bytes(numel)


@pytest.mark.parametrize("count", [1, 100, 2_400, 3_000, 7_000, 10_000])
def test_rice_of_entries_spread_at_random_is_as_long_as_expected(count: int) -> None:
    draw, numel = torch.Generator().manual_seed(count), 10_000
    indices = torch.stack([torch.randperm(numel, generator=draw)[:count].sort().values for _ in range(20)])
    codes: Any = {"dtype": torch.float32, "value_code": "sign", "index_code": "rice"}
    sizes = message_bytes(torch.full((20,), count), numel, indices=indices, **codes)
    assert full_message_bytes(count, numel, **codes) == pytest.approx(sizes.double().mean().item(), rel=0.01)
