"""What a piece of work costs on a device: limits that can be written down, and what is refused."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_lab.sim.device import Amounts, Compute, Device, Link, Memory, Modules
from holdfast_lab.sim.model import Model, TableGroup, workload_of

MEMORY = Memory(
    kind="memory",
    read_bandwidth_bytes_per_s=16e9,
    write_bandwidth_bytes_per_s=2e9,
    read_latency_s=250e-9,
    write_latency_s=600e-9,
    outstanding_requests=64,
    granularity_bytes=256,
)
COMPUTE = Compute(kind="compute", flops_per_s=1e12)
LINK = Link(kind="link", bandwidth_bytes_per_s=25e9)

FOUR = replace(COMPUTE, count=4)
ENDLESS = ("capacity_bytes", "modules_at_work", "outstanding_requests")

PER_SECOND = st.floats(1e6, 1e12)
LATENCY = st.floats(1e-9, 1e-3)
ROWS = st.floats(1.0, 1e9)


def seconds(device: Device, *, recently_written: bool = False, modules: float = 1.0, **amounts: float) -> float:
    return device.seconds(Amounts(**amounts), recently_written=recently_written, modules=modules)


def exactly(value: float):
    return pytest.approx(value, rel=1e-12, abs=0.0)


def workload(*rows: float, dim: int = 32):
    tables = tuple(TableGroup(rows=each, dim=dim) for each in rows)
    return workload_of(Model(batch_size=8, tables=tables, bottom=(dim,), top=(1,)))


@settings(max_examples=30)
@given(rate=PER_SECOND, rows=ROWS, granules=st.integers(1, 64))
def test_without_latency_rows_take_their_granules_over_the_bandwidth(rate, rows, granules):
    memory = replace(MEMORY, read_bandwidth_bytes_per_s=rate, read_latency_s=0.0)
    assert seconds(memory, rows_read=rows, row_bytes=granules * 256) == exactly(rows * granules * 256 / rate)


@settings(max_examples=30)
@given(latency_s=LATENCY, rows=ROWS, outstanding=st.floats(1.0, 1e4))
def test_with_bandwidth_to_spare_rows_take_their_latency_over_the_requests_under_way(latency_s, rows, outstanding):
    memory = replace(
        MEMORY, read_bandwidth_bytes_per_s=1e30, read_latency_s=latency_s, outstanding_requests=outstanding
    )
    assert seconds(memory, rows_read=rows, row_bytes=256) == exactly(rows * latency_s / outstanding)


@settings(max_examples=30)
@given(latency_s=LATENCY, rows=ROWS, outstanding=st.floats(1.0, 1e4), rate=PER_SECOND)
def test_writes_have_the_same_two_limits_of_their_own(latency_s, rows, outstanding, rate):
    memory = replace(
        MEMORY, write_bandwidth_bytes_per_s=rate, write_latency_s=latency_s, outstanding_requests=outstanding
    )
    limits = (rows * 512 / rate, rows * latency_s / outstanding)
    assert seconds(memory, rows_written=rows, row_bytes=512) == exactly(max(limits))


def test_the_two_limits_meet_where_littles_law_says():
    enough = MEMORY.read_latency_s * MEMORY.read_bandwidth_bytes_per_s / 256
    at_the_knee = replace(MEMORY, outstanding_requests=enough)
    bandwidth_s = 1e6 * 256 / 16e9
    assert seconds(at_the_knee, rows_read=1e6, row_bytes=256) == exactly(bandwidth_s)
    fewer, more = (replace(MEMORY, outstanding_requests=enough * factor) for factor in (0.5, 2.0))
    assert seconds(fewer, rows_read=1e6, row_bytes=256) == exactly(2 * bandwidth_s)
    assert seconds(more, rows_read=1e6, row_bytes=256) == exactly(bandwidth_s)


@pytest.mark.parametrize(("row_bytes", "granules"), [(1, 1), (255, 1), (256, 1), (257, 2), (512, 2), (513, 3)])
def test_a_row_moves_as_whole_granules_read_or_written(row_bytes, granules):
    memory = replace(MEMORY, read_latency_s=0.0, write_latency_s=0.0)
    assert seconds(memory, rows_read=1e6, row_bytes=row_bytes) == exactly(1e6 * granules * 256 / 16e9)
    assert seconds(memory, rows_written=1e6, row_bytes=row_bytes) == exactly(1e6 * granules * 256 / 2e9)


def test_long_runs_are_not_rounded_to_granules_and_have_no_latency():
    assert seconds(MEMORY, stream_read_bytes=100) == exactly(100 / 16e9)
    assert seconds(MEMORY, stream_written_bytes=100) == exactly(100 / 2e9)


def test_the_rounding_of_a_mean_over_equal_rows_costs_no_granule():
    groups = ((32, 1.3), (54, 20), (18, 2))
    tables = tuple(TableGroup(count=count, rows=100, dim=96, lookups=lookups) for count, lookups in groups)
    row_bytes = workload_of(Model(batch_size=256, tables=tables, bottom=(96,), top=(1,))).row_bytes
    assert row_bytes != 96 * 4
    memory = replace(MEMORY, granularity_bytes=96 * 4, read_latency_s=0.0)
    assert seconds(memory, rows_read=1e6, row_bytes=row_bytes) == exactly(1e6 * 96 * 4 / 16e9)


@settings(max_examples=30)
@given(read=ROWS, written=ROWS, streamed_in=ROWS, streamed_out=ROWS)
def test_reads_and_writes_take_turns(read, written, streamed_in, streamed_out):
    alone = [
        seconds(MEMORY, rows_read=read, row_bytes=128),
        seconds(MEMORY, rows_written=written, row_bytes=128),
        seconds(MEMORY, stream_read_bytes=streamed_in),
        seconds(MEMORY, stream_written_bytes=streamed_out),
    ]
    together = seconds(
        MEMORY,
        rows_read=read,
        rows_written=written,
        row_bytes=128,
        stream_read_bytes=streamed_in,
        stream_written_bytes=streamed_out,
    )
    assert together == exactly(sum(alone))


@settings(max_examples=30)
@given(penalty=st.floats(0.5, 20.0), overlap=st.floats(0.0, 1.0))
def test_reading_what_was_just_written_costs_the_penalty_on_the_overlap_alone(penalty, overlap):
    memory = replace(MEMORY, raw_penalty=penalty)
    fresh_s = seconds(memory, rows_read=1e5, row_bytes=128, overlap=overlap)
    hit_s = seconds(memory, rows_read=1e5, row_bytes=128, overlap=overlap, recently_written=True)
    assert hit_s == exactly(fresh_s * ((1 - overlap) + penalty * overlap))


def test_the_penalty_is_of_rows_that_are_read_and_of_nothing_else():
    memory = replace(MEMORY, raw_penalty=5.0)
    others = {"rows_written": 1e5, "row_bytes": 128.0, "stream_read_bytes": 1e6, "stream_written_bytes": 1e6}
    assert seconds(memory, **others, overlap=1.0, recently_written=True) == seconds(memory, **others, overlap=1.0)


@settings(max_examples=30)
@given(modules=st.floats(0.25, 1000.0))
def test_modules_share_all_work_of_a_memory(modules):
    work = {"rows_read": 1e5, "rows_written": 2e5, "row_bytes": 300.0}
    work |= {"stream_read_bytes": 1e7, "stream_written_bytes": 2e7}
    assert seconds(MEMORY, **work, modules=modules) == exactly(seconds(MEMORY, **work) / modules)


def test_processors_that_share_work_take_a_part_of_its_time_and_all_of_the_softwares():
    work = {"flops": 1e12, "rows_read": 1e6}
    one = replace(COMPUTE, row_s=1e-6)
    assert seconds(replace(one, count=4), **work, calls=0) == exactly(seconds(one, **work, calls=0) / 4)
    started = replace(FOUR, start_s=1e-3)
    assert seconds(started, flops=4e12, calls=3) == exactly(1.0 + 3e-3)


def test_modules_are_fixed_or_counted_by_table_or_as_many_more_as_hold_the_tables():
    three_tables = workload(1000, 2000, 3000)
    assert replace(MEMORY, modules=5).num_modules(three_tables) == 5
    assert replace(MEMORY, modules=5, modules_by="by_table").num_modules(three_tables) == 15
    small = replace(MEMORY, modules=2, modules_by="by_capacity", capacity_bytes=6000 * 32)
    assert small.num_modules(three_tables) == 4
    assert replace(small, capacity_bytes=6000 * 32 * 0.99).num_modules(three_tables) == 5
    assert replace(small, capacity_bytes=1e12).num_modules(three_tables) == 2


def test_modules_beyond_what_a_host_reaches_hold_rows_and_take_power_but_share_no_work():
    tables = workload(1000, 2000)
    memory = replace(MEMORY, modules=3, modules_by="by_table", modules_at_work=4)
    assert (memory.num_modules(tables), memory.num_working(tables)) == (6, 4)
    assert replace(memory, modules_at_work=math.inf).num_working(tables) == 6


@settings(max_examples=50)
@given(
    modules=st.floats(0.01, 100),
    by=st.sampled_from(get_args(Modules)),
    most=st.floats(0.1, 100),
    rows=st.floats(1, 1e9),
)
def test_no_module_works_that_takes_no_power(modules, by, most, rows):
    memory = replace(MEMORY, modules=modules, modules_by=by, modules_at_work=most, capacity_bytes=1e9)
    assert 0 < memory.num_working(workload(rows)) <= memory.num_modules(workload(rows))


def test_a_memory_without_a_capacity_holds_everything_in_one():
    endless = replace(MEMORY, modules_by="by_capacity")
    assert endless.capacity_bytes == math.inf
    assert endless.num_modules(workload(1e12)) == 1


def test_writes_reach_the_part_of_their_bandwidth_that_is_declared():
    memory = replace(MEMORY, write_latency_s=0.0, row_write_efficiency=0.25, stream_write_efficiency=0.5)
    assert seconds(memory, rows_written=1e6, row_bytes=256) == exactly(1e6 * 256 / (2e9 * 0.25))
    assert seconds(memory, stream_written_bytes=1e9) == exactly(1e9 / (2e9 * 0.5))
    assert seconds(memory, rows_read=1e6, row_bytes=256) == seconds(MEMORY, rows_read=1e6, row_bytes=256)


@settings(max_examples=30)
@given(calls=st.floats(0, 100), flops=st.floats(0, 1e15), read=ROWS, written=ROWS)
def test_a_processor_takes_its_calls_its_operations_and_its_rows_one_after_the_other(calls, flops, read, written):
    processor = replace(COMPUTE, efficiency=0.4, start_s=1e-5, row_s=2e-9)
    expected_s = calls * 1e-5 + flops / (1e12 * 0.4) + (read + written) * 2e-9
    assert seconds(processor, calls=calls, flops=flops, rows_read=read, rows_written=written) == exactly(expected_s)


@settings(max_examples=30)
@given(calls=st.floats(0, 100), moved=st.floats(0, 1e12))
def test_a_link_takes_a_latency_a_start_for_every_call_and_its_bytes_over_the_bandwidth(calls, moved):
    link = replace(LINK, latency_s=3e-6, start_s=1e-4)
    assert seconds(link, calls=calls, moved_bytes=moved) == exactly(3e-6 + calls * 1e-4 + moved / 25e9)


def test_a_link_moves_no_more_than_its_lines_under_way_allow():
    far = replace(LINK, latency_s=3.2e-6, outstanding_requests=64)
    assert seconds(far, moved_bytes=1.28e9) == exactly(3.2e-6 + 1.0)
    assert seconds(replace(far, outstanding_requests=1e4), moved_bytes=25e9) == exactly(3.2e-6 + 1.0)


@settings(max_examples=30)
@given(read=ROWS, written=ROWS)
def test_reads_and_writes_that_go_at_once_take_the_longer_and_no_less_than_both_together(read, written):
    alone = [seconds(MEMORY, rows_read=read, row_bytes=256), seconds(MEMORY, rows_written=written, row_bytes=256)]
    both = {"rows_read": read, "rows_written": written, "row_bytes": 256.0}
    assert seconds(replace(MEMORY, mixed_bandwidth_bytes_per_s=1e30), **both) == exactly(max(alone))
    together = replace(MEMORY, mixed_bandwidth_bytes_per_s=1e9)
    assert seconds(together, **both) == exactly(max((read + written) * 256 / 1e9, *alone))


@pytest.mark.parametrize("device", [MEMORY, COMPUTE, LINK], ids=lambda device: device.kind)
def test_no_number_may_be_negative_infinite_or_nan(device):
    numbers = [each.name for each in fields(device) if isinstance(getattr(device, each.name), (int, float))]
    assert len(numbers) >= 6
    for name in numbers:
        for wrong in (-1.0, math.nan, -math.inf, *([] if name in ENDLESS else [math.inf])):
            with pytest.raises(ValueError, match=rf"^{name} = {wrong}; it must be 0 or more$"):
                replace(device, **{name: wrong})


@pytest.mark.parametrize(
    ("device", "name"),
    [
        *((MEMORY, name) for name in ("read_bandwidth_bytes_per_s", "write_bandwidth_bytes_per_s")),
        *(
            (MEMORY, name)
            for name in ("outstanding_requests", "granularity_bytes", "capacity_bytes", "modules", "modules_at_work")
        ),
        *((MEMORY, name) for name in ("row_write_efficiency", "stream_write_efficiency", "parallelism")),
        *((COMPUTE, name) for name in ("flops_per_s", "efficiency", "parallelism", "count")),
        *((LINK, name) for name in ("bandwidth_bytes_per_s", "parallelism", "outstanding_requests", "line_bytes")),
    ],
)
def test_what_is_divided_by_may_not_be_zero(device, name):
    with pytest.raises(ValueError, match=rf"^{name} = 0; it must be more than 0$"):
        replace(device, **{name: 0})


def test_latencies_penalties_and_powers_may_be_zero():
    free = replace(MEMORY, read_latency_s=0, write_latency_s=0, raw_window_s=0, idle_watts=0)
    assert seconds(free, rows_read=1.0, row_bytes=256) == exactly(256 / 16e9)
    assert replace(LINK, latency_s=0, start_s=0).bandwidth_bytes_per_s == 25e9
