"""Processors kernel by kernel, what connects them, and how tables spread over them: limits that can be written down."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigError, DoesNotFit
from holdfast_lab.sim.device import Amounts, Fabric, Kernel, Processor, Rate
from holdfast_lab.sim.library import read_library
from holdfast_lab.sim.model import Model, TableGroup, workload_of
from holdfast_lab.sim.sharding import sharded

LIBRARY = read_library()
GPU = Processor(
    kind="processor",
    rates={"fp32": Rate(flops_per_s=10e12), "half": Rate(flops_per_s=80e12)},
    units=100,
    memory_bandwidth_bytes_per_s=1e12,
    capacity_bytes=40e9,
)
FABRIC = Fabric(kind="fabric", bandwidth_bytes_per_s=100e9)
GPUS = ("v100", "a100-80gb", "h100", "h200")


def product(rows: float, columns: float, inner: float) -> Kernel:
    return Kernel(0.0, rows=rows, columns=columns, inner=inner)


def network_s(device: Processor | Fabric, gpus: float, **amounts: object) -> float:
    return device.seconds(Amounts(**amounts), recently_written=False, modules=gpus)  # type: ignore[arg-type]


def model(*rows: float, lookups: float = 1.0, **values: object) -> Model:
    tables = tuple(TableGroup(rows=each, dim=128, lookups=lookups) for each in rows)
    made = Model(batch_size=65536, tables=tables, bottom=(512, 256, 128), top=(1024, 1024, 512, 256, 1))
    return replace(made, **values)  # type: ignore[arg-type]


def test_a_product_that_fills_all_units_takes_its_flops_over_the_peak():
    assert GPU.kernel_s(product(1280, 1280, 1024), "fp32") == pytest.approx(2 * 1280 * 1280 * 1024 / 10e12)


def test_one_tile_more_than_there_are_units_takes_a_turn_more():
    full, one_more = GPU.kernel_s(product(12800, 128, 2048), "fp32"), GPU.kernel_s(product(12928, 128, 2048), "fp32")
    assert one_more > 1.4 * full


@settings(max_examples=40)
@given(rows=st.integers(1, 70_000), columns=st.integers(1, 4096), inner=st.integers(1, 4096))
def test_no_shape_is_quicker_than_the_peak_nor_than_the_memory(rows, columns, inner):
    kernel = Kernel(4.0 * (rows * inner + columns * inner), rows=rows, columns=columns, inner=inner)
    seconds = GPU.kernel_s(kernel, "fp32")
    assert seconds >= max(2.0 * rows * columns * inner / 10e12, kernel.moved_bytes / 1e12) * (1 - 1e-12)


def test_a_product_with_few_tiles_is_split_along_its_inner_dimension():
    together, alone = product(128, 128, 65536), product(128, 128, 255)
    assert GPU.kernel_s(together, "fp32") < 0.1 * GPU.kernel_s(alone, "fp32") * 65536 / 255


def test_every_kernel_is_launched_and_every_call_as_well():
    launching = replace(GPU, launch_s=5e-6)
    assert network_s(launching, 1, kernels=(Kernel(0.0),) * 3, calls=2.0) == pytest.approx(5 * 5e-6)


def test_a_precision_without_a_rate_is_refused_with_those_that_have_one():
    tf32 = replace(LIBRARY.model("mlperf"), precision="tf32", tables=(TableGroup(rows=1e5, dim=128),))
    with pytest.raises(ConfigError, match=r"precision 'tf32': the processor has rates of fp32, half"):
        LIBRARY.changed({"systems.gpus.devices.gpu": "v100"}).run("gpus", tf32)


@settings(max_examples=30)
@given(gpus=st.integers(2, 64), moved=st.floats(1e3, 1e12))
def test_all_to_all_and_all_reduce_move_what_the_arithmetic_says(gpus, moved):
    share = moved / gpus * (gpus - 1) / gpus
    assert network_s(FABRIC, gpus, moved_bytes=moved) == pytest.approx(share / 100e9)
    assert network_s(FABRIC, gpus, reduced_bytes=moved) == pytest.approx(2 * (gpus - 1) / gpus * moved / 100e9)
    assert network_s(replace(FABRIC, topology="shared"), gpus, moved_bytes=moved) == pytest.approx(gpus * share / 100e9)


def test_topologies_differ_by_how_far_a_message_goes():
    hops = {name: replace(FABRIC, topology=name).hops(8) for name in ("switch", "mesh", "cube_mesh", "ring")}
    assert hops == {"switch": 1.0, "mesh": 1.0, "cube_mesh": 10 / 7, "ring": 16 / 7}


def test_one_processor_sends_nothing():
    assert network_s(FABRIC, 1, moved_bytes=1e9, reduced_bytes=1e9) == 0.0


def test_whole_tables_leave_a_gpu_with_more_and_rows_do_not():
    system, made = LIBRARY.system("gpus"), model(*[1e6] * 5)
    devices = {"gpu": GPU}
    by_table = sharded(workload_of(made), made, replace(system, gpus=4), devices)
    by_row = sharded(workload_of(made), made, replace(system, gpus=4, sharding="row"), devices)
    assert (by_table.skew, by_row.skew) == (pytest.approx(2 * 4 / 5), 1.0)
    assert by_row.partial_vectors == pytest.approx(1.0)


def test_a_table_that_no_gpu_holds_is_cut():
    system, made = replace(LIBRARY.system("gpus"), gpus=4), model(4 * 70e6)
    assert sharded(workload_of(made), made, system, {"gpu": GPU}).skew == pytest.approx(1.0)


def test_rows_pooled_from_many_gpus_come_as_so_many_partial_sums():
    system, made = replace(LIBRARY.system("gpus"), gpus=4, sharding="row"), model(1e6, lookups=80)
    assert sharded(workload_of(made), made, system, {"gpu": GPU}).partial_vectors == pytest.approx(4.0, rel=1e-6)


def test_rows_that_do_not_fit_one_gpu_fit_more_and_power_is_of_all():
    made = model(*[10e6] * 26)  # 133 GB
    with pytest.raises(DoesNotFit, match=r"gpu \(a100-80gb\) have 80 GB"):
        LIBRARY.run("gpus", made)
    two, eight = (LIBRARY.changed({"systems.gpus.gpus": n}).run("gpus", made) for n in (2, 8))
    assert eight.batch_s < 0.5 * two.batch_s
    least_w = 8 * LIBRARY.device("a100-80gb").idle_watts
    assert eight.joules_by_role["gpu"] > least_w * eight.batch_s


@pytest.mark.parametrize(("slower", "faster"), [("v100", "a100-80gb"), ("a100-80gb", "h100"), ("h100", "h200")])
def test_later_gpus_are_faster(slower, faster):
    made = replace(model(*[1e6] * 26), precision="half")
    before, after = (LIBRARY.changed({"systems.gpus.devices.gpu": name}).run("gpus", made) for name in (slower, faster))
    assert after.batch_s < before.batch_s


@pytest.mark.parametrize("name", GPUS)
def test_a_peak_names_its_source_and_no_rate_is_beyond_it(name):
    gpu = LIBRARY.device(name)
    assert isinstance(gpu, Processor)
    assert "data sheet" in gpu.source
    assert all(rate.efficiency < 1 for rate in gpu.rates.values())
