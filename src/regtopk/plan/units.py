"""Numbers with units, as people write them."""

import math
import re

from regtopk.errors import ArgumentError

_NUMBER = re.compile(
    r"\s*([-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf))"
    r"\s*([^\d,.].*?|)\s*",
    re.I,
)
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_COUNTS = _DECIMAL | {"b": 1e9}
_PER_SECOND = {"s": 1.0, "sec": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "μs": 1e6, "ns": 1e9, "min": 1 / 60}
_SIZES = {
    **{f"{prefix}b": factor for prefix, factor in _DECIMAL.items()},
    **{f"{prefix}ib": 1024.0 ** (n + 1) for n, prefix in enumerate("kmgt")},
}
_TIMES = (("days", 86400.0, 172800.0), ("h", 3600.0, 7200.0), ("min", 60.0, 999.5), ("s", 1.0, 0.9995))


def parse_bandwidth(text: str) -> float:
    """Bits per second of "100 Mbps", "100mbit", "100 Mbit/s", "1.5G", "25e9" or, in bytes, "12.5 MB/s".

    Raises:
        ArgumentError: not a bandwidth above zero, or a "MB" that does not say per second, which could be
            anything.
    """
    rule = "a number above 0 with a unit such as 100Mbit/s, 1.5G (bits per second) or 12.5MB/s (bytes)"
    number, unit = _split(text)
    return _checked("bandwidth", number * _bits_per_s(unit), text, rule)


def _bits_per_s(unit: str) -> float:
    """Bits a unit stands for; NaN for no unit of bandwidth.

    An upper-case B after the prefix is a byte, as everywhere; "b" and "bit" are bits. "mb" and "MB" without
    "per second" are refused: half of those who write them mean bytes.
    """
    found = re.fullmatch(r"([kKmMgGtT]?)(i?)([bB][iI][tT][sS]?|b|B|[bB]ytes?)?(ps|/s|/sec)?", unit)
    if found is None:
        return math.nan
    prefix, binary, what, per_second = found.groups()
    is_byte = what == "B" or (what or "").lower().startswith("byte")
    if (what == "b" or is_byte) and per_second is None:
        return math.nan
    if binary and not (is_byte and prefix):
        return math.nan
    factor = _SIZES[f"{prefix.lower()}ib"] if binary else _DECIMAL[prefix.lower()]
    return factor * (8 if is_byte else 1)


def parse_time(name: str, text: str, *, may_be_zero: bool = False) -> float:
    """Seconds of "10ms", "50us", "0.2 s", or of a number without a unit: "0.2".

    Raises:
        ArgumentError: not a time, or below (or at) zero.
    """
    rule = f"a time {'of at least' if may_be_zero else 'above'} 0 such as 50us, 10ms or 0.2 (seconds)"
    number, unit = _split(text)
    per_second = _PER_SECOND.get(unit or "s", math.nan)  # dividing, 50us are 5e-5 to the bit
    return _checked(name, number / per_second, text, rule, may_be_zero=may_be_zero)


def parse_count(name: str, text: str) -> int:
    """The whole number that "124M", "11173962", "11,173,962" or "1.5B" stands for.

    Raises:
        ArgumentError: not a whole number of at least 1.
    """
    rule = "a whole number of at least 1, such as 11173962, 124M or 1.5B"
    number, unit = _split(text)
    count = _checked(name, number * _COUNTS.get(unit.lower(), math.nan), text, rule)
    if abs(count - round(count)) > 1e-6 * count or round(count) < 1:
        raise ArgumentError(f"{name} must be {rule}, got {text!r}")
    return round(count)


def parse_size(name: str, text: str) -> int:
    """Bytes of "16GB" or "16 GiB".

    Raises:
        ArgumentError: not a size above zero.
    """
    number, unit = _split(text)
    size = number * _SIZES.get(unit.lower(), math.nan)
    return int(_checked(name, size, text, "a size above 0 such as 16GB or 16GiB"))


def _split(text: str) -> tuple[float, str]:
    """The number and the unit; NaN for what is neither."""
    found = _NUMBER.fullmatch(text)
    return (float(found[1].replace(",", "").replace("_", "")), found[2]) if found else (math.nan, "")


def _checked(name: str, number: float, text: str, rule: str, *, may_be_zero: bool = False) -> float:
    if 0 < number < math.inf or (may_be_zero and number == 0):
        return number
    raise ArgumentError(f"{name} must be {rule}, got {text!r}")


def format_bandwidth(bits_per_s: float) -> str:
    """A bandwidth for people: 100 Mbit/s."""
    return f"{_scaled(bits_per_s)}bit/s"


def format_size(num_bytes: float) -> str:
    """A size for people: 1.2 MB."""
    return f"{_scaled(num_bytes)}B"


def format_time(seconds: float) -> str:
    """A time for people: 12.3 ms, 5.84 s, 20.6 min, 69.4 days."""
    for unit, factor, from_s in _TIMES:
        if seconds >= from_s:
            return f"{format_factor(seconds / factor)} {unit}"
    return f"{seconds / 1e-3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds / 1e-6:.3g} µs"


def format_factor(factor: float) -> str:
    """A number for people, with three digits that count: 0.84, 32.8, 1,240."""
    return f"{factor:.3g}" if factor < 999.5 else f"{float(f'{factor:.3g}'):,.0f}"


def _scaled(number: float) -> str:
    prefix, factor = max(
        ((prefix, factor) for prefix, factor in _DECIMAL.items() if number >= 0.9995 * factor),
        key=lambda pair: pair[1],
        default=("", 1.0),
    )
    shown = f"{number / factor:.3g}" if number / factor < 999.5 else f"{number / factor:,.0f}"
    return f"{shown} {prefix if prefix == 'k' else prefix.upper()}"
