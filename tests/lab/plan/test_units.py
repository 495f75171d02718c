import re
from collections.abc import Callable
from functools import partial

import pytest

from regtopk.errors import ArgumentError
from regtopk.lab.plan import units

READ: dict[str, tuple[Callable[[str], float], str]] = {
    "bandwidth": (units.parse_bandwidth, "bandwidth must be a number above 0 "),
    "latency": (partial(units.parse_time, "latency", may_be_zero=True), "latency must be a time of at least"),
    "step time": (partial(units.parse_time, "step time"), "step time must be a time above 0 such as 50us"),
    "params": (partial(units.parse_count, "params"), "params must be a whole number from 1 to 1e+15, "),
}  # fmt: skip
NUMBERS = {
    ("bandwidth", 1e8): "100 Mbps|100mbit|100Mbit/s|100 Mb/s|100 MBit/s|100MBIT|12.5 MB/s|12.5MBps",
    ("bandwidth", 1.5e9): "1.5G|1.5 Gbit/s|1,500 Mbit/s",
    ("bandwidth", 9600): "9_600 bit/s|9.6k|9.6e3 bits/s",
    ("bandwidth", 8e9): "1 Gbyte/s",
    ("latency", 0.0): "0|0ms|0 s",
    ("step time", 0.01): "10ms",
    ("step time", 50e-6): "50us|50 µs",
    ("step time", 60.0): "1min",
    ("params", 124_000_000): "124M",
    ("params", 11_173_962): "11173962|11,173,962",
    ("params", 1_500_000_000): "1.5B",
}
NONSENSE = {
    "bandwidth": "fast||1000|1e9|-100 Mbps|0|nan|inf Gbps|100 MB|100 mb|10 ms|1 Gbit/h|1 Gbps 2|1,5G|1 MiB/s",
    "latency": "soon|0.2|100|0,5ms|-1ms|nan s|10 Mbps",
    "step time": "0|0ms|0 s",
    "params": "many|-3|0|1.5|nan|3x|1e30|1e400|１２",
}


@pytest.mark.parametrize(("name", "number"), NUMBERS)
def test_numbers_with_units(name: str, number: float) -> None:
    for text in NUMBERS[name, number].split("|"):
        assert READ[name][0](text) == pytest.approx(number), text


@pytest.mark.parametrize(("name", "text"), [(x, text) for x in READ for text in NONSENSE[x].split("|")])
def test_nonsense(name: str, text: str) -> None:
    parse, rule = READ[name]
    with pytest.raises(ArgumentError, match=f"{re.escape(rule)}.*, got {re.escape(repr(text))}"):
        parse(text)


def test_numbers_for_people() -> None:
    bandwidths = ["56 kbit/s", "100 Mbit/s", "2.5 Gbit/s", "1 Gbit/s"]
    assert [units.format_bandwidth(x) for x in (56e3, 1e8, 2.5e9, 9.996e8)] == bandwidths
    assert [units.format_size(x) for x in (12, 61_500, 44.7e6)] == ["12 B", "61.5 kB", "44.7 MB"]
    times = ["5.84 s", "12.3 ms", "45 µs", "20.6 min", "13.9 h", "69.4 days", "2,310 days"]
    assert [units.format_time(x) for x in (5.84, 0.0123, 45e-6, 1234.0, 5e4, 6e6, 2e8)] == times
    factors = ["0.844", "32.8", "999", "1,240"]
    assert [units.format_factor(x) for x in (0.8437, 32.81, 999.4, 1236.0)] == factors
