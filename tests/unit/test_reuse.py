"""How soon rows come again: what is counted is what trying it out gives."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_lab.placement.reuse import (
    ReuseCounter,
    ReuseCurve,
    ReuseRung,
    characteristic_time,
    expected_reuse,
    gap_grid,
)

NUM_ROWS = 4000


@pytest.fixture(scope="module")
def batches() -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    popularity = 1.0 / np.arange(1, NUM_ROWS + 1)
    popularity /= popularity.sum()
    return [np.unique(generator.choice(NUM_ROWS, 300, p=popularity)) for _ in range(160)]


def counted(batches: list[np.ndarray], words: int = NUM_ROWS) -> ReuseCurve:
    counter = ReuseCounter(NUM_ROWS, len(batches), words)
    for batch in batches:
        counter.add(batch)
    return ReuseCurve(counter.rungs(), NUM_ROWS)


def misses_of_lru(batches: list[np.ndarray], room: int) -> float:
    """Per batch, of the second half, of a cache that forgets what was unused for longest."""
    last: dict[int, None] = {}
    missed = 0
    for number, batch in enumerate(batches):
        for row in batch.tolist():
            if row not in last:
                missed += number >= len(batches) // 2
            last.pop(row, None)
            last[row] = None
        while len(last) > room:
            del last[next(iter(last))]
    return missed / (len(batches) - len(batches) // 2)


def test_the_rungs_are_what_their_definition_counts(batches):
    few = batches[:12]
    counter = ReuseCounter(NUM_ROWS, len(few), NUM_ROWS)
    for batch in few:
        counter.add(batch)
    rungs = counter.rungs()
    assert [rung.batches for rung in rungs] == [0, 1, 2, 3, 4, 5, 6]
    for rung in rungs:
        t = rung.batches
        new = [np.setdiff1d(few[k], np.concatenate([*few[k - t : k], few[k][:0]])).size for k in range(t, len(few))]
        assert rung.touches == pytest.approx(np.mean(new))


@pytest.mark.parametrize("num_batches", [1, 2, 7, 30, 80, 120])
def test_different_rows_of_a_stretch_of_batches(batches, num_batches):
    curve = counted(batches)
    starts = range(0, len(batches) - num_batches + 1, 10)
    seen = np.mean([np.unique(np.concatenate(batches[k : k + num_batches])).size for k in starts])
    assert curve.distinct(num_batches) == pytest.approx(seen, rel=0.04)


@pytest.mark.parametrize("room", [400, 1000, 2000])
def test_the_misses_of_a_cache_are_those_of_its_characteristic_time(batches, room):
    curve = counted(batches)
    predicted = curve.touches(characteristic_time([curve], room))
    assert predicted == pytest.approx(misses_of_lru(batches, room), rel=0.1)


def test_a_sample_of_the_rows_gives_nearly_the_same(batches):
    whole, sampled = counted(batches), counted(batches, NUM_ROWS // 4)
    for t in (1, 5, 20, 60):
        assert sampled.touches(t) == pytest.approx(whole.touches(t), rel=0.15)
        assert sampled.distinct(t) == pytest.approx(whole.distinct(t), rel=0.15)


def test_rows_that_are_alike_are_known_beyond_what_was_counted():
    touched = np.full(1, 0.02)
    exact = ReuseCurve(expected_reuse(np.array([1000]), touched), 1000)
    short = ReuseCurve(expected_reuse(np.array([1000]), touched, most_batches=8), 1000)
    for n in (1, 5, 50, 400):
        assert exact.distinct(n) == pytest.approx(1000 * (1 - 0.98**n), rel=0.02)
        assert short.distinct(n) == pytest.approx(exact.distinct(n), rel=0.02)
    assert short.distinct(1e9) == pytest.approx(1000)
    assert short.touches(1e9) == pytest.approx(0.0)


def test_a_cache_with_room_for_all_rows_misses_none():
    curve = ReuseCurve(expected_reuse(np.array([100]), np.array([0.5])), 100)
    assert math.isinf(characteristic_time([curve, curve], 200))
    assert characteristic_time([curve], 50) == pytest.approx(1.0, abs=1e-6)


@settings(max_examples=60)
@given(
    touches=st.lists(st.floats(0.0, 50.0), min_size=1, max_size=12),
    num_rows=st.integers(1, 500),
    asked=st.lists(st.floats(0.0, 5000.0), min_size=2, max_size=6),
)
def test_more_batches_never_have_fewer_rows_nor_more_than_there_are(touches, num_rows, asked):
    rungs = [ReuseRung(batches=int(t), touches=value) for t, value in zip(gap_grid(1000), touches, strict=False)]
    curve = ReuseCurve(rungs, num_rows)
    found = [curve.distinct(n) for n in sorted(asked)]
    assert all(below <= above + 1e-6 for below, above in pairwise(found))
    assert all(0.0 <= count <= num_rows for count in found)


@pytest.mark.parametrize(
    ("rungs", "named"),
    [
        ([], "first rung"),
        ([ReuseRung(batches=1, touches=3.0)], "first rung"),
        ([ReuseRung(batches=0, touches=3.0), ReuseRung(batches=0, touches=2.0)], "does not come after"),
    ],
)
def test_rungs_that_are_none_are_refused(rungs, named):
    with pytest.raises(ValueError, match=named):
        ReuseCurve(rungs, 10)


@pytest.mark.parametrize(("field", "value"), [("batches", -1), ("touches", -0.5), ("touches", math.nan)])
def test_a_rung_names_the_field_that_is_wrong(field, value):
    with pytest.raises(ValueError, match=f"{field} = "):
        ReuseRung(**({"batches": 0, "touches": 1.0} | {field: value}))
