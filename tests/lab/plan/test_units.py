import pytest

from regtopk.errors import ArgumentError
from regtopk.lab.plan.units import (
    format_bandwidth,
    format_factor,
    format_size,
    format_time,
    parse_bandwidth,
    parse_count,
    parse_size,
    parse_time,
)


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [
        ("100 Mbps", 1e8),
        ("100mbit", 1e8),
        ("100Mbit/s", 1e8),
        ("100 Mb/s", 1e8),
        ("1.5G", 1.5e9),
        ("25 Gbit/s", 2.5e10),
        ("25 Gbps", 2.5e10),
        ("56k", 56e3),
        ("1e6 bit/s", 1e6),
        ("9_600 bit/s", 9600.0),
        ("1,000 bits/s", 1000.0),
        ("12.5 MB/s", 1e8),
        ("12.5MBps", 1e8),
        ("1 Gbyte/s", 8e9),
        ("100 MBit/s", 1e8),
        ("100MBIT", 1e8),
        ("1 MiB/s", 8 * 2**20),
    ],
)
def test_bandwidths(text: str, bits_per_s: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(bits_per_s)


NONSENSE = (
    "fast||1000|1e9|-100 Mbps|0|nan|inf Gbps|100 MB|100 mb|10 ms|1 Gbit/h|100 Mbps 2|1,5G|10,00 Mbps|1 Mib/s"
)


@pytest.mark.parametrize("text", NONSENSE.split("|"))
def test_nonsense_bandwidths(text: str) -> None:
    with pytest.raises(
        ArgumentError, match="bandwidth must be a number above 0 with a unit such as"
    ) as error:
        parse_bandwidth(text)
    assert str(error.value).endswith(f"got {text!r}")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10ms", 0.01), ("50us", 50e-6), ("50 µs", 50e-6), ("0.2s", 0.2), ("1min", 60.0)],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_time("latency", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["0", "0ms", "0 s"])
def test_no_latency(text: str) -> None:
    assert parse_time("latency", text, may_be_zero=True) == 0.0
    with pytest.raises(ArgumentError, match="step time must be a time above 0 such as 50us"):
        parse_time("step time", text)


@pytest.mark.parametrize("text", ["soon", "0.2", "100", "0,5ms", "-1ms", "nan s", "10 Mbps"])
def test_nonsense_times(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"latency must be a time of at least 0 such as .*got"):
        parse_time("latency", text, may_be_zero=True)


@pytest.mark.parametrize(
    ("text", "count"),
    [("124M", 124_000_000), ("11173962", 11_173_962), ("11,173,962", 11_173_962), ("1.5B", 1_500_000_000)],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count("params", text) == count


@pytest.mark.parametrize("text", ["many", "-3", "0", "1.5", "nan", "3x"])
def test_nonsense_counts(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"params must be a whole number of at least 1, .*got"):
        parse_count("params", text)


def test_sizes() -> None:
    assert parse_size("memory", "16GB") == 16_000_000_000
    assert parse_size("memory", "1.5 GiB") == 3 * 2**29
    with pytest.raises(ArgumentError, match="memory must be a size above 0 such as 16GB or 16GiB, got 'big'"):
        parse_size("memory", "big")


def test_numbers_for_people() -> None:
    assert [format_bandwidth(x) for x in (56e3, 1e8, 2.5e9, 9.996e8)] == [
        "56 kbit/s",
        "100 Mbit/s",
        "2.5 Gbit/s",
        "1 Gbit/s",
    ]
    assert [format_size(x) for x in (12, 61_500, 44.7e6)] == ["12 B", "61.5 kB", "44.7 MB"]
    assert [format_time(x) for x in (5.84, 0.0123, 45e-6, 1234.0, 5e4, 6e6, 2e8)] == [
        "5.84 s",
        "12.3 ms",
        "45 µs",
        "20.6 min",
        "13.9 h",
        "69.4 days",
        "2,310 days",
    ]
    assert [format_factor(x) for x in (0.8437, 32.81, 999.4, 1236.0)] == ["0.844", "32.8", "999", "1,240"]
