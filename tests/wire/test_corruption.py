"""A damaged message is refused: it never crashes, hangs, allocates what it claims or gives a gradient."""

import random
import struct

import pytest
import torch
from torch import Tensor

from regtopk import wire
from regtopk.core.codes import INDEX_CODES, VALUE_CODES, quantise
from regtopk.core.sparse import SparseGradient
from regtopk.errors import WireFormatError
from tests.wire.slow_decoder import seal


def make(numel: int, k: int, index_code: str, value_code: str, seed: int = 0) -> Tensor:
    generator = random.Random(seed)
    indices = torch.tensor(sorted(generator.sample(range(numel), k)), dtype=torch.int64)
    values = quantise(torch.tensor([generator.gauss(0, 1) for _ in range(k)]), value_code)
    return wire.encode(SparseGradient(indices, values, numel, code=value_code), index_code)


@pytest.fixture(scope="module")
def cases() -> list[tuple[int, bytes]]:
    """J and a message, for every pair of codes."""
    return [
        (numel, bytes(make(numel, k, index_code, value_code).tolist()))
        for numel, k in ((3000, 9), (100, 60), (2**31, 20), (50, 0))
        for index_code in INDEX_CODES
        for value_code in VALUE_CODES
    ]


def flip(message: Tensor, *bits: Tensor) -> Tensor:
    """One row for each of the given bits, flipped."""
    rows = message.repeat(bits[0].numel(), 1)
    for bit in bits:
        at = (bit // 8).unsqueeze(-1)
        mask = (1 << bit % 8).unsqueeze(-1).to(torch.uint8)
        rows.scatter_(-1, at, rows.gather(-1, at) ^ mask)
    return rows


@pytest.mark.parametrize("index_code", INDEX_CODES)
@pytest.mark.parametrize("value_code", VALUE_CODES)
@pytest.mark.parametrize(("numel", "k"), [(3000, 9), (100, 60)])
def test_every_single_bit_counts(index_code: str, value_code: str, numel: int, k: int) -> None:
    """The second size is sent as a bitmap."""
    message = make(numel, k, index_code, value_code)
    rows = flip(message, torch.arange(8 * message.numel()))
    found, status = wire.decode_rows(rows, numel, k, index_code, value_code)
    assert bool((status != 0).all())
    assert not bool(found.counts.any())


def test_every_two_bits_count() -> None:
    message = make(100, 1, "elias-fano", "float32")
    first, second = torch.combinations(torch.arange(8 * message.numel())).unbind(-1)
    _, status = wire.decode_rows(flip(message, first, second), 100, 1)
    assert bool((status != 0).all())


def damaged(message: bytes, generator: random.Random) -> bytes:
    kind = generator.choice(["bits", "bytes", "truncated", "extended", "swapped", "noise"])
    words = [message[i : i + 4] for i in range(0, len(message), 4)]
    if kind == "truncated":
        return message[: generator.randrange(len(message))]
    if kind == "extended":
        return message + generator.randbytes(generator.choice([1, 4, 8, 400]))
    if kind == "noise":
        return generator.randbytes(generator.choice([0, 32, 36, len(message)]))
    if kind == "swapped":
        i, j = generator.sample(range(len(words)), 2)
        words[i], words[j] = words[j], words[i]
        return b"".join(words)
    changed = bytearray(message)
    for _ in range(generator.choice([1, 2, 3, 50])):
        at = generator.randrange(len(changed))
        changed[at] = (
            changed[at] ^ 1 << generator.randrange(8) if kind == "bits" else generator.randrange(256)
        )
    return bytes(changed)


def test_a_thousand_damaged_messages_are_refused(cases: list[tuple[int, bytes]]) -> None:
    generator = random.Random(1)
    num_refused = 0
    while num_refused < 1_000:
        numel, message = generator.choice(cases)
        changed = damaged(message, generator)
        if changed == message:
            continue
        with pytest.raises(WireFormatError):
            wire.decode(torch.tensor(list(changed), dtype=torch.uint8), numel)
        num_refused += 1


def test_forged_messages_are_refused_or_sound(cases: list[tuple[int, bytes]]) -> None:
    """With a checksum that fits, the other checks are all there is: what passes must be a sparse gradient."""
    generator = random.Random(2)
    num_passed = 0
    for _ in range(600):
        numel, sent = generator.choice(cases)
        message = bytearray(sent)
        for _ in range(generator.choice([1, 3])):
            message[generator.randrange(len(message))] ^= 1 << generator.randrange(8)
        forged = torch.tensor(list(seal(bytes(message))), dtype=torch.uint8)
        try:
            found = wire.decode(forged, numel)
        except WireFormatError:
            continue
        num_passed += 1
        assert bool((found.indices.diff() > 0).all())
        assert bool(((found.indices >= 0) & (found.indices < numel)).all())
        assert bool(torch.isfinite(found.values).all())
    assert num_passed > 20  # the test would be empty if nothing passed


@pytest.mark.parametrize(
    ("value_code", "word", "value"),
    [
        ("float32", 9, "inf"),
        ("float32", 9, "nan"),
        ("int8", 8, "-1"),
        ("4bit", 8, "5"),
        ("2bit", 9, "inf"),
        ("sign", 8, "inf"),
        ("sign", 9, "-1"),
    ],
)
def test_forged_values_and_scales_are_refused(value_code: str, word: int, value: str) -> None:
    """Not finite, negative, or lo above hi."""
    message = bytes(make(3000, 9, "elias-fano", value_code).tolist())
    forged = message[: 4 * word] + struct.pack("<f", float(value)) + message[4 * word + 4 :]
    with pytest.raises(WireFormatError, match="refused: values and scales must be finite"):
        wire.decode(torch.tensor(list(seal(forged)), dtype=torch.uint8), 3000)


def test_a_message_cannot_make_the_reader_allocate() -> None:
    """2^40 entries are claimed, by a frame that is otherwise in order: room for them would be 8 TiB."""
    numel = 2**40
    for index_id in (1, 2, 3):
        claim = struct.pack("<4s4B3Q", b"RTKG", 1, index_id, 7, 0, numel, numel, 0) + bytes(400)
        message = torch.tensor(list(seal(claim)), dtype=torch.uint8)
        with pytest.raises(WireFormatError, match="length must be"):
            wire.decode(message, numel)
