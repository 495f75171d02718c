"""Messages round-trip to the bit, for every code, alone and as rows of a collective."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regtopk import wire
from regtopk.core.codes import (
    INDEX_CODES,
    VALUE_CODES,
    full_message_bytes,
    index_layout,
    message_bytes,
    quantise,
    segment_bytes,
)
from regtopk.core.sparse import SparseGradient, index_set
from regtopk.errors import ArgumentError, WireFormatError
from regtopk.wire.indices import max_unary_bits

dtypes = st.sampled_from([torch.float32, torch.float64])


@st.composite
def index_lists(draw: st.DrawFn, index_code: str, max_count: int = 400) -> tuple[list[int], int]:
    """Ascending distinct indices and the J they are below: scattered, all, or bunched at either end."""
    largest = 32 if index_code == "raw32" else 40
    numel = draw(st.one_of(st.integers(0, 600), st.integers(0, largest).map(lambda bits: 2**bits)))
    numel = max(0, min(2**largest, numel + draw(st.integers(-2, 2))))
    most = min(numel, max_count)
    k = draw(st.one_of(st.integers(0, most), st.sampled_from([0, most])))
    where = draw(st.sampled_from(["scattered", "first", "last", "bunched"]))
    generator = random.Random(draw(st.integers(0, 2**32)))
    if where == "scattered":
        return sorted(generator.sample(range(numel), k)), numel
    start = {"first": 0, "last": numel - k, "bunched": generator.randint(0, numel - k)}[where]
    return list(range(start, start + k)), numel


@st.composite
def sparse_gradients(draw: st.DrawFn, index_code: str | None = None) -> tuple[SparseGradient, str]:
    """A sparse gradient on the grid of its value code, and an index code that can hold it."""
    index_code = index_code or draw(st.sampled_from(INDEX_CODES))
    indices, numel = draw(index_lists(index_code))
    code, dtype = draw(st.sampled_from(VALUE_CODES)), draw(dtypes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(len(indices), generator=generator, dtype=dtype)
    values = values * 10.0 ** draw(st.sampled_from([-44, -3, 0, 30]))
    where = torch.tensor(indices, dtype=torch.int64)
    return SparseGradient(where, quantise(values, code), numel, code=code), index_code


def same(a: SparseGradient, b: SparseGradient) -> bool:
    values_are = torch.equal(a.values.to(b.values.dtype), b.values)
    return torch.equal(a.indices, b.indices) and values_are and (a.numel, a.code) == (b.numel, b.code)


@settings(deadline=None, max_examples=100)
@given(sparse_gradients())
def test_round_trip_and_size(case: tuple[SparseGradient, str]) -> None:
    sparse, index_code = case
    message = wire.encode(sparse, index_code)
    codes: Any = {"dtype": sparse.values.dtype, "value_code": sparse.code, "index_code": index_code}
    size = int(message_bytes(sparse.counts, sparse.numel, **codes, indices=sparse.indices))
    assert message.numel() == size
    if index_code != "rice":
        assert size == full_message_bytes(sparse.indices.numel(), sparse.numel, **codes)
    assert same(wire.decode(message, sparse.numel), sparse)


@settings(deadline=None, max_examples=100)
@given(sparse_gradients(), st.integers(0, 100), st.integers(0, 3), st.floats(0, 1))
def test_rows_of_different_counts(
    case: tuple[SparseGradient, str], room: int, num_zeros: int, share: float
) -> None:
    """A full row, a shorter one padded with zeros, and one that is not a message."""
    sparse, index_code = case
    numel, code, dtype = sparse.numel, sparse.code, sparse.values.dtype
    k = sparse.indices.numel()
    some = round(share * k)
    shorter = SparseGradient(sparse.indices[:some], quantise(sparse.values[:some], code), numel, code=code)
    messages = [wire.encode(s, index_code) for s in (sparse, shorter)]
    rows = torch.zeros(3, max(m.numel() for m in messages) + 4 * num_zeros, dtype=torch.uint8)
    for row, message in zip(rows, messages, strict=False):
        row[: message.numel()] = message
    padding = torch.full((k - some,), torch.nan, dtype=dtype)  # which is not sent
    values = torch.stack([sparse.values, torch.cat([shorter.values, padding])])
    padded = SparseGradient(sparse.indices.expand(2, k), values, numel, torch.tensor([k, some]), code)
    joined, sizes = wire.encode_rows(padded, index_code)
    assert torch.equal(joined, torch.cat(messages)) and sizes.tolist() == [m.numel() for m in messages]
    found, status = wire.decode_rows(rows, numel, k + room, index_code, code, dtype)
    assert status[:2].tolist() == [0, 0] and status[2] != 0
    assert found.counts.tolist() == [k, some, 0]
    assert found.values.dtype == dtype
    for row, sent in enumerate((sparse, shorter)):
        num = sent.indices.numel()
        alone = SparseGradient(found.indices[row, :num], found.values[row, :num], numel, code=found.code)
        assert same(alone, sent)
        assert not bool(found.indices[row, num:].any() or found.values[row, num:].any())


@pytest.mark.parametrize("index_code", ["elias-fano", "raw32"])
@pytest.mark.parametrize("numel", [700, 1_000_000])
def test_a_batch_is_its_rows(index_code: str, numel: int) -> None:
    """At J = 700, k = 200 the bitmap is the smaller code."""
    indices = torch.stack([torch.randperm(numel)[:200].sort().values for _ in range(6)]).view(2, 3, 200)
    values = quantise(torch.randn(2, 3, 200), "4bit")
    messages = wire.encode(SparseGradient(indices, values, numel, code="4bit"), index_code)
    assert messages.shape[:2] == (2, 3)
    single = wire.encode(SparseGradient(indices[1, 2], values[1, 2], numel, code="4bit"), index_code)
    assert torch.equal(messages[1, 2], single)
    found, status = wire.decode_rows(messages, numel, 200, index_code, "4bit")
    assert not bool(status.any())
    assert torch.equal(found.indices, indices) and torch.equal(found.values, values)


def test_the_frame_names_the_bitmap_where_it_is_smaller() -> None:
    indices = torch.arange(0, 1000, 2)
    message = wire.encode(SparseGradient(indices, torch.ones(500), 1000))
    assert message[5] == 2 and message.numel() == 32 + 2000 + 128
    assert wire.encode(SparseGradient(indices[:5], torch.ones(5), 1000))[5] == 1
    assert wire.encode(SparseGradient(indices, torch.ones(500), 1000), "raw32").numel() == 32 + 4000


@pytest.mark.parametrize("index_code", INDEX_CODES)
@pytest.mark.parametrize("indices", [[], [3], [0, 5, 70, 99], list(range(100))])
def test_index_sets_travel_without_values(index_code: str, indices: list[int]) -> None:
    sent = index_set(torch.tensor(indices, dtype=torch.int64), 100)
    message = wire.encode(sent, index_code)
    values = wire.encode_segment(torch.zeros(len(indices)))
    with_values = wire.encode(SparseGradient(sent.indices, torch.zeros(len(indices)), 100), index_code)
    assert message.numel() == with_values.numel() - values.numel() + 32
    assert torch.equal(wire.decode(message, 100).indices, sent.indices)
    found, status = wire.decode_rows(message[None], 100, len(indices), index_code, "none")
    assert torch.equal(found.indices[0], sent.indices) and not bool(status.any())


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 400), st.sampled_from(VALUE_CODES), dtypes, st.integers(0, 2**32))
def test_segments(size: int, code: str, dtype: torch.dtype, seed: int) -> None:
    values = torch.randn(2, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    values = quantise(values, code)
    messages = wire.encode_segment(values, code)
    assert messages.shape == (2, segment_bytes(size, dtype=dtype, value_code=code))
    found, status = wire.decode_segment(messages, size, code, dtype)
    assert found.dtype == dtype and torch.equal(found, values) and not bool(status.any())
    messages[1, 9] += 1
    found, status = wire.decode_segment(messages, size, code, dtype)
    assert torch.equal(found[0], values[0]) and not bool(found[1].any())
    with pytest.raises(WireFormatError, match=r"message of rank 1 is refused: numel .*; checksum"):
        wire.raise_for_status(status)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**40), st.integers(0, 3000), st.sampled_from(["elias-fano", "rice"]))
def test_unary_bits_stay_below_their_bound(numel: int, capacity: int, index_code: str) -> None:
    """Of all counts a row may have, not only the largest."""
    for J in (numel, numel % 10_000):
        counts = torch.arange(min(J, capacity) + 1)
        layout = index_layout(counts, J, index_code)
        assert int(layout.unary_bits.max()) <= max_unary_bits(capacity, J)


@pytest.mark.parametrize("index_code", INDEX_CODES)
@pytest.mark.parametrize(
    "indices", [[1, 1, 2], [2, 1, 3], [-1, 0, 1], [1, 2, 10], [0, 2**50, 3], [0, 1, 2**50], [9, 8, 7]]
)
def test_indices_that_do_not_ascend_within_j_are_refused(indices: list[int], index_code: str) -> None:
    message = wire.encode(SparseGradient(torch.tensor(indices), torch.ones(3), 10), index_code)
    with pytest.raises(WireFormatError, match="refused: the sender's indices must be below J, ascending"):
        wire.decode(message, 10)


@pytest.mark.parametrize("code", VALUE_CODES)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_not_finite_are_refused(value: float, code: str) -> None:
    values = torch.tensor([1.0, value, 2.0])
    coded = quantise(values, code)
    assert coded.isfinite().tolist() == [True, False, True] or code in ("int8", "4bit", "2bit")
    for sent in (values, coded):
        message = wire.encode(SparseGradient(torch.arange(3), sent, 10, code=code))
        with pytest.raises(WireFormatError, match=r"^message is refused: the sender's values must be finite"):
            wire.decode(message, 10)
        _, status = wire.decode_segment(wire.encode_segment(sent, code), 3, code)
        with pytest.raises(WireFormatError, match="rank 0 is refused: the sender's values must be finite"):
            wire.raise_for_status(status)


def three() -> SparseGradient:
    return SparseGradient(torch.tensor([7, 40, 99]), torch.tensor([1.0, -2.0, 0.5]), 100)


def test_status_names_what_is_wrong() -> None:
    """Not what was agreed: another J, too many entries, other codes, another dtype."""
    for arguments, reason in (
        ((101, 3, "elias-fano", "float32"), "numel must be the J expected"),
        ((100, 2, "elias-fano", "float32"), "count must be in"),
        ((100, 3, "rice", "float32"), "index and value codes must be those expected"),
        ((100, 3, "elias-fano", "4bit"), "index and value codes must be those expected"),
        ((100, 3, "elias-fano", "float32", torch.float64), "index and value codes must be those expected"),
    ):
        found, status = wire.decode_rows(wire.encode(three())[None], *arguments)
        assert found.counts.tolist() == [0]
        with pytest.raises(WireFormatError, match=f"message of rank 0 is refused: .*{reason}"):
            wire.raise_for_status(status)
    wire.raise_for_status(torch.zeros(3, dtype=torch.int64))


def test_messages_of_impossible_lengths_are_refused() -> None:
    message = wire.encode(three())
    for num_bytes in (0, 4, 31, 33, message.numel() - 1):
        with pytest.raises(WireFormatError, match=f"at least 32 bytes, got {num_bytes}"):
            wire.decode(message[:num_bytes], 100)
        with pytest.raises(WireFormatError, match=f"at least 32 bytes, got {num_bytes}"):
            wire.decode_rows(message[None, :num_bytes], 100, 3)
    longer = torch.cat([message, torch.zeros(4, dtype=torch.uint8)])
    with pytest.raises(WireFormatError, match="message must be 52 bytes long, got 56"):
        wire.decode(longer, 100)


def test_unknown_codes_in_a_message_are_refused() -> None:
    for place in (5, 6):
        message = wire.encode(three())
        message[place] = 99
        with pytest.raises(WireFormatError, match=r"codes of a message must be known, got .*99"):
            wire.decode(message, 100)


def test_a_code_that_cannot_hold_j_is_refused() -> None:
    message = wire.encode(three(), "raw32")
    with pytest.raises(WireFormatError, match=r"must hold indices below J: numel must be in 0\.\.4294967296"):
        wire.decode(message, 2**33)


@pytest.mark.parametrize("code", ["float32", "bfloat16", "float16", "4bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [0, 1, 6])
def test_values_may_be_strided_or_expanded(code: str, dtype: torch.dtype, k: int) -> None:
    one = torch.full((1,), 0.5, dtype=dtype)
    for values in (torch.ones(2 * k, dtype=dtype)[::2], one.expand(k), one[:0].expand(0) if k == 0 else one):
        indices = torch.arange(0, 2 * values.numel())[::2]
        sent = SparseGradient(indices, values, 100, code=code)
        plain = SparseGradient(indices.contiguous(), values.clone(), 100, code=code)
        assert torch.equal(wire.encode(sent), wire.encode(plain))
        assert torch.equal(wire.encode_segment(values, code), wire.encode_segment(plain.values, code))


def test_wrong_arguments_are_refused() -> None:
    sparse, message = three(), wire.encode(three())
    with pytest.raises(ArgumentError, match=r"messages must be uint8, got torch\.int64"):
        wire.decode(message.long(), 100)
    with pytest.raises(ArgumentError, match=r"message must have shape \(num_bytes,\)"):
        wire.decode(message[None], 100)
    with pytest.raises(WireFormatError, match="numel must be in"):
        wire.decode(message, 2**41)
    with pytest.raises(ArgumentError, match="numel must be in"):
        wire.encode(replace(sparse, numel=2**33), "raw32")
    with pytest.raises(ArgumentError, match="at most J = 2 entries, got 3"):
        wire.encode(replace(sparse, numel=2))
    batch = SparseGradient(sparse.indices[None], sparse.values[None], 100)
    with pytest.raises(ArgumentError, match="sparse must have no leading dimensions"):
        wire.encode(batch, "rice")
    with pytest.raises(ArgumentError, match="sparse must have no leading dimensions"):
        wire.encode(replace(batch, count=torch.tensor([2])))


def test_messages_may_lie_anywhere_in_memory() -> None:
    """Views that do not start at a word, and rows that are not contiguous."""
    message = wire.encode(three())
    buffer = torch.zeros(2, message.numel() + 3, dtype=torch.uint8)
    buffer[:, 1:-2] = message
    assert same(wire.decode(buffer[0, 1:-2], 100), three())
    found, status = wire.decode_rows(buffer[:, 1:-2], 100, 3)
    assert not bool(status.any()) and found.counts.tolist() == [3, 3]
