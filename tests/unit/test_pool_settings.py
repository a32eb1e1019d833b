"""What `plan --apply` writes down: the best that the model knows of, within what DRAM and tiers have room for."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from holdfast.files.config import read_layers
from holdfast.run.sections import RunConfig
from holdfast_lab.placement.host import Host
from holdfast_lab.placement.ladder import Rung
from holdfast_lab.placement.network_time import NetworkTime
from holdfast_lab.placement.program import Demand, TableDemand
from holdfast_lab.placement.reuse import ReuseCurve, expected_reuse
from holdfast_lab.placement.settings import PoolSettings, best_settings, settings_toml
from holdfast_lab.placement.step_time import StepInputs, StepOptions
from holdfast_lab.placement.tiers import Tier

EXAMPLE = Path(__file__).parents[2] / "examples" / "criteo_synthetic.toml"
ROWS, UNIQUE, ROW_BYTES = 1_600_000, 14_000.0, 260
HOST = Host(
    store="log", step_us=2200.0, row_ns=0.0, row_byte_ns=0.6, id_ns=2.0, id_byte_ns=0.0005, dense_byte_ns=0.08,
    plan_id_ns=10.0, plan_row_ns=5.0, commit_step_us=20.0, commit_row_ns=230.0, commit_dense_byte_ns=0.05,
    collect_row_ns=13.0, fetch_row_ns=1300.0, merge_row_ns=150.0, merge_request_ns=1900.0,
    fetches_per_s=120_000.0, merge_requests_per_s=100_000.0,
)  # fmt: skip
DRAM = Tier(
    name="dram", kind="dram", capacity_bytes=40_000_000, read_bandwidth_bytes_per_s=28e9,
    write_bandwidth_bytes_per_s=28e9, read_latency_ns=185, access_granularity_bytes=64,
)  # fmt: skip
CXL = Tier(
    name="cxl", kind="byte", capacity_bytes=200_000_000, read_bandwidth_bytes_per_s=15e9,
    write_bandwidth_bytes_per_s=14e9, read_latency_ns=416, access_granularity_bytes=256, random_reads_per_s=5e7,
    directory=Path("/mnt/cxl"),
)  # fmt: skip
# The log's room there bounds the search: a log of any size on the disk is a sure choice of two tiers.
SSD = Tier(
    name="ssd", kind="block", capacity_bytes=100_000_000, read_bandwidth_bytes_per_s=2.1e9,
    write_bandwidth_bytes_per_s=2.6e9, read_latency_ns=61_000, access_granularity_bytes=512,
    random_reads_per_s=6e4, sync_latency_ns=120_000,
)  # fmt: skip
UNIFORM = np.array([ROWS])
SKEWED = np.array([ROWS // 10, ROWS - ROWS // 10])  # each has as many touches


def inputs(widths: np.ndarray = UNIFORM, *, network_s: float = 0.005, host: Host = HOST) -> StepInputs:
    touched = UNIQUE / len(widths) / widths
    ends = np.cumsum(widths)
    ladder = tuple(
        Rung(rows=int(end), access_share=(i + 1) / len(widths), unique_rows_per_batch=UNIQUE * (i + 1) / len(widths))
        for i, end in enumerate(ends)
    )
    table = TableDemand(
        name="C1", weight_bytes=ROW_BYTES - 4, state_bytes=4, accesses_per_batch=16_000.0, ladder=ladder
    )
    return StepInputs(
        demand=Demand(tables=(table,), dense_bytes=100_000),
        curves=[ReuseCurve(expected_reuse(widths, touched), ROWS)],
        network=NetworkTime(network_s=network_s, displaced=0.8, reading_s=0.0),
        host=host,
        medium=SSD,
        options=StepOptions(scratchpad_bytes=DRAM.capacity_bytes, log_bytes=32 << 20),
    )


def of_two(given: StepInputs) -> PoolSettings:
    found = best_settings(given, [DRAM, SSD])
    assert found is not None
    return found


def of_three(given: StepInputs, near: Tier = CXL) -> PoolSettings:
    found = best_settings(replace(given, log_medium=near, victim_medium=near), [DRAM, SSD, near])
    assert found is not None
    return found


@pytest.mark.parametrize("widths", [UNIFORM, SKEWED], ids=["uniform", "skewed"])
@pytest.mark.parametrize("network_s", [0.005, 0.1, 1.0])
@pytest.mark.parametrize("fetches_per_s", [20_000.0, 120_000.0, 1e6])
def test_three_tiers_are_never_worse_than_two(widths: np.ndarray, network_s: float, fetches_per_s: float) -> None:
    """But for the 2% within which the smallest are taken."""
    given = inputs(widths, network_s=network_s, host=replace(HOST, fetches_per_s=fetches_per_s))
    assert of_three(given).step.ms <= 1.02 * of_two(given).step.ms


@pytest.mark.parametrize("widths", [UNIFORM, SKEWED], ids=["uniform", "skewed"])
def test_a_device_that_is_worse_than_the_disk_is_left_alone(widths: np.ndarray) -> None:
    worse = replace(
        CXL,
        write_bandwidth_bytes_per_s=1e6,
        read_bandwidth_bytes_per_s=1e6,
        random_reads_per_s=1e3,
        sync_latency_ns=1e8,
    )
    given = inputs(widths)
    found = of_three(given, worse)
    assert (found.victim_bytes, found.log_tier, found.log_directory) == (0, "ssd", None)
    assert found == of_two(given)


@pytest.mark.parametrize("widths", [UNIFORM, SKEWED], ids=["uniform", "skewed"])
def test_where_the_disk_limits_victims_are_worth_their_tags(widths: np.ndarray) -> None:
    two, three = of_two(inputs(widths)), of_three(inputs(widths))
    assert two.step.limited_by == "disk"
    assert (two.victim_bytes, two.victim_tier, two.victim_directory) == (0, None, None)
    assert (three.victim_tier, three.victim_directory) == ("cxl", Path("/mnt/cxl"))
    assert two.step.ms > 1.3 * three.step.ms
    assert three.step.store_work is not None
    assert three.step.store_work.victim_rows > three.step.store_work.log_rows


def test_where_the_network_limits_nothing_is_taken_that_does_not_pay() -> None:
    found = of_three(inputs(network_s=5.0))
    assert found.step.limited_by == "compute"
    assert found.victim_bytes == 0


@pytest.mark.parametrize("capacity_bytes", [20_000_000, 60_000_000, 400_000_000])
@pytest.mark.parametrize("widths", [UNIFORM, SKEWED], ids=["uniform", "skewed"])
def test_nothing_is_given_away_twice(widths: np.ndarray, capacity_bytes: int) -> None:
    found = of_three(inputs(widths), replace(CXL, capacity_bytes=capacity_bytes))
    on_device = found.log_bytes if found.log_tier == "cxl" else 0
    assert on_device + found.victim_bytes <= capacity_bytes
    assert found.log_bytes <= (capacity_bytes if found.log_tier == "cxl" else SSD.capacity_bytes)
    assert found.scratchpad_bytes + found.index_bytes <= DRAM.capacity_bytes
    assert found.step.store_work is not None
    tags = 8.125 * min(ROWS, found.victim_bytes / ROW_BYTES)
    assert found.step.store_work.room_rows * (ROW_BYTES + 39) + tags <= found.scratchpad_bytes * (1 + 1e-9)


def test_dram_that_tags_would_fill_gets_fewer_victims() -> None:
    """Narrow rows in so little DRAM: a place for each of them on the device would leave the scratchpad nothing."""
    given = inputs()
    (wide,) = given.demand.tables
    narrow = replace(given, demand=replace(given.demand, tables=(replace(wide, weight_bytes=16),)))
    dram = replace(DRAM, capacity_bytes=20_000_000)
    found = best_settings(replace(narrow, victim_medium=CXL), [dram, SSD, CXL])
    assert found is not None
    assert found.step.store_work is not None
    assert found.step.store_work.room_rows >= 2 * UNIQUE
    assert found.victim_bytes < 20 * ROWS


def test_tables_that_are_smaller_than_two_batches_of_them_have_settings_too() -> None:
    rows, touched = 800, 300.0
    few = TableDemand(
        name="C1",
        weight_bytes=32,
        state_bytes=4,
        accesses_per_batch=512.0,
        ladder=(Rung(rows=rows, access_share=1.0, unique_rows_per_batch=touched),),
    )
    curve = ReuseCurve(expected_reuse(np.array([rows]), np.array([touched / rows])), rows)
    found = of_two(replace(inputs(), demand=Demand(tables=(few,), dense_bytes=1_500), curves=[curve]))
    assert found.step.store_work is not None
    assert found.step.store_work.room_rows >= rows


def test_what_is_written_down_is_read_as_a_run_s_configuration(tmp_path: Path) -> None:
    with_victims = of_three(inputs())
    (tmp_path / "three.toml").write_text(settings_toml(with_victims, "three"))
    victims = read_layers(RunConfig, [EXAMPLE, tmp_path / "three.toml"], []).pool.victims
    assert victims is not None
    assert (victims.bytes, victims.directory) == (with_victims.victim_bytes, Path("/mnt/cxl"))
    assert "victims" not in tomllib.loads(settings_toml(of_two(inputs()), "two"))["pool"]
