"""Nodes and batch times over tiers of memory are those that one computes by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from holdfast.errors import ConfigError, DoesNotFit
from holdfast_lab.placement.tiers import Tier
from holdfast_lab.sim import tiering
from holdfast_lab.sim.library import read_library
from holdfast_lab.sim.model import Model, TableGroup, workload_of
from holdfast_lab.sim.tiering import compare, demand_of_model, nodes_needed, placed, tiers_of

GB = 10**9


def tier(name, kind, capacity_bytes, bytes_per_s, **options):
    return Tier(
        name=name,
        kind=kind,
        capacity_bytes=capacity_bytes,
        read_bandwidth_bytes_per_s=bytes_per_s,
        write_bandwidth_bytes_per_s=bytes_per_s / 2,
        read_latency_ns=100.0,
        access_granularity_bytes=512 if kind == "block" else 64,
        **({"random_reads_per_s": 5e5} if kind == "block" else {}),
        **options,
    )


HBM = tier("hbm", "hbm", 5 * GB, 1000e9)
DRAM = tier("dram", "dram", 12 * GB, 100e9)
SSD = tier("ssd", "block", 100 * GB, 2e9)


def model(**options):
    """64 GB of rows of 64 bytes."""
    tables = (TableGroup(count=4, rows=250_000_000, dim=16, lookups=1),)
    return Model(**{"batch_size": 1000, "tables": tables, "bottom": (16,), "top": (1,), **options})


def test_nodes_for_capacity_are_bytes_over_capacity():
    saving = compare(model(), [HBM, DRAM, SSD])
    assert saving.fast_only.nodes == math.ceil(64 / 17)
    assert saving.all_tiers.nodes == 1
    assert saving.times_fewer == 4.0


def test_half_the_capacity_takes_twice_the_nodes():
    halves = [replace(each, capacity_bytes=each.capacity_bytes // 2) for each in (HBM, DRAM)]
    assert nodes_needed(model(), halves).nodes == math.ceil(64 / 8.5)


def test_a_batch_takes_what_its_rows_take_to_be_read_and_written():
    only = tier("dram", "dram", 100 * GB, 100e9)
    rows = workload_of(model()).unique_rows
    expected_s = rows * 64 / 100e9 + rows * 64 / 50e9 + 100e-9
    assert nodes_needed(model(), [only]).batch_s == pytest.approx(expected_s, rel=0.01)


def test_two_nodes_halve_what_each_is_asked_for():
    one, two = (demand_of_model(model(), nodes).tables[0] for nodes in (1, 2))
    assert two.rows == one.rows / 2
    assert two.accesses_per_batch == one.accesses_per_batch / 2
    assert two.ladder[-1].unique_rows_per_batch == pytest.approx(one.ladder[-1].unique_rows_per_batch / 2)


def test_nodes_for_bandwidth_are_the_fewest_that_reach_it():
    tiers = [HBM, DRAM, SSD]
    by_capacity = nodes_needed(model(), tiers)
    wanted_s = by_capacity.batch_s / 3
    found = nodes_needed(model(), tiers, most_batch_s=wanted_s)
    one_fewer_s = tiering._on_nodes(model(), tiers, found.nodes - 1).batch_s
    assert found.nodes > by_capacity.nodes
    assert found.batch_s <= wanted_s < one_fewer_s


def test_slow_tiers_save_nothing_where_bandwidth_forces_the_nodes():
    fast_s = nodes_needed(model(), [HBM, DRAM]).batch_s
    saving = compare(model(), [HBM, DRAM, SSD], most_batch_s=fast_s)
    assert saving.times_fewer == pytest.approx(1.0, abs=0.5)


def test_a_batch_time_that_no_number_of_nodes_reaches_is_refused():
    with pytest.raises(DoesNotFit, match="1e-08 s"):
        nodes_needed(model(), [DRAM], most_batch_s=1e-8)


def test_a_node_without_fast_memory_has_nothing_to_compare_with():
    with pytest.raises(ConfigError, match="neither HBM nor DRAM"):
        compare(model(), [SSD])


def test_a_systems_memories_are_a_nodes_tiers():
    library = read_library()
    tiers = {each.kind: each for each in tiers_of(library.system("mtrains"), library)}
    assert list(tiers) == ["hbm", "dram", "byte", "block"]
    drive = library.device("p4800x")
    assert tiers["block"].capacity_bytes == drive.capacity_bytes
    assert tiers["block"].random_reads_per_s == pytest.approx(550_000, rel=0.01)


def test_a_system_without_memories_has_no_tiers():
    library = read_library()
    system = library.system("mtrains")
    bare = replace(system, devices=dict.fromkeys(system.devices, "rtx-3090"))
    with pytest.raises(ConfigError, match="MTrainS"):
        tiers_of(bare, library)


def test_a_placed_system_reads_from_every_memory_what_lives_there():
    library = read_library()
    system = library.system("mtrains")
    mlperf = library.model("mlperf")
    plan = nodes_needed(mlperf, tiers_of(system, library)).plan
    with_plan = placed(system, plan)
    rows = {use.kind: use.unique_rows_per_batch for use in plan.tiers if use.name != "the log"}
    all_rows = sum(rows.values())
    assert with_plan.stages["fetch_block"].part == pytest.approx(rows["block"] / all_rows)
    assert with_plan.stages["exchange"].part == pytest.approx(1 - rows["hbm"] / all_rows)
    unique_rows = workload_of(mlperf).unique_rows
    drive = library.device("p4800x")
    reads_s = unique_rows * rows["block"] / all_rows * drive.read_latency_s / drive.outstanding_requests
    assert reads_s > 0
    assert library.run(with_plan, mlperf).stage_s["fetch_block"] == pytest.approx(reads_s, rel=1e-9)


def test_a_memory_that_holds_nothing_is_not_waited_for():
    library = read_library()
    system = library.system("mtrains")
    small = library.model("kaggle")
    plan = nodes_needed(small, tiers_of(system, library)).plan
    assert "fetch_block" not in placed(system, plan).active
