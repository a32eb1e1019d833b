"""Held-out figures of NVIDIA's: simulated with what was declared before they were compared, reported as they are."""

from __future__ import annotations

import pytest

import report_page
from nvidia_dlrm.__main__ import REPORT, bars, declared, digest, read_rows, read_rows_with_terms, report_of


@pytest.fixture(scope="module")
def rows():
    return read_rows()


def test_what_rows_are_simulated_with_is_what_was_frozen_before_the_comparison():
    assert digest() == declared()["digest"]


def test_the_committed_report_is_what_the_simulator_says(rows):
    assert report_page.read(REPORT) == report_page.part_of(REPORT, report_of(rows, read_rows_with_terms())), (
        "cd benchmarks && python -m nvidia_dlrm"
    )


def test_unseen_gpus_are_within_the_bars_that_are_met(rows):
    median, _, eight, _ = bars(rows)
    assert median.found <= median.bar
    assert eight.found <= eight.bar


def test_terms_that_were_added_after_the_comparison_change_no_frozen_row(rows):
    frozen = {(row.machine, row.precision): row for row in rows}
    with_terms = read_rows_with_terms()
    assert {row.machine for row in with_terms} == {"v100", "hybrid"}
    for row in with_terms:
        was = frozen[row.machine, row.precision]
        assert was.simulated < row.simulated < row.published
