"""docs/wire-format.md read again, in plain Python: one entry after the other, no tensors, no shared code."""

import struct
from fractions import Fraction
from itertools import accumulate

INDEX_CODES = {1: "elias-fano", 2: "bitmap", 3: "rice", 4: "raw32"}
VALUE_BITS = {1: 32, 2: 64, 3: 16, 4: 16, 5: 8, 6: 4, 7: 2, 8: 1}
NUM_SCALES = {5: 1, 6: 2, 7: 2, 8: 2}


def checksum(message: bytes) -> int:
    words: tuple[int, ...] = struct.unpack(f"<{len(message) // 4}i", message)
    return sum((2 * i + 3) * x for i, x in enumerate(words) if i not in (6, 7)) % 2**64


def seal(message: bytes) -> bytes:
    """The message with the checksum that belongs to it."""
    return message[:24] + struct.pack("<Q", checksum(message)) + message[32:]


class Bits:
    """Sections of bits, read in turn."""

    def __init__(self, message: bytes) -> None:
        self.number, self.bit = int.from_bytes(message, "little"), 0

    def take(self, width: int) -> int:
        taken = self.number >> self.bit & (1 << width) - 1
        self.bit += width
        return taken

    def end_section(self) -> None:
        self.bit += -self.bit % 32


def decode(message: bytes, numel: int) -> tuple[list[int], list[float]]:
    magic, version, index_id, value_id, zero, found_numel, k, total = struct.unpack("<4s4B3Q", message[:32])
    assert (magic, version, zero, found_numel) == (b"RTKG", 1, 0, numel)
    assert total == checksum(message)
    bits = Bits(message)
    bits.bit = 256
    values = read_values(bits, k, value_id)
    indices = list(range(k)) if index_id == 0 else read_indices(bits, k, numel, INDEX_CODES[index_id])
    assert bits.bit == 8 * len(message)
    return indices, values


def read_values(bits: Bits, k: int, value_id: int) -> list[float]:
    num_blocks = -(-k // 128)
    scales = [[_single(bits.take(32)) for _ in range(NUM_SCALES.get(value_id, 0))] for _ in range(num_blocks)]
    symbols = [bits.take(VALUE_BITS[value_id]) for _ in range(k)]
    bits.end_section()
    return [_value(symbol, scales[i // 128], value_id) for i, symbol in enumerate(symbols)]


def _value(symbol: int, scales: list[float], value_id: int) -> float:
    if value_id == 1:
        return _single(symbol)
    if value_id == 2:
        return float(struct.unpack("<d", struct.pack("<Q", symbol))[0])
    if value_id == 3:
        return _single(symbol << 16)
    if value_id == 4:
        return float(struct.unpack("<e", struct.pack("<H", symbol))[0])
    if value_id == 8:
        minus, plus = scales
        return -minus if symbol else plus
    num_levels = 1 << VALUE_BITS[value_id] - 1
    sign, level = (-1 if symbol >= num_levels else 1), symbol % num_levels
    if value_id == 5:
        return sign * round_to_single(Fraction(scales[0]) * Fraction(round_to_single(Fraction(level, 127))))
    lo, hi = scales
    if value_id == 7:
        return sign * (hi if level else lo)
    step = level * (level + 1) // 2
    return sign * round_to_single(Fraction((lo * (28 - step) + hi * step) / 28))


def read_indices(bits: Bits, k: int, numel: int, code: str) -> list[int]:
    width = _width(k, numel, code)
    fields = [bits.take(width) for _ in range(k)]
    bits.end_section()
    if code == "raw32":
        return fields
    positions: list[int] = []
    num_read = 0
    size = {"elias-fano": k + ((numel - 1) >> width) if k else 0, "bitmap": numel}.get(code)
    while len(positions) < k if size is None else num_read < size:
        if bits.take(1):
            positions.append(num_read)
        num_read += 1
    bits.end_section()
    assert len(positions) == k
    if code == "bitmap":
        return positions
    if code == "elias-fano":
        return [
            ((p - i) << width) + field for i, (p, field) in enumerate(zip(positions, fields, strict=True))
        ]
    ends = accumulate(fields)
    return [((p - i) << width) + end + i for i, (p, end) in enumerate(zip(positions, ends, strict=True))]


def _width(k: int, numel: int, code: str) -> int:
    if code == "raw32":
        return 32
    if code == "bitmap" or k == 0:
        return 0
    spread = numel - k if code == "rice" else numel
    width = 0
    while 2 ** (width + 1) * k <= spread and width < 32:
        width += 1
    return width


def _single(word: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", word))[0])


def round_to_single(exact: Fraction) -> float:
    """The float32 nearest to a non-negative rational, ties to even."""
    if exact == 0:
        return 0.0
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()  # or one too many
    exponent -= exact < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return float(round(exact / unit) * unit)
