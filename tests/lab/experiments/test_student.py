"""Student's t against printed tables, and against the two cases that have a formula."""

import math

import pytest

from regtopk.lab.experiments.compare.student import student_t


@pytest.mark.parametrize(
    ("num_free", "t"),
    [
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (4, 2.776),
        (5, 2.571),
        (9, 2.262),
        (30, 2.042),
        (31, 2.040),
        (40, 2.021),
        (100, 1.984),
        (1000, 1.962),
    ],
)
def test_printed_tables(num_free: int, t: float) -> None:
    assert round(student_t(num_free), 3) == t


def test_one_and_two_degrees_of_freedom_have_a_formula() -> None:
    assert student_t(1) == pytest.approx(math.tan(0.95 * math.pi / 2), rel=1e-12)
    assert student_t(2) == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)), rel=1e-12)


def test_it_falls_towards_the_normal_distribution() -> None:
    values = [student_t(n) for n in range(1, 200)]
    assert values == sorted(values, reverse=True)
    assert student_t(20_000) == pytest.approx(1.959964, abs=2e-4)
