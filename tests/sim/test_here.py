"""The simulated holdfast goes to the right limit where one thing dominates, and reacts to the machine as it should."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from holdfast.errors import ConfigError
from holdfast.train.step_report import StepReport
from holdfast.train.trace import EVENT_NAMES
from holdfast_lab.placement.host import Host
from holdfast_lab.placement.ladder import Rung
from holdfast_lab.placement.network_time import NetworkTime
from holdfast_lab.placement.program import Demand, TableDemand
from holdfast_lab.placement.reuse import ReuseCurve, expected_reuse
from holdfast_lab.placement.row_costs import RowCosts
from holdfast_lab.placement.step_time import StepInputs, StepOptions, predict_step, step_costs
from holdfast_lab.placement.tiers import Tier
from holdfast_lab.sim.here import HereStep, Loop, simulate_here, system_here
from holdfast_lab.sim.machine import speed_beside, speed_of_holder

ROWS, UNIQUE, IDS, DIM = 1_000_000, 20_000.0, 25_000.0, 16
VERBS = {
    "capture": RowCosts(step_us=100.0, row_ns=20.0, row_byte_ns=0.5),
    "lookup": RowCosts(step_us=50.0, id_ns=10.0),
    "train": RowCosts(step_us=20.0),
    "update": RowCosts(step_us=80.0, row_ns=30.0, id_ns=12.0),
    "commit": RowCosts(step_us=60.0, dense_byte_ns=0.2),
}
IN_PLACE = Host(
    store="in_place", plan_id_ns=6.0, plan_row_ns=8.0, commit_step_us=20.0, commit_row_ns=1.0,
    commit_dense_byte_ns=0.2, verbs=VERBS,
    **{field.name: sum(getattr(costs, field.name) for costs in VERBS.values()) for field in fields(RowCosts)},
)  # fmt: skip
LOG_STORE = replace(
    IN_PLACE, store="log", collect_row_ns=30.0, fetch_row_ns=400.0, merge_row_ns=50.0, merge_request_ns=500.0,
    fetches_per_s=800_000.0, merge_requests_per_s=400_000.0,
)  # fmt: skip
NETWORK = NetworkTime(network_s=0.05, displaced=0.5, reading_s=0.001)
DISK = Tier(
    name="ssd", kind="block", capacity_bytes=10**12, read_bandwidth_bytes_per_s=2e9, write_bandwidth_bytes_per_s=1e9,
    read_latency_ns=80_000, access_granularity_bytes=512, random_reads_per_s=1e5, sync_latency_ns=30_000,
)  # fmt: skip


def inputs(host: Host = LOG_STORE, network: NetworkTime = NETWORK, medium: Tier = DISK, **options: int) -> StepInputs:
    ladder = (Rung(rows=ROWS, access_share=1.0, unique_rows_per_batch=UNIQUE),)
    table = TableDemand(name="C1", weight_bytes=4 * DIM, state_bytes=4, accesses_per_batch=IDS, ladder=ladder)
    return StepInputs(
        demand=Demand(tables=(table,), dense_bytes=1_000_000),
        curves=[ReuseCurve(expected_reuse(np.array([ROWS]), np.array([UNIQUE / ROWS])), ROWS)],
        network=network,
        host=host,
        medium=medium,
        options=StepOptions(**{"scratchpad_bytes": 20_000_000, "log_bytes": 200_000_000} | options),
    )


def slower_disk(factor: float) -> Host:
    return replace(
        LOG_STORE,
        fetches_per_s=LOG_STORE.fetches_per_s / factor,
        merge_requests_per_s=LOG_STORE.merge_requests_per_s / factor,
    )


def step(given: StepInputs, **loop: int) -> HereStep:
    return simulate_here(given, Loop(**loop))


@pytest.mark.parametrize("displaced", [0.2, 1.0, 1.2])
@pytest.mark.parametrize("host", [IN_PLACE, LOG_STORE])
def test_where_computing_limits_a_step_takes_its_verbs_and_what_other_threads_displace(
    host: Host, displaced: float
) -> None:
    given = inputs(host, replace(NETWORK, displaced=displaced))
    costs = step_costs(given)
    displaced_s = sum(given.network.displaced_by(what) * cpu_s for what, cpu_s in costs.cpu.items())
    expected_s = costs.network_s + costs.rows_s + displaced_s
    assert predict_step(given).limited_by == "compute"
    assert step(given).ms == pytest.approx(1e3 * expected_s)
    assert step(given).ms == pytest.approx(predict_step(given).ms)


@pytest.mark.parametrize(("workers", "host"), [(1, IN_PLACE), (1, LOG_STORE), (2, IN_PLACE)])
def test_where_the_loader_limits_a_step_takes_as_long_as_a_batch_of_it(workers: int, host: Host) -> None:
    given = inputs(host, replace(NETWORK, reading_s=0.5, displaced=0.1))
    found = step(given, workers=workers, prefetch=4)
    assert found.ms == pytest.approx(1e3 * step_costs(given).cpu["plan"] / workers)
    assert found.stage_ms["plan"] > 0.5 * found.ms


def test_where_the_disk_limits_a_step_takes_all_that_the_disk_does_for_it() -> None:
    given = inputs(slower_disk(40))
    found = step(given)
    expected_s = sum(step_costs(given).disk.values()) + 1e-9 * DISK.sync_latency_ns
    assert found.ms == pytest.approx(1e3 * expected_s, rel=1e-6)
    assert found.busy_ms["disk"] == pytest.approx(found.ms, rel=1e-6)
    assert found.stage_ms["capture"] > 0.5 * found.ms


def test_alone_on_the_machine_each_verb_takes_what_the_probe_says() -> None:
    given = inputs(IN_PLACE, replace(NETWORK, displaced=0.0))
    amounts = step_costs(given).amounts
    expected_ms = {verb: 1e3 * costs.seconds(amounts) for verb, costs in VERBS.items()}
    expected_ms["train"] += 1e3 * NETWORK.network_s
    assert step(given).stage_ms == pytest.approx(expected_ms | {"plan": 0.0})


def test_a_slower_disk_moves_a_log_stores_step_and_not_one_in_place() -> None:
    slow_disk = replace(DISK, write_bandwidth_bytes_per_s=1e7, sync_latency_ns=5_000_000)
    assert step(inputs(IN_PLACE, medium=slow_disk)).ms == step(inputs(IN_PLACE)).ms
    assert step(inputs(LOG_STORE, medium=slow_disk)).ms > 1.5 * step(inputs(LOG_STORE)).ms


def test_without_a_batch_of_lead_training_waits_for_its_rows_and_one_batch_hides_them() -> None:
    given = inputs(LOG_STORE, replace(NETWORK, displaced=0.0))
    costs = step_costs(given)
    alone, ahead = step(given, window=1), step(given, window=2)
    fetching_ms = 1e3 * (costs.cpu["collect"] + costs.disk["fetch"])
    disturbed_ms = fetching_ms + 1e3 * (costs.log_s + costs.disk["merge"])
    assert fetching_ms <= alone.stage_ms["capture"] - ahead.stage_ms["capture"] <= disturbed_ms
    assert ahead.ms == pytest.approx(1e3 * (costs.network_s + costs.rows_s))
    assert step(given, window=0).ms == alone.ms


def test_a_window_that_the_scratchpad_has_no_room_for_is_a_smaller_one() -> None:
    small = inputs(scratchpad_bytes=int(1.5 * UNIQUE * 110))
    assert step(small, window=8).ms == step(small, window=1).ms


def test_where_the_log_takes_longest_a_step_takes_as_long() -> None:
    given = inputs(medium=replace(DISK, sync_latency_ns=200_000_000))
    found = step(given)
    assert found.ms == pytest.approx(1e3 * (step_costs(given).log_s + step_costs(given).disk["fetch"]), rel=0.15)
    assert max(found.stage_ms, key=lambda verb: found.stage_ms[verb]) in ("commit", "capture")


def with_victims(given: StepInputs, victims: Tier) -> StepInputs:
    return replace(given, victim_medium=victims).with_options(victim_bytes=68 * 200_000)


def test_where_victims_take_longest_a_step_takes_as_long() -> None:
    slow = replace(DISK, name="cxl", kind="byte", random_reads_per_s=None, write_bandwidth_bytes_per_s=1e7)
    given = with_victims(inputs(), slow)
    assert predict_step(given).limited_by == "victims"
    assert step(given).ms == pytest.approx(predict_step(given).ms, rel=0.02)


@pytest.mark.thorough
def test_where_the_disk_limits_victims_make_a_step_shorter() -> None:
    fast = replace(DISK, name="cxl", kind="byte", read_bandwidth_bytes_per_s=2e10, write_bandwidth_bytes_per_s=1e10)
    fast = replace(fast, access_granularity_bytes=64, random_reads_per_s=5e6)
    without = inputs(slower_disk(40))
    given = with_victims(without, fast)
    assert step(given).ms < 0.9 * step(without).ms
    assert step(given).ms == pytest.approx(predict_step(given).ms, rel=0.05)


def test_background_work_costs_nothing_while_training_waits_for_the_disk() -> None:
    greedy = replace(slower_disk(10), collect_row_ns=300.0)
    assert step(inputs(greedy)).ms == pytest.approx(step(inputs(slower_disk(10))).ms, rel=1e-6)


def test_capturing_ahead_takes_the_copying_off_the_training_thread() -> None:
    given = inputs(IN_PLACE, replace(NETWORK, displaced=0.0))
    copied_ms = 1e-6 * VERBS["capture"].row_byte_ns * step_costs(given).amounts.row_bytes
    plain, ahead = step(given), step(given, capture_ahead=True)
    assert ahead.ms == pytest.approx(plain.ms - copied_ms)
    assert ahead.stage_ms["capture_ahead"] == pytest.approx(plain.stage_ms["capture"] - copied_ms)
    assert ahead.stage_ms["capture"] == 0.0


def test_rare_dense_states_let_two_steps_be_on_their_way() -> None:
    slow_log = inputs(medium=replace(DISK, sync_latency_ns=30_000_000))
    assert step(slow_log, dense_interval=8).ms <= step(slow_log).ms


@pytest.mark.parametrize("host", [IN_PLACE, LOG_STORE])
def test_stages_of_the_training_thread_have_the_names_of_a_real_trace(host: Host) -> None:
    system = system_here(inputs(host), Loop())
    verbs = ("plan", "capture", "lookup", "train", "update", "commit")
    of_thread = [name for name, stage in system.stages.items() if stage.on == ("training thread",)]
    assert of_thread == [EVENT_NAMES.get(verb, verb) for verb in verbs]
    assert set(step(inputs(host)).stage_ms) == set(verbs)
    assert "stage_ms" in {field.name for field in fields(StepReport)}


def test_who_asks_for_little_of_a_processor_gets_it_and_the_others_share_the_rest_alike() -> None:
    assert speed_of_holder([]) == 1.0
    assert (speed_of_holder([0.2]), speed_beside(0.2, [0.2])) == pytest.approx((0.8, 1.0))
    assert (speed_of_holder([1.0]), speed_beside(1.0, [1.0])) == pytest.approx((0.5, 0.5))
    assert (speed_of_holder([0.1, 1.0]), speed_beside(1.0, [0.1, 1.0])) == pytest.approx((0.45, 0.45))
    assert (speed_of_holder([1.5]), speed_beside(1.5, [1.5])) == pytest.approx((0.25, 0.5))


def test_more_than_all_of_a_processor_is_not_taken_from_its_holder() -> None:
    assert speed_of_holder([3.0]) == 0.0
    given = inputs(IN_PLACE, replace(NETWORK, displaced=30.0))
    costs = step_costs(given)
    most_s = costs.network_s + costs.rows_s + 3 * sum(costs.cpu.values())
    assert step(given).ms < 1e3 * most_s < predict_step(given).ms


def test_the_same_probe_gives_the_same_bits() -> None:
    assert step(inputs()).run.spans == step(inputs()).run.spans


def test_a_probe_that_did_not_tell_verbs_apart_is_refused() -> None:
    with pytest.raises(ConfigError, match="tiers probe"):
        step(inputs(replace(IN_PLACE, verbs=None)))


@pytest.mark.parametrize("wrong", [{"window": -1}, {"prefetch": 0}, {"workers": 0}, {"dense_interval": 0}])
def test_a_loop_that_cannot_run_is_refused_by_name(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Loop(**wrong)
