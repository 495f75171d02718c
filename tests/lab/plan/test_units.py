import re

import pytest

from regtopk.errors import ArgumentError
from regtopk.lab.plan.units import (
    format_bandwidth,
    format_factor,
    format_size,
    format_time,
    parse_bandwidth,
    parse_count,
    parse_time,
)

BANDWIDTHS = {
    1e8: ["100 Mbps", "100mbit", "100Mbit/s", "100 Mb/s", "100 MBit/s", "100MBIT", "12.5 MB/s", "12.5MBps"],
    1.5e9: ["1.5G", "1.5 Gbit/s", "1,500 Mbit/s"],
    9600: ["9_600 bit/s", "9.6k", "9.6e3 bits/s"],
    8e9: ["1 Gbyte/s"],
}


@pytest.mark.parametrize(
    ("text", "bits_per_s"), [(text, bits) for bits, texts in BANDWIDTHS.items() for text in texts]
)
def test_bandwidths(text: str, bits_per_s: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(bits_per_s)


NONSENSE = (
    "fast||1000|1e9|-100 Mbps|0|nan|inf Gbps|100 MB|100 mb|10 ms|1 Gbit/h|100 Mbps 2|1,5G|10,00 Mbps|1 MiB/s"
)


@pytest.mark.parametrize("text", NONSENSE.split("|"))
def test_nonsense_bandwidths(text: str) -> None:
    with pytest.raises(
        ArgumentError, match=f"bandwidth must be a number above 0 .*got {re.escape(repr(text))}"
    ):
        parse_bandwidth(text)


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


def test_numbers_for_people() -> None:
    bandwidths = ["56 kbit/s", "100 Mbit/s", "2.5 Gbit/s", "1 Gbit/s"]
    assert [format_bandwidth(x) for x in (56e3, 1e8, 2.5e9, 9.996e8)] == bandwidths
    assert [format_size(x) for x in (12, 61_500, 44.7e6)] == ["12 B", "61.5 kB", "44.7 MB"]
    times = ["5.84 s", "12.3 ms", "45 µs", "20.6 min", "13.9 h", "69.4 days", "2,310 days"]
    assert [format_time(x) for x in (5.84, 0.0123, 45e-6, 1234.0, 5e4, 6e6, 2e8)] == times
    assert [format_factor(x) for x in (0.8437, 32.81, 999.4, 1236.0)] == ["0.844", "32.8", "999", "1,240"]
