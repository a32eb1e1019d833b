"""Placement is the best there is, never exceeds a capacity, and its prediction is what one computes by hand."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.errors import DoesNotFit
from holdfast_lab.placement.demand import expected_ladder
from holdfast_lab.placement.ladder import Rung
from holdfast_lab.placement.plan import plan_placement
from holdfast_lab.placement.program import Demand, Program, TableDemand, cut_ranges, moved_bytes, solve, stored_bytes
from holdfast_lab.placement.tiers import Tier

GB = 10**9


def tier(name="dram", kind="dram", capacity_bytes=GB, bandwidth=1e9, **options):
    fields = {
        "read_bandwidth_bytes_per_s": bandwidth,
        "write_bandwidth_bytes_per_s": bandwidth,
        "read_latency_ns": 100.0,
        "access_granularity_bytes": 512 if kind == "block" else 64,
        **({"random_reads_per_s": 1e5} if kind == "block" else {}),
        **options,
    }
    return Tier(name=name, kind=kind, capacity_bytes=capacity_bytes, **fields)


def table(name="C1", rows=1000, dim=16, state_bytes=4, accesses=100.0, exponent=1.05):
    return TableDemand(
        name=name,
        weight_bytes=4 * dim,
        state_bytes=state_bytes,
        accesses_per_batch=accesses,
        ladder=expected_ladder(rows, exponent, accesses),
    )


def splits(total, parts):
    """All ways to hand `total` alike things to `parts` places."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in splits(total - first, parts - 1):
            yield (first, *rest)


@st.composite
def programs(draw):
    num_ranges, num_tiers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_stages = draw(st.integers(1, 4))
    values = st.floats(0.0, 1.0).map(lambda value: round(value, 3))

    def matrix(*shape):
        size = int(np.prod(shape))
        return np.array(draw(st.lists(values, min_size=size, max_size=size))).reshape(shape)

    return Program(
        extents=np.array(draw(st.lists(st.integers(1, 3), min_size=num_ranges, max_size=num_ranges))),
        extent_bytes=np.array(
            draw(st.lists(st.integers(1, 20), min_size=num_ranges * num_tiers, max_size=num_ranges * num_tiers))
        ).reshape(num_ranges, num_tiers),
        capacities=np.array(draw(st.lists(st.integers(0, 60), min_size=num_tiers, max_size=num_tiers))),
        costs=matrix(num_stages, num_ranges, num_tiers),
        bases=matrix(num_stages),
        latencies=matrix(num_stages, num_tiers),
    )


@settings(max_examples=80)
@given(program=programs())
def test_the_solver_finds_what_trying_everything_finds(program):
    ways = [splits(int(count), program.capacities.size) for count in program.extents]
    tried = [np.array(way) for way in product(*ways)]
    fitting = [program.objective(counts) for counts in tried if program.fits(counts)]
    found = solve(program, relative_gap=0.0)
    if not fitting:
        assert found is None
        return
    assert found is not None
    counts, _ = found
    assert program.fits(counts)
    assert (counts.sum(axis=1) == program.extents).all()
    assert program.objective(counts) == pytest.approx(min(fitting), rel=1e-5, abs=1e-6)


@settings(max_examples=25)
@given(
    rows=st.lists(st.integers(1, 200_000), min_size=1, max_size=4),
    dim=st.sampled_from([1, 4, 16, 130]),
    shares=st.lists(st.floats(0.05, 1.0), min_size=3, max_size=3),
    exponent=st.sampled_from([0.0, 1.05]),
)
def test_what_is_planned_is_all_rows_once_and_never_more_than_a_capacity(rows, dim, shares, exponent):
    demand = Demand(
        tables=tuple(table(f"C{n}", count, dim, exponent=exponent) for n, count in enumerate(rows)), dense_bytes=1000
    )
    total = sum(stored_bytes(t, t.rows, tier(kind="block")) for t in demand.tables)
    capacities = [int(share * total) + 100 for share in shares]
    tiers = [
        tier("hbm", "hbm", capacities[0], 100e9),
        tier("dram", "dram", capacities[1], 10e9),
        tier("nvme", "block", capacities[2] + demand.reserved_bytes, 1e9, random_reads_per_s=1e5),
    ]
    try:
        plan = plan_placement(demand, tiers)
    except DoesNotFit:
        assume(sum(capacities) < 1.2 * total)
        return
    for use, declared in zip(plan.tiers, tiers, strict=True):
        assert use.bytes + use.reserved_bytes <= declared.capacity_bytes
    for wanted in demand.tables:
        parts = [part for part in plan.allotments if part.table == wanted.name]
        assert [part.first_row for part in parts] == [0, *np.cumsum([part.rows for part in parts])[:-1]]
        assert sum(part.rows for part in parts) == wanted.rows
    assert sum(use.access_share for use in plan.tiers) == pytest.approx(1.0)


def test_the_prediction_is_what_one_computes_by_hand():
    # 1000 rows of 16 floats and one float of state, 100 of them a batch, all on DRAM, whose lines are 64 bytes.
    rows = TableDemand(
        name="C1",
        weight_bytes=64,
        state_bytes=4,
        accesses_per_batch=150.0,
        ladder=(Rung(rows=1000, access_share=1.0, unique_rows_per_batch=100.0),),
    )
    demand = Demand(tables=(rows,), dense_bytes=40_000, dense_interval=4)
    pool = tier("ssd", "block", bandwidth=2e9, sync_latency_ns=50_000.0, endurance_years=5.0,
                endurance_drive_writes_per_day=1.0, price_usd_per_gb=0.5)  # fmt: skip
    plan = plan_placement(demand, [tier(bandwidth=10e9, price_usd_per_gb=4.0), pool])
    dram, ssd = plan.tiers
    assert (dram.rows, ssd.rows) == (1000, 0)
    assert dram.bytes == 68_032  # in whole lines
    assert dram.read_bytes_per_batch == dram.written_bytes_per_batch == 100 * 128
    assert dram.bandwidth_ms == pytest.approx(1e3 * (2 * 12_800 / 10e9 + 100e-9))
    records = 128 + 64 + 100 * (8 + 64 + 4)
    assert plan.log_bytes_per_batch == pytest.approx(records)
    assert plan.dense_bytes_per_batch == 10_000
    assert ssd.written_bytes_per_batch == pytest.approx(records + 10_000)
    assert ssd.bandwidth_ms == pytest.approx(1e3 * (records + 10_000) / 2e9)
    assert ssd.reserved_bytes == pytest.approx(2 * 40_000 + (2 * 4 + 2) * records, abs=1)
    assert (plan.limiting_stage, plan.ms_per_batch) == ("ssd: sync", pytest.approx(0.05))
    per_day = (records + 10_000) * 86_400 / 0.05e-3
    assert ssd.drive_writes_per_day == pytest.approx(per_day / GB)
    assert ssd.lifetime_years == pytest.approx(5 / (per_day / GB))
    assert dram.cost_usd == pytest.approx(4 * 68_032 / GB)
    assert [(needed.slowest_tier, needed.nodes) for needed in plan.nodes] == [("dram", 1), ("ssd", 1)]


def test_rows_on_block_memory_are_fetched_appended_and_merged_sector_by_sector():
    demand = Demand(tables=(table(exponent=0.0),), dense_bytes=0)
    plan = plan_placement(demand, [tier("ssd", "block", random_reads_per_s=1e4)])
    unique = demand.tables[0].ladder[-1].unique_rows_per_batch
    (ssd,) = plan.tiers
    assert ssd.bytes == -(-1000 // 7) * 512  # seven rows of 68 bytes in a sector
    assert ssd.read_bytes_per_batch == pytest.approx(unique * 2 * 512)
    assert ssd.written_bytes_per_batch == pytest.approx(unique * (8 + 68 + 512) + 128 + 64)
    assert ssd.random_reads_ms == pytest.approx(unique / 1e4 * 1e3 + 100e-6)
    assert plan.limiting_stage == "ssd: random reads"


def test_hot_rows_go_to_the_fast_tier_and_most_accesses_hit_it():
    demand = Demand(tables=(table(rows=1_000_000, accesses=20_000),), dense_bytes=0)
    fast = tier("hbm", "hbm", 7_000_000, 1000e9)
    plan = plan_placement(demand, [tier("ssd", "block", 10 * GB, 1e9), fast])
    hbm, ssd = plan.tiers
    assert hbm.bytes / 7_000_000 > 0.85
    assert hbm.rows < 110_000
    assert hbm.access_share > 0.75
    assert ssd.access_share == pytest.approx(1 - hbm.access_share)
    assert plan.allotments[0].first_row == 0
    assert plan.allotments[0].tier == "hbm"


def test_two_tiers_share_the_work_where_that_is_faster_than_the_fastest_alone():
    demand = Demand(tables=(table(rows=100_000, accesses=50_000, exponent=0.0),), dense_bytes=0)
    both = plan_placement(demand, [tier("fast", bandwidth=30e9), tier("slow", bandwidth=10e9)])
    alone = plan_placement(demand, [tier("fast", bandwidth=30e9)])
    assert both.ms_per_batch < 0.85 * alone.ms_per_batch


def test_a_measured_step_sets_the_rates_but_not_the_prediction():
    demand = Demand(tables=(table(),), dense_bytes=1000)
    tiers = [tier(), tier("ssd", "block")]
    plan, measured = plan_placement(demand, tiers), plan_placement(demand, tiers, batch_ms=20.0)
    assert measured.ms_per_batch == plan.ms_per_batch
    assert measured.log_bytes_per_s == pytest.approx((plan.log_bytes_per_batch + 1000) / 0.020)
    assert measured.tiers[1].drive_writes_per_day < plan.tiers[1].drive_writes_per_day


def missing_bytes(demand, tiers):
    with pytest.raises(DoesNotFit) as caught:
        plan_placement(demand, tiers)
    message = str(caught.value)
    assert "bytes are missing on " in message
    assert "capacity_bytes" in message
    return int(message.split()[0].replace(",", ""))


def test_what_does_not_fit_says_how_many_bytes_are_missing_and_with_these_it_fits():
    demand = Demand(tables=(table(rows=1_000_000),), dense_bytes=0, log_bytes=0)
    missing = missing_bytes(demand, [tier(capacity_bytes=60_000_000)])
    assert missing == pytest.approx(8_000_000, rel=0.02)
    assert plan_placement(demand, [tier(capacity_bytes=60_000_000 + missing)]).bytes == 68_000_000


def test_what_is_missing_counts_that_a_row_larger_than_a_sector_takes_two():
    demand = Demand(tables=(table(rows=100_000, dim=128),), dense_bytes=0, log_bytes=0)
    dram = tier(capacity_bytes=20_640_000)  # holds 40,000 rows of 516 bytes; the others take 1,024 each
    missing = missing_bytes(demand, [dram, tier("ssd", "block", 50_000_000)])
    assert missing == pytest.approx(60_000 * 1024 - 50_000_000, rel=0.05)
    plan_placement(demand, [dram, tier("ssd", "block", 50_000_000 + missing)])


def test_a_log_that_does_not_fit_is_told_apart():
    demand = Demand(tables=(table(),), dense_bytes=0, log_bytes=5000)
    tiers = [tier(), tier("ssd", "block", 4096)]
    with pytest.raises(DoesNotFit, match="904 bytes are missing on 'ssd' for the log and the dense state"):
        plan_placement(demand, tiers)


def test_nodes_are_counted_for_the_fast_tiers_alone_and_with_each_slower_one():
    demand = Demand(tables=(table(rows=1_000_000),), dense_bytes=0)
    tiers = [
        tier("hbm", "hbm", 10_000_000, 1000e9),
        tier("dram", "dram", 20_000_000, 100e9),
        tier("ssd", "block", GB, 2e9),
    ]
    plan = plan_placement(demand, tiers)
    assert [(needed.slowest_tier, needed.nodes) for needed in plan.nodes] == [("hbm", 7), ("dram", 3), ("ssd", 1)]


def test_the_log_lies_on_the_fastest_writing_tier_that_can_hold_a_pool():
    demand = Demand(tables=(table(),), dense_bytes=0)
    slow, fast = tier("ssd", "block", bandwidth=1e9), tier("pmem", "byte", bandwidth=5e9)
    assert plan_placement(demand, [tier(bandwidth=90e9), slow, fast]).log_tier == "pmem"
    assert plan_placement(demand, [tier("hbm", "hbm", bandwidth=900e9), tier(bandwidth=90e9)]).log_tier == "dram"


def test_a_model_with_many_tables_is_planned_to_within_the_gap_in_seconds():
    sizes = np.geomspace(10, 40_000_000, 26).astype(int)
    tables = tuple(table(f"C{n}", int(rows), 128, accesses=2048) for n, rows in enumerate(sizes))
    demand = Demand(tables=tables, dense_bytes=20_000_000)
    tiers = [
        tier("hbm", "hbm", 4 * GB, 3350e9),
        tier("dram", "dram", 16 * GB, 100e9),
        tier("cxl", "byte", 32 * GB, 18e9),
        tier("nvme", "block", 400 * GB, 2.4e9, random_reads_per_s=550_000),
    ]
    plan = plan_placement(demand, tiers)
    assert plan.gap <= 1e-3 * 1.01
    assert sum(use.rows for use in plan.tiers) == sizes.sum()


def test_small_ranges_join_the_next_and_large_ones_are_cut_into_extents():
    demand = Demand(tables=(table("large", 10_000_000), table("small", 10)), dense_bytes=0)
    ranges = cut_ranges(demand, 128)
    assert [rows.rows for rows in ranges if rows.table.name == "small"] == [10]
    large = [rows for rows in ranges if rows.table.name == "large"]
    assert large[0].rows >= 1000
    assert sum(rows.rows for rows in large) == 10_000_000
    assert sum(rows.extents for rows in large) <= 128 + len(large)
    assert all((rows.extents - 1) * rows.extent_rows < rows.rows for rows in ranges)


@pytest.mark.parametrize(
    ("kind", "granule", "weights", "state", "moved", "stored"),
    [
        ("dram", 64, 64, 4, 128, 704),
        ("byte", 256, 64, 4, 512, 768),
        ("dram", 64, 64, 0, 64, 640),
        ("block", 512, 64, 4, 512, 1024),
        ("block", 512, 600, 4, 1024, 10_240),
    ],
)
def test_ten_rows_take_and_one_row_moves_whole_granules(kind, granule, weights, state, moved, stored):
    rows = TableDemand(
        name="C1", weight_bytes=weights, state_bytes=state, accesses_per_batch=1.0, ladder=expected_ladder(10, 0.0, 1.0)
    )
    medium = tier(kind=kind, access_granularity_bytes=granule)
    assert moved_bytes(rows, medium) == moved
    assert stored_bytes(rows, 10, medium) == stored
