"""Useful work under failures: the closed form, its optimum and its limits, and events that agree with it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from holdfast_lab.sim.failures import (
    SECONDS_PER_DAY,
    Scheme,
    at_best,
    daly_interval_s,
    durable_batches,
    periodic_checkpoints,
    simulate_failures,
    sweep_failures,
    useful_s_per_day,
    young_interval_s,
)

HOUR_S = 3600.0
SCHEMES = [
    Scheme(name="long segments", useful_s=1800.0, overhead_s=120.0, recovery_s=300.0),
    Scheme(name="recovery as long as the time between failures", useful_s=60.0, overhead_s=5.0, recovery_s=4 * HOUR_S),
    durable_batches(batch_s=0.02, overhead_s=0.001, recovery_s=30.0),
]


@pytest.mark.dear
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_the_confidence_interval_of_events_covers_the_closed_form(scheme):
    expected = useful_s_per_day(scheme, 4 * HOUR_S)
    found = [simulate_failures(scheme, 4 * HOUR_S, days=100, seed=seed) for seed in range(20)]
    covering = sum(abs(each.useful_s_per_day - expected) < each.half_width_s for each in found)
    assert covering >= 17
    assert max(each.half_width_s for each in found) < 0.05 * expected


def test_failures_are_as_frequent_as_their_mean_time_says():
    assert simulate_failures(SCHEMES[2], HOUR_S, days=300).failures_per_day == pytest.approx(24, rel=0.02)


def test_the_same_seed_gives_the_same_bits():
    first, again, other = (simulate_failures(SCHEMES[0], HOUR_S, days=20, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_without_failures_only_the_overhead_is_lost():
    scheme = SCHEMES[0]
    expected = SECONDS_PER_DAY * 1800 / 1920
    assert useful_s_per_day(scheme, math.inf) == expected
    assert useful_s_per_day(scheme, 1e12) == pytest.approx(expected, rel=1e-6)


def test_of_rare_failures_each_loses_its_recovery_and_half_a_segment():
    scheme, mtbf_s = SCHEMES[0], 1e7
    lost = (scheme.recovery_s + scheme.segment_s / 2) / mtbf_s
    expected = SECONDS_PER_DAY * scheme.useful_s / scheme.segment_s * (1 - lost)
    assert useful_s_per_day(scheme, mtbf_s) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("mtbf_s", [HOUR_S, 24 * HOUR_S])
def test_dalys_interval_is_the_best_and_youngs_is_near(mtbf_s):
    checkpoint_s = 90.0

    def useful(interval_s):
        scheme = periodic_checkpoints(checkpoint_s=checkpoint_s, recovery_s=60.0, mtbf_s=mtbf_s, interval_s=interval_s)
        return useful_s_per_day(scheme, mtbf_s)

    daly_s = daly_interval_s(checkpoint_s, mtbf_s)
    best = max(useful(daly_s * 1.002**step) for step in range(-400, 401))
    assert useful(daly_s) == pytest.approx(best, rel=1e-5)
    assert useful(daly_s) > useful(young_interval_s(checkpoint_s, mtbf_s)) > 0.98 * best


def test_youngs_interval_grows_with_the_root_of_the_checkpoint_and_of_the_time_between_failures():
    assert young_interval_s(8.0, 100.0) == 40.0
    assert young_interval_s(4 * 8.0, 4 * 100.0) == 4 * 40.0


def test_a_checkpoint_longer_than_failures_allow_has_the_time_between_them_as_its_interval():
    assert daly_interval_s(300.0, 100.0) == 100.0


def test_every_batch_durable_loses_less_the_more_often_failures_come():
    every_batch = durable_batches(batch_s=0.02, overhead_s=0.001, recovery_s=60.0)
    rates = [1.0, 10.0, 100.0]
    ours = [useful_s_per_day(every_batch, SECONDS_PER_DAY / rate) for rate in rates]
    periodic = [
        useful_s_per_day(
            periodic_checkpoints(checkpoint_s=120.0, recovery_s=60.0, mtbf_s=SECONDS_PER_DAY / rate),
            SECONDS_PER_DAY / rate,
        )
        for rate in rates
    ]
    gains = [here - there for here, there in zip(ours, periodic, strict=True)]
    assert gains == sorted(gains)
    assert gains[-1] > gains[0]


def test_where_failures_are_rare_and_checkpoints_cheap_a_costly_batch_is_no_gain():
    every_batch = durable_batches(batch_s=0.02, overhead_s=0.001, recovery_s=60.0)
    periodic = periodic_checkpoints(checkpoint_s=10.0, recovery_s=60.0, mtbf_s=30 * SECONDS_PER_DAY)
    assert useful_s_per_day(every_batch, 30 * SECONDS_PER_DAY) < useful_s_per_day(periodic, 30 * SECONDS_PER_DAY)


def test_a_sweep_has_a_row_for_each_scheme_and_falls_with_the_rate():
    rows = sweep_failures(SCHEMES, [0.0, 1.0, 10.0])
    assert len(rows) == len(SCHEMES)
    assert all(row == sorted(row, reverse=True) for row in rows)
    assert rows[0][1] == useful_s_per_day(SCHEMES[0], SECONDS_PER_DAY)


def test_at_best_takes_the_interval_of_the_rate():
    adapted = at_best(SCHEMES[0], HOUR_S)
    assert adapted.useful_s == daly_interval_s(120.0, HOUR_S)
    assert useful_s_per_day(adapted, HOUR_S) > useful_s_per_day(SCHEMES[0], HOUR_S)


def test_a_segment_that_never_ends_gives_no_work():
    assert useful_s_per_day(SCHEMES[0], 1.0) == 0.0


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: replace(SCHEMES[0], useful_s=0.0), "useful_s = 0"),
        (lambda: replace(SCHEMES[0], recovery_s=-1.0), "recovery_s"),
        (lambda: useful_s_per_day(SCHEMES[0], 0.0), "mtbf_s = 0"),
        (lambda: simulate_failures(SCHEMES[0], HOUR_S, days=1, runs=3), "runs = 3"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make, named):
    with pytest.raises(ValueError, match=named):
        make()
