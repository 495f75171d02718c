"""Numbers with units: read as people write them, and written as people read them."""

import math
import re

from regtopk.errors import ArgumentError

_NUMBER = re.compile(
    r"\s*((?:(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?)\s*([^\d,.].*?|)\s*", re.I | re.A
)
_BANDWIDTH_UNIT = re.compile(r"([kmgt]?)(bits?|b|bytes?)?(ps|/s|/sec)?", re.I)
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_MOST = 1e15  # entries, above which nothing that is predicted makes sense
_COUNTS = _PREFIXES | {"b": 1e9}
_PER_SECOND = {"s": 1.0, "sec": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "μs": 1e6, "ns": 1e9, "min": 1 / 60}
_TIMES = (("days", 86400.0, 172800.0), ("h", 3600.0, 7200.0), ("min", 60.0, 999.5), ("s", 1.0, 0.9995))


def parse_bandwidth(text: str) -> float:
    """Bits per second of "100 Mbps", "100mbit", "1.5G" or, in bytes, "12.5 MB/s"; "12.5 MB" is refused."""
    number, unit = _split(text)
    found = _BANDWIDTH_UNIT.fullmatch(unit)
    prefix, what, per_second = found.groups() if found else ("", "b", None)
    is_byte = what == "B" or (what or "").lower().startswith("byte")
    is_unclear = per_second is None and what is not None and not what.lower().startswith("bit")
    bits = math.nan if not unit or is_unclear else _PREFIXES[prefix.lower()] * (8 if is_byte else 1)
    rule = "a number above 0 with a unit such as 100Mbit/s, 1.5G (bits per second) or 12.5MB/s (bytes)"
    return _checked("bandwidth", number * bits, text, rule)


def parse_time(name: str, text: str, *, may_be_zero: bool = False) -> float:
    """Seconds of "10ms", "50us" or "0.2 s"; a number without a unit is refused, but for 0."""
    number, unit = _split(text)
    if may_be_zero and number == 0 and unit in ("", *_PER_SECOND):
        return 0.0
    rule = f"a time {'of at least' if may_be_zero else 'above'} 0 such as 50us, 10ms or 0.2s, with its unit"
    return _checked(name, number / _PER_SECOND.get(unit, math.nan), text, rule)  # 50us are 5e-5 to the bit


def parse_count(name: str, text: str) -> int:
    """The whole number that "124M", "11173962", "11,173,962" or "1.5B" stands for."""
    number, unit = _split(text)
    count = number * _COUNTS.get(unit.lower(), math.nan)
    is_whole = abs(count - round(count)) <= 1e-6 * count if math.isfinite(count) else False
    rule = f"a whole number from 1 to {_MOST:g}, such as 11173962, 124M or 1.5B"
    return round(_checked(name, count if is_whole and count <= _MOST else math.nan, text, rule))


def _split(text: str) -> tuple[float, str]:
    """The number and the unit; NaN for what is neither."""
    found = _NUMBER.fullmatch(text)
    return (float(found[1].replace(",", "").replace("_", "")), found[2]) if found else (math.nan, "")


def _checked(name: str, number: float, text: str, rule: str) -> float:
    if 0 < number < math.inf:
        return number
    raise ArgumentError(f"{name} must be {rule}, got {text!r}")


def format_bandwidth(bits_per_s: float) -> str:
    """Such as 100 Mbit/s."""
    return f"{_with_prefix(bits_per_s)}bit/s"


def format_size(num_bytes: float) -> str:
    """Such as 1.2 MB."""
    return f"{_with_prefix(num_bytes)}B"


def format_time(seconds: float) -> str:
    """Such as 12.3 ms, 5.84 s, 20.6 min or 69.4 days."""
    for unit, factor, from_s in _TIMES:
        if seconds >= from_s:
            return f"{format_factor(seconds / factor)} {unit}"
    return f"{seconds / 1e-3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds / 1e-6:.3g} µs"


def format_factor(factor: float) -> str:
    """Three digits: 0.84, 32.8, 1,240."""
    return f"{factor:.3g}" if factor < 999.5 else f"{float(f'{factor:.3g}'):,.0f}"


def _with_prefix(number: float) -> str:
    fitting = [prefix for prefix, factor in _PREFIXES.items() if number >= 0.9995 * factor]
    prefix = fitting[-1] if fitting else ""
    return f"{format_factor(number / _PREFIXES[prefix])} {prefix if prefix == 'k' else prefix.upper()}"
