"""The predicted step is what one computes by hand, and goes to the right limit where one thing dominates."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from holdfast.errors import ConfigError
from holdfast_lab.placement.host import Host
from holdfast_lab.placement.ladder import Rung
from holdfast_lab.placement.network_time import NetworkTime
from holdfast_lab.placement.program import Demand, TableDemand
from holdfast_lab.placement.reuse import ReuseCurve, expected_reuse
from holdfast_lab.placement.step_time import StepInputs, StepOptions, StepTime, predict_step
from holdfast_lab.placement.tiers import Tier

ROWS, UNIQUE = 1_000_000, 20_000.0
IN_PLACE = Host(
    store="in_place", step_us=500.0, row_ns=20.0, row_byte_ns=0.5, id_ns=2.0, id_byte_ns=0.01, dense_byte_ns=0.1,
    plan_id_ns=6.0, plan_row_ns=8.0, commit_step_us=20.0, commit_row_ns=1.0, commit_dense_byte_ns=0.2,
)  # fmt: skip
LOG_STORE = replace(
    IN_PLACE, store="log", collect_row_ns=30.0, fetch_row_ns=1000.0, merge_row_ns=250.0, merge_request_ns=1500.0,
    fetches_per_s=100_000.0, merge_requests_per_s=50_000.0,
)  # fmt: skip
NETWORK = NetworkTime(network_s=0.03, displaced=0.8, reading_s=0.001)
DISK = Tier(
    name="ssd",
    kind="block",
    capacity_bytes=10**12,
    read_bandwidth_bytes_per_s=2e9,
    write_bandwidth_bytes_per_s=1e9,
    read_latency_ns=80_000,
    access_granularity_bytes=512,
    random_reads_per_s=1e5,
    sync_latency_ns=30_000,
)
NEAR = Tier(
    name="cxl",
    kind="byte",
    capacity_bytes=10**9,
    read_bandwidth_bytes_per_s=20e9,
    write_bandwidth_bytes_per_s=10e9,
    read_latency_ns=400,
    access_granularity_bytes=64,
    random_reads_per_s=5e6,
)
OPTIONS = StepOptions(scratchpad_bytes=10_000_000, log_bytes=200_000_000)


def table(*, weight_bytes: int = 64, state_bytes: int = 4) -> TableDemand:
    ladder = (Rung(rows=ROWS, access_share=1.0, unique_rows_per_batch=UNIQUE),)
    return TableDemand(
        name="C1", weight_bytes=weight_bytes, state_bytes=state_bytes, accesses_per_batch=25_000.0, ladder=ladder
    )


def curve() -> ReuseCurve:
    """All rows alike."""
    return ReuseCurve(expected_reuse(np.array([ROWS]), np.array([UNIQUE / ROWS])), ROWS)


def predict(host: Host = LOG_STORE, **changes) -> StepTime:
    inputs = {
        "demand": Demand(tables=(table(),), dense_bytes=1_000_000),
        "curves": [curve()],
        "network": NETWORK,
        "medium": DISK,
        "options": OPTIONS,
    } | changes
    return predict_step(StepInputs(host=host, **inputs))


def test_a_step_in_place_is_what_one_computes_by_hand():
    step = predict(IN_PLACE)
    rows_ms = 0.5 + 1e-6 * (UNIQUE * (20 + 0.5 * 68) + 25_000 * (2 + 0.01 * 64) + 0.1 * 1e6)
    loader_ms = 1.0 + 1e-6 * (25_000 * 6 + UNIQUE * 8)
    commit_ms = 0.02 + 1e-6 * (UNIQUE * 1 + 0.2 * 1e6)
    logged = 1_000_000 + 128 + 64 + UNIQUE * 76
    assert step.network_ms == pytest.approx(30.0)
    assert step.rows_ms == pytest.approx(rows_ms)
    assert step.loader_ms == pytest.approx(loader_ms)
    assert step.displaced_ms == pytest.approx(0.8 * (loader_ms + commit_ms))
    assert step.log_ms == pytest.approx(0.03 + 1e3 * logged / 1e9)
    assert (step.disk_ms, step.store_work) == (0.0, None)
    assert step.ms == step.compute_ms == pytest.approx(30.0 + rows_ms + step.displaced_ms)
    assert step.limited_by == "compute"


def test_planning_costs_a_step_what_it_takes_at_most_and_what_comes_in_pieces_more():
    step = predict(IN_PLACE, network=replace(NETWORK, displaced=1.5))
    commit_ms = 0.02 + 1e-6 * (UNIQUE * 1 + 0.2 * 1e6)
    assert step.displaced_ms == pytest.approx(step.loader_ms + 1.5 * commit_ms)


def test_uniform_rows_miss_a_scratchpad_by_what_it_has_no_room_for():
    work = predict().store_work
    assert work is not None
    room = OPTIONS.scratchpad_bytes / (68 + 39)
    assert work.hit_rate == pytest.approx(room / ROWS, rel=0.03)
    assert work.missed_rows == pytest.approx(UNIQUE * (1 - room / ROWS), rel=0.03)
    # Eight images of 72 bytes have a part of a sector; few rows share one, some are read with their neighbours.
    at_home = work.missed_rows - work.log_rows
    assert 0.3 * at_home < work.fetch_requests < at_home


def test_the_log_has_the_rows_of_the_steps_that_it_holds():
    """Of uniform rows: those that neither the scratchpad has, which were used last, nor steps before the log's."""
    work = predict().store_work
    assert work is not None
    held = 0.6 * OPTIONS.log_bytes / (UNIQUE * 80)
    in_log = 1 - (1 - UNIQUE / ROWS) ** held
    in_scratchpad = OPTIONS.scratchpad_bytes / (68 + 39) / ROWS
    assert work.log_rows == pytest.approx(UNIQUE * (in_log - in_scratchpad), rel=0.03)
    small = predict(options=replace(OPTIONS, log_bytes=2_000_000)).store_work
    assert small is not None
    assert small.log_rows == 0.0


def test_a_log_on_a_tier_of_its_own_takes_what_it_has_off_the_disk():
    beside, apart = predict(), predict(log_medium=NEAR)
    work = apart.store_work
    assert work == beside.store_work and work is not None
    logged = work.record_bytes + 1_000_000
    saved = work.log_rows / LOG_STORE.fetches_per_s + logged / 1e9 + work.record_bytes / 2e9
    assert beside.disk_ms - apart.disk_ms == pytest.approx(1e3 * saved)
    assert apart.log_ms == pytest.approx(1e3 * (logged / 10e9 + work.record_bytes / 20e9 + work.log_rows / 5e6))
    assert (apart.compute_ms, apart.loader_ms) == (beside.compute_ms, beside.loader_ms)


def skewed_curve() -> ReuseCurve:
    """A tenth of the rows takes half of the touches."""
    widths = np.array([ROWS // 10, ROWS - ROWS // 10])
    return ReuseCurve(expected_reuse(widths, UNIQUE / 2 / widths), ROWS)


def test_without_bytes_for_victims_a_tier_for_them_changes_nothing():
    assert predict(victim_medium=NEAR) == predict()
    assert predict().victims_ms == 0.0


def test_uniform_rows_come_from_victims_by_what_these_have_room_for():
    """And what says where they are leaves less to the scratchpad."""
    num_victims = 200_000
    step = predict(options=replace(OPTIONS, victim_bytes=68 * num_victims), victim_medium=NEAR)
    work = step.store_work
    assert work is not None
    room = (OPTIONS.scratchpad_bytes - 8.125 * num_victims) / (68 + 39)
    assert work.room_rows == pytest.approx(room)
    assert work.hit_rate == pytest.approx(room / ROWS, rel=0.03)
    assert work.victim_rows == pytest.approx(UNIQUE * num_victims / ROWS, rel=0.03)
    assert work.missed_rows == pytest.approx(UNIQUE - UNIQUE * work.hit_rate - work.victim_rows)
    # Rows of 68 bytes are two lines. As many are written as come in, from wherever.
    reads_s = max(work.victim_rows / 5e6, work.victim_rows * 128 / 20e9)
    writes_s = (work.victim_rows + work.missed_rows) * 128 / 10e9
    swaps_s = work.victim_rows * 250e-9
    fetches_s = (work.fetch_requests + work.log_rows) / LOG_STORE.fetches_per_s
    assert step.victims_ms == pytest.approx(1e3 * (reads_s + writes_s + swaps_s + fetches_s))


@pytest.mark.parametrize("law", [curve, skewed_curve])
def test_scratchpad_and_victims_together_miss_what_a_scratchpad_of_both_would(law):
    num_victims = 200_000
    of_both = predict(
        curves=[law()],
        options=replace(OPTIONS, victim_bytes=68 * num_victims, scratchpad_bytes=107 * 50_000 + 65 * num_victims // 8),
        victim_medium=NEAR,
    ).store_work
    of_one = predict(curves=[law()], options=replace(OPTIONS, scratchpad_bytes=107 * 250_000)).store_work
    small = predict(curves=[law()], options=replace(OPTIONS, scratchpad_bytes=107 * 50_000)).store_work
    assert of_both is not None and of_one is not None and small is not None
    assert of_both.room_rows == 50_000
    assert of_both.hit_rate == pytest.approx(small.hit_rate)
    assert of_both.missed_rows == pytest.approx(of_one.missed_rows)
    assert of_both.log_rows == pytest.approx(of_one.log_rows)
    assert of_both.fetch_requests == pytest.approx(of_one.fetch_requests)


@pytest.mark.parametrize("law", [curve, skewed_curve])
def test_the_more_victims_there_are_the_less_is_read_of_the_disk(law):
    slow = replace(LOG_STORE, fetches_per_s=20_000.0)
    steps = [
        predict(slow, curves=[law()], options=replace(OPTIONS, victim_bytes=68 * rows), victim_medium=NEAR)
        for rows in range(0, ROWS, ROWS // 10)
    ]
    for few, more in pairwise(steps):
        assert few.store_work is not None and more.store_work is not None
        assert more.store_work.missed_rows < few.store_work.missed_rows
        assert more.store_work.victim_rows > few.store_work.victim_rows
        assert more.disk_ms < few.disk_ms
        assert more.ms <= few.ms
    assert steps[-1].ms < steps[0].ms / 2


def test_where_victims_have_room_for_all_rows_none_comes_from_the_disk():
    step = predict(options=replace(OPTIONS, victim_bytes=68 * ROWS), victim_medium=NEAR)
    assert step.store_work is not None
    assert (step.store_work.missed_rows, step.store_work.fetch_requests) == (0.0, 0.0)
    assert step.store_work.victim_rows == pytest.approx(UNIQUE * (1 - step.store_work.hit_rate))


def test_a_slow_tier_of_victims_limits_by_what_it_moves():
    slow = replace(NEAR, write_bandwidth_bytes_per_s=1e7)
    step = predict(options=replace(OPTIONS, victim_bytes=68 * 200_000), victim_medium=slow)
    assert step.limited_by == "victims"
    assert step.ms == step.victims_ms > predict().ms


def test_victims_need_a_tier():
    with pytest.raises(ConfigError, match="no tier of kind byte names a directory"):
        predict(options=replace(OPTIONS, victim_bytes=1))
    assert predict(IN_PLACE, options=replace(OPTIONS, victim_bytes=1)) == predict(IN_PLACE)


def test_without_misses_nothing_is_fetched():
    step = predict(options=replace(OPTIONS, scratchpad_bytes=ROWS * 200))
    assert step.store_work is not None
    assert (step.store_work.hit_rate, step.store_work.missed_rows, step.store_work.fetch_requests) == (1.0, 0.0, 0.0)
    assert step.displaced_ms < predict().displaced_ms


def test_without_misses_and_merges_the_disk_only_takes_the_log():
    step = predict(options=StepOptions(scratchpad_bytes=ROWS * 200, log_bytes=10**15))
    work = step.store_work
    assert work is not None
    assert work.moved_rows < 0.01
    record_bytes = UNIQUE * (8 + 72)
    assert step.disk_ms == pytest.approx(1e3 * (record_bytes / 2e9 + (record_bytes + 1e6) / 1e9), rel=1e-3)


def test_a_slow_disk_limits_by_its_requests():
    slow = replace(LOG_STORE, fetches_per_s=10_000.0)
    step = predict(slow)
    assert step.store_work is not None
    assert step.limited_by == "disk"
    assert step.ms == step.disk_ms > 1e3 * step.store_work.fetch_requests / 10_000.0
    assert predict(replace(slow, fetches_per_s=5_000.0)).ms > 1.8 * step.ms


def test_a_slow_medium_limits_by_the_bandwidth_of_the_log():
    step = predict(IN_PLACE, medium=replace(DISK, write_bandwidth_bytes_per_s=1e6))
    assert step.limited_by == "log"
    assert step.ms == pytest.approx(0.03 + 1e3 * (1_000_000 + 192 + UNIQUE * 76) / 1e6)


def test_a_slow_source_limits_by_the_loader_until_it_has_workers():
    network = replace(NETWORK, displaced=0.0, reading_s=0.1)
    one = predict(IN_PLACE, network=network)
    assert one.limited_by == "loader"
    four = predict(IN_PLACE, network=network, options=replace(OPTIONS, workers=4))
    assert four.loader_ms == pytest.approx(one.loader_ms / 4)
    assert four.limited_by == "compute"


def test_idle_cpus_take_the_background_for_nothing():
    step = predict(network=replace(NETWORK, displaced=0.0))
    assert step.displaced_ms == 0.0
    assert step.compute_ms == pytest.approx(step.network_ms + step.rows_ms)


def test_a_larger_log_merges_less():
    small, large, largest = (
        predict(options=replace(OPTIONS, log_bytes=size)).store_work for size in (20 << 20, 500 << 20, 2 << 30)
    )
    assert small is not None and large is not None and largest is not None
    assert largest.moved_rows < large.moved_rows < small.moved_rows <= UNIQUE
    assert large.merge_requests < small.merge_requests
    # with nearly every row left to the log, the few that go home lie alone
    assert largest.written_bytes < large.written_bytes < small.written_bytes


def test_a_merge_reads_the_log_and_what_lies_beside_its_rows():
    options = replace(OPTIONS, log_bytes=2 << 30)
    for weight_bytes in (240, 512):
        demand = Demand(tables=(table(weight_bytes=weight_bytes),), dense_bytes=0)
        work = predict(demand=demand, options=options).store_work
        assert work is not None
        assert work.record_bytes == pytest.approx(UNIQUE * (8 + weight_bytes + 4 + 4))
        assert work.read_bytes > 0.0
        assert work.written_bytes > 0


def test_every_table_needs_a_curve():
    with pytest.raises(ConfigError, match="0 reuse curves for 1 tables"):
        predict(curves=[])


@pytest.mark.parametrize("field", ["scratchpad_bytes", "log_bytes", "workers"])
def test_options_name_what_is_wrong(field):
    with pytest.raises(ConfigError, match=f"{field} = 0"):
        replace(OPTIONS, **{field: 0})


def test_victims_may_take_no_bytes_but_no_fewer():
    with pytest.raises(ConfigError, match="victim_bytes = -1; it must be at least 0"):
        replace(OPTIONS, victim_bytes=-1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"row_ns": -1.0}, "row_ns = -1.0; it must be 0 or more"),
        ({"fetches_per_s": 0.0}, "fetches_per_s = 0.0; it must be more than 0"),
        ({"step_us": float("nan")}, "step_us = nan"),
        ({"merge_row_ns": None}, "merge_row_ns is missing; a log store needs it"),
        ({"store": "in_place"}, "belongs to a log store"),
    ],
)
def test_costs_are_checked_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        replace(LOG_STORE, **changes)


@pytest.mark.parametrize("field", ["network_s", "displaced", "reading_s"])
def test_a_network_time_is_not_negative(field):
    with pytest.raises(ValueError, match=f"{field} = -1"):
        replace(NETWORK, **{field: -1.0})
