"""Programs that draw, and that code values in 4, 2 and 1 bits, agree with the tensor operations."""

from importlib import import_module
from typing import Any

import pytest
import torch

from regtopk.core import precision
from regtopk.core.codes import HEADER_WORDS, VALUE_BITS, quantise
from regtopk.core.random import _NUM_ROUNDS, mix, random_sequence, signed
from regtopk.kernels.cuda import random as cuda_random
from regtopk.wire.values import pack_values, unpack_values
from tests.kernels.checks import rows_to_code

CODES = ("4bit", "2bit", "sign")
SIZE = 700


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The programs, in Triton's interpreter where there is no GPU."""
    module = import_module("regtopk.kernels.cuda.blocks")
    monkeypatch.setattr(module, "_BLOCKS", 4)
    return module


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("has_counts", [False, True])
def test_bits(programs: Any, code: str, dtype: torch.dtype, has_counts: bool) -> None:
    values, bits = rows_to_code(dtype), VALUE_BITS[code]
    count = torch.tensor([SIZE, 129, 128, 1, 5, 0, 512]) if has_counts else None
    sent = quantise(values, code, count)
    found = programs.quantise(values, bits, count)
    assert torch.equal(found, sent) and torch.equal(found.signbit(), sent.signbit())
    words = pack_values(sent, code, count)
    assert torch.equal(programs.pack(sent, bits, count), words)
    if count is None:  # else the caller leaves words out
        count = torch.full((len(values),), SIZE)
        message = torch.nn.functional.pad(words, (HEADER_WORDS, 3))
        received, are_sound = programs.unpack(message, count, SIZE, bits, dtype)
        assert torch.equal(received, sent) and bool(are_sound.all())


@pytest.mark.parametrize("code", CODES)
def test_messages_of_any_words(programs: Any, code: str) -> None:
    """Other counts, scales that cannot be, and words that are missing."""
    generator = torch.Generator().manual_seed(6)
    words = torch.randint(-(2**31), 2**31, (40, 60), generator=generator).int()
    words[:20, HEADER_WORDS:20] &= 0x3FFFFFFF  # scales that can be, but for their order
    count = torch.randint(0, 300, (40,), generator=generator)
    expected, expected_sound = unpack_values(words, count, 300, code, torch.float32)
    found, are_sound = programs.unpack(words, count, 300, VALUE_BITS[code], torch.float32)
    assert torch.equal(are_sound, expected_sound) and 0 < int(are_sound.sum()) < 40
    is_whole = count <= 128  # of others words are missing
    is_used = are_sound & is_whole
    assert torch.equal(found[is_used], expected[is_used])


@pytest.mark.parametrize("code", CODES)
def test_what_is_not_finite_stays(programs: Any, code: str) -> None:
    values = torch.randn(3, 200)
    values[0, 7], values[1, 150], values[2, 0] = torch.nan, torch.inf, -torch.inf
    found = programs.quantise(values, VALUE_BITS[code], None)
    is_finite = torch.isfinite(values)
    assert torch.equal(found[~is_finite].nan_to_num(), values[~is_finite].nan_to_num())
    others = is_finite.clone()
    others[0, :128] = others[1, 128:] = others[2, :128] = False  # a bad value's block is refused
    assert torch.equal(found[others], quantise(values, code)[others])


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("numel", "k", "seed", "step"),
    [(1, 1, 0, 0), (5, 5, 7, 9), (300, 300, 0, 0), (300, 300, -3, 123_456_789), (2**40 + 1, 100, 7, 9)],
)
def test_the_same_entries_in_the_same_order(numel: int, k: int, seed: int, step: int) -> None:
    bits = max(1, (numel - 1).bit_length())
    drawn = cuda_random.draw(numel, k, bits, signed(mix(seed, step)), _NUM_ROUNDS, DEVICE)
    assert drawn.tolist() == random_sequence(numel, k, seed, step).tolist()


@pytest.mark.parametrize(
    ("shape", "index"), [((1,), 0), ((4099,), 3), ((2, 1, 1026), [[5]]), ((3, 1023), [[0], [1], [2]])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_rounding(shape: tuple[int, ...], index: int | list[list[int]], dtype: torch.dtype) -> None:
    vector = torch.randn(shape, dtype=dtype) * torch.logspace(-30, 30, shape[-1], dtype=dtype)
    workers = torch.tensor(index)
    for step in (0, 1, 123_456_789):  # states of both signs
        expected = precision.round_at_random(vector, workers, step)
        state = signed(mix(precision._SEED, step))
        rounded = cuda_random.round_at_random(vector.to(DEVICE), workers.to(DEVICE), state)
        assert rounded.dtype == torch.bfloat16 and torch.equal(rounded.cpu(), expected)
