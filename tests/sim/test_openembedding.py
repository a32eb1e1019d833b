"""OpenEmbedding's statements beside the simulator's: the committed report is what it says, and its arithmetic holds."""

from __future__ import annotations

import pytest

import report_page
from openembedding.__main__ import REPORT, Statement, report_of, share_of_hottest, statements


@pytest.fixture(scope="module")
def found() -> list[Statement]:
    return statements()


def test_the_committed_report_is_what_the_simulator_says(found: list[Statement]) -> None:
    assert report_page.read(REPORT) == report_page.part_of(REPORT, report_of(found)), (
        "cd benchmarks && python -m openembedding"
    )


def test_a_recovery_row_by_row_takes_the_two_latencies_of_table_1(found: list[Statement]) -> None:
    seconds = next(each for each in found if each.what == "recovery from PMem")
    assert seconds.simulated == pytest.approx(500e9 / 512 * (305e-9 + 81e-9), rel=2e-3)
    assert abs(seconds.error) < 0.05


@pytest.mark.parametrize("exponent", [0.9, 1.0, 1.2])
def test_the_share_of_the_hottest_rows_is_the_sum_of_zipfs_law(exponent: float) -> None:
    masses = [rank**-exponent for rank in range(1, 100_001)]
    assert share_of_hottest(100_000, 0.05, exponent) == pytest.approx(sum(masses[:5000]) / sum(masses), rel=1e-6)


def test_what_is_within_a_stated_span_is_not_off() -> None:
    within, beyond = (Statement("", 0.05, 0.09, simulated, "%") for simulated in (0.07, 0.18))
    assert within.error == 0.0
    assert beyond.error == pytest.approx(1.0)
