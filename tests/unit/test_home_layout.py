"""What the plan says of homes by first touch."""

from __future__ import annotations

import pytest

from holdfast_lab.placement.demand import _expected_reuse, expected_ladder
from holdfast_lab.placement.home_layout import MergeLoad, RowClass, classes_of, home_rows, merge_load
from holdfast_lab.placement.reuse import ReuseCurve

ROWS, ACCESSES, ROW_BYTES = 1_000_000, 20_000, 260


def load(exponent: float, *, alike: bool = False, steps_before: float | None = None) -> MergeLoad:
    ladder = expected_ladder(ROWS, exponent, ACCESSES)
    classes = classes_of(ladder)
    if alike:
        classes = [RowClass(num_rows=ROWS, unique_rows_per_batch=ladder[-1].unique_rows_per_batch)]
    curve = ReuseCurve(_expected_reuse(ROWS, exponent, ACCESSES), ROWS)
    return merge_load(classes, ROW_BYTES, curve, num_steps=20, later_steps=5, steps_before=steps_before)


def test_classes_have_all_rows_and_all_that_a_batch_wants() -> None:
    ladder = expected_ladder(ROWS, 1.05, ACCESSES)
    classes = classes_of(ladder)
    assert sum(of.num_rows for of in classes) == ROWS
    assert sum(of.unique_rows_per_batch for of in classes) == pytest.approx(ladder[-1].unique_rows_per_batch)


def test_where_hot_rows_lie_together_a_merge_moves_fewer_blocks() -> None:
    together, strewn = load(1.05), load(1.05, alike=True)
    assert together.rows == strewn.rows
    assert together.read_bytes + together.written_bytes < 0.9 * (strewn.read_bytes + strewn.written_bytes)


def test_where_all_rows_are_alike_order_is_of_no_account() -> None:
    by_class, as_one = load(0.0), load(0.0, alike=True)
    assert by_class.written_bytes == pytest.approx(as_one.written_bytes, rel=0.01)
    assert by_class.write_requests == pytest.approx(as_one.write_requests, rel=0.01)


def test_a_first_merge_appends_and_later_ones_come_to_write_what_is_there() -> None:
    first, middle, late = (load(1.05, steps_before=steps) for steps in (1, 50, 5000))
    whole = load(1.05)
    assert first.new_rows > 0.5 * first.rows > late.new_rows
    assert first.new_rows > middle.new_rows > late.new_rows
    assert first.write_requests < middle.write_requests < late.write_requests <= whole.write_requests
    assert whole.new_rows == 0


def test_home_has_the_rows_that_were_touched() -> None:
    curve = ReuseCurve(_expected_reuse(ROWS, 1.05, ACCESSES), ROWS)
    assert home_rows(curve, ROWS, None) == ROWS
    assert home_rows(curve, ROWS, 10) == curve.distinct(10) < ROWS
