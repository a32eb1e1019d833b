"""Queues of trainers and expanders behave as queueing theory says, and what is tightest saturates first."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from holdfast.errors import DoesNotFit
from holdfast_lab.sim.fabric import LEVELS, Fabric, Load, bounds_by_level, check_expanders, load_of
from holdfast_lab.sim.library import read_library
from holdfast_lab.sim.model import workload_of
from holdfast_lab.sim.scale import simulate_scale, sweep_trainers

T_99_OF_20 = 2.861  # Student's t: two sides, 19 degrees of freedom


def free_fabric(trainers=1, expanders=1):
    return Fabric(
        trainers=trainers,
        expanders=expanders,
        port_bytes_per_s=math.inf,
        leaf_link_bytes_per_s=math.inf,
        spine_bytes_per_s=math.inf,
        hop_s=0.0,
    )


LOAD = Load(compute_s=2e-3, lookup_s=0.4e-3, update_s=0.8e-3, index_bytes=2e6, pooled_bytes=1e6, fan_out=2)
FABRIC = Fabric(trainers=48, expanders=16, devices_per_leaf=8, spines=2)


@pytest.mark.dear
@pytest.mark.parametrize("utilisation", [0.3, 0.7])
def test_random_arrivals_at_one_expander_wait_as_in_md1(utilisation):
    load = Load(compute_s=1.0, lookup_s=utilisation, update_s=0.0, fan_out=1, arrivals="poisson")
    waits_s = [
        simulate_scale(free_fabric(), load, seed=seed, batches=2500).mean_latency_s - utilisation for seed in range(20)
    ]
    expected_s = utilisation * load.lookup_s / (2 * (1 - utilisation))
    half_width_s = T_99_OF_20 * np.std(waits_s, ddof=1) / math.sqrt(20)
    assert half_width_s < 0.1 * expected_s
    assert abs(np.mean(waits_s) - expected_s) < half_width_s


def test_many_random_trainers_wait_as_one_with_all_their_batches():
    load = Load(compute_s=40.0, lookup_s=0.5, update_s=0.0, fan_out=1, arrivals="poisson")
    waits_s = [
        simulate_scale(free_fabric(trainers=40), load, seed=seed, batches=60).mean_latency_s - 0.5 for seed in range(20)
    ]
    half_width_s = T_99_OF_20 * np.std(waits_s, ddof=1) / math.sqrt(20)
    assert abs(np.mean(waits_s) - 0.5 * 0.5 / (2 * 0.5)) < half_width_s < 0.1


def test_one_trainer_on_free_links_takes_compute_and_one_piece_of_its_lookups():
    load = replace(LOAD, update_s=0.0, jitter=0.0)
    run = simulate_scale(free_fabric(expanders=4), load, batches=50)
    assert run.mean_latency_s == pytest.approx(load.lookup_s / 2, rel=1e-9)
    assert run.p99_latency_s == pytest.approx(load.lookup_s / 2, rel=1e-9)
    assert run.batches_per_s == pytest.approx(1 / (load.compute_s + load.lookup_s / 2), rel=1e-9)


def test_one_trainer_of_one_expander_waits_for_its_own_update():
    load = replace(LOAD, fan_out=1, jitter=0.0)
    run = simulate_scale(free_fabric(), load, batches=50)
    cycle_s = load.compute_s + load.update_s + load.lookup_s
    assert run.batches_per_s == pytest.approx(1 / cycle_s, rel=1e-9)
    assert run.utilisation["expander"] == pytest.approx((load.update_s + load.lookup_s) / cycle_s, rel=0.05)


def test_a_message_alone_takes_its_slowest_link_and_every_hop():
    fabric = replace(free_fabric(expanders=2), devices_per_leaf=2, spines=1, leaf_link_bytes_per_s=1e9, hop_s=1e-6)
    load = Load(compute_s=1.0, lookup_s=0.0, update_s=0.0, index_bytes=8e6, fan_out=2, arrivals="jittered")
    hops_there, hops_back, memory = 5, 5, 1
    expected_s = 4e6 / 1e9 + (hops_there + memory + hops_back) * 1e-6
    assert simulate_scale(fabric, load, batches=20).mean_latency_s == pytest.approx(expected_s, rel=1e-9)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others():
    first, again, other = (simulate_scale(FABRIC, LOAD, seed=seed, batches=10) for seed in (3, 3, 4))
    assert first == again
    assert first.latencies_s != other.latencies_s


@pytest.mark.parametrize(
    ("narrow", "level"),
    [
        ({"leaf_link_bytes_per_s": 1e9}, "leaf link"),
        ({"spine_bytes_per_s": 2e9}, "spine"),
        ({"expanders": 2}, "expander"),
        ({"expanders": 2, "port_bytes_per_s": 1e9}, "expander port"),
        ({"trainers": 4, "expanders": 16, "port_bytes_per_s": 0.3e9}, "trainer port"),
    ],
)
def test_the_level_that_is_named_is_the_busiest(narrow, level):
    run = simulate_scale(replace(FABRIC, **narrow), LOAD, batches=30)
    assert run.saturates == level
    assert max(LEVELS, key=lambda name: run.utilisation[name]) == level
    assert run.utilisation[level] > 0.6
    assert run.batches_per_s <= 1.02 * run.bound_batches_per_s


def test_few_trainers_are_bound_by_themselves_and_many_by_the_expanders():
    runs = sweep_trainers(FABRIC, LOAD, [1, 4, 64, 128], batches=20)
    assert [run.saturates for run in runs] == ["trainers", "trainers", "expander", "expander"]
    assert runs[1].batches_per_s == pytest.approx(4 * runs[0].batches_per_s, rel=0.05)
    assert runs[3].batches_per_s == pytest.approx(runs[3].bound_batches_per_s, rel=0.05)
    assert runs[3].mean_latency_s > runs[2].mean_latency_s > runs[0].mean_latency_s
    assert all(run.p99_latency_s >= run.mean_latency_s for run in runs)


def test_expanders_that_grow_with_the_trainers_keep_their_pace():
    small, large = sweep_trainers(FABRIC, LOAD, [16, 64], expanders_per_trainer=1.0, batches=20)
    assert large.batches_per_s == pytest.approx(4 * small.batches_per_s, rel=0.1)


def test_a_memory_twice_as_fast_bounds_at_twice_the_rate():
    library = read_library()
    workload = workload_of(library.model("rm1"))
    gpu, memory = library.device("rtx-3090"), library.device("ddr4-server")
    twice = replace(
        memory,
        read_bandwidth_bytes_per_s=2 * memory.read_bandwidth_bytes_per_s,
        write_bandwidth_bytes_per_s=2 * memory.write_bandwidth_bytes_per_s,
        outstanding_requests=2 * memory.outstanding_requests,
    )
    slow, fast = (bounds_by_level(FABRIC, load_of(workload, gpu, each)) for each in (memory, twice))
    assert fast["expander"] == pytest.approx(2 * slow["expander"], rel=1e-12)
    assert fast["leaf link"] == slow["leaf link"]


def test_queues_that_are_left_out_where_trainers_are_many_change_little(monkeypatch):
    fabric = Fabric(trainers=300, expanders=300)
    left_out = simulate_scale(fabric, LOAD, batches=14)
    monkeypatch.setattr("holdfast_lab.sim.scale._MOST_TRAINERS_WITH_ALL_QUEUES", 1000)
    with_all = simulate_scale(fabric, LOAD, batches=14)
    assert left_out.batches_per_s == pytest.approx(with_all.batches_per_s, rel=0.02)
    assert left_out.mean_latency_s == pytest.approx(with_all.mean_latency_s, rel=0.05)


def test_thousands_of_devices_can_be_simulated():
    run = simulate_scale(Fabric(trainers=3000, expanders=1000), replace(LOAD, fan_out=1), batches=3)
    assert 0 < run.batches_per_s <= 1.02 * run.bound_batches_per_s


def test_a_batch_asks_all_expanders_where_there_are_fewer_than_it_would_ask():
    fabric = Fabric(trainers=4, expanders=1)
    found = simulate_scale(fabric, LOAD, seed=3)
    assert found.fabric.expanders == 1
    assert found.latencies_s == simulate_scale(fabric, replace(LOAD, fan_out=1), seed=3).latencies_s


def test_expanders_that_do_not_hold_the_tables_are_refused_with_how_many_would():
    memory = replace(read_library().device("cxl-expander"), capacity_bytes=1e9)
    workload = workload_of(read_library().changed({"models.rm1.rows": 1e6}).model("rm1"))
    assert workload.table_bytes == 2.56e9
    check_expanders(3, memory, workload, "small")
    with pytest.raises(DoesNotFit, match=r"the tables take 2.56 GB, and 2 expanders \(small\) have 2 GB: it takes 3 "):
        check_expanders(2, memory, workload, "small")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: replace(FABRIC, trainers=0), "trainers = 0"),
        (lambda: replace(FABRIC, hop_s=-1.0), "hop_s"),
        (lambda: replace(LOAD, lookup_s=math.inf), "lookup_s"),
        (lambda: replace(LOAD, arrivals="poisson", compute_s=0.0), "compute_s = 0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make, named):
    with pytest.raises(ValueError, match=named):
        make()
