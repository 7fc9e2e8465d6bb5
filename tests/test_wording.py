"""Numbers in sentences."""

from __future__ import annotations

from hexiseq_triton.wording import counted, span


def test_one_is_singular() -> None:
    assert [counted(number, "host") for number in (0, 1, 2)] == ["0 hosts", "1 host", "2 hosts"]


def test_a_range_of_one_value_is_the_value() -> None:
    assert span(0.4781, 0.4783, ".1%") == "47.8%"
    assert span(0.03, 0.5, ".0%") == "3% to 50%"
