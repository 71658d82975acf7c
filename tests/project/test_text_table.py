"""Numbers and times as text."""

from __future__ import annotations

import math

import pytest

from nbtoolkit.text_table import duration, metric_column, number, param


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.360209, "0.3602"),
        (12.0, "12"),
        (12345.6, "12346"),
        (9999.9, "10000"),
        (1.5e7, "1.5e7"),
        (-3.21e-5, "-3.21e-5"),
        (0.0, "0"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (None, ""),
    ],
)
def test_a_number_has_four_significant_digits(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.014233, "0.0142"),
        (9e-5, "9e-5"),
        (1234.5, "1234"),
        (65536, "65536"),
        (True, "true"),
        (None, "null"),
        ("gelu", "gelu"),
    ],
)
def test_a_parameter_has_three_digits_unless_it_is_whole(value: object, text: str) -> None:
    assert param(value) == text


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.360209, 0.41, None, 0.9], ["0.3602", "0.4100", "", "0.9000"]),
        ([98.214, 97.4, -3.0], ["98.21", "97.40", "-3.00"]),
        ([1234.5, 1.0, 3.0], ["1234.500", "1.000", "3.000"]),
        ([12345.6, 23456.7], ["12346", "23457"]),
        ([0.36, 0.5, 1e5, 3e9], ["0.3600", "0.5000", "100000", "3e9"]),
        ([2e6, 3.5e6], ["2.000e6", "3.500e6"]),
        ([2e-5, 3.5e-6, 0.0], ["2.000e-5", "3.500e-6", "0"]),
        ([0.5, math.nan, math.inf], ["0.5000", "nan", "inf"]),
        ([1e-7, 2e-7, math.nan], ["1.000e-7", "2.000e-7", "nan"]),
        ([0.0, None], ["0.000", ""]),
        ([5e-324, 1e308], ["4.941e-324", "1.000e308"]),
        ([], []),
    ],
)
def test_a_column_has_equal_decimals(values: list[float | None], texts: list[str]) -> None:
    assert metric_column(values) == texts


def test_times_are_short() -> None:
    seconds = (0, 0.44, 9.94, 9.96, 25, 59.6, 161, 3599.7, 3900, 90_000)
    texts = "0.0 s,0.4 s,9.9 s,10 s,25 s,1:00,2:41,1 h 00 min,1 h 05 min,25 h 00 min"
    assert [duration(one) for one in seconds] == texts.split(",")
