"""The events against schedules whose times can be written down, and against what must hold of any schedule."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_lab.sim.device import Compute, Device, Link, Memory
from holdfast_lab.sim.machine import Run, simulate, speed_of_sharer
from holdfast_lab.sim.model import Model, TableGroup, workload_of
from holdfast_lab.sim.system import PREVIOUS, Stage, System

WORKLOAD = workload_of(Model(batch_size=4, tables=(TableGroup(rows=10, dim=4),), bottom=(4,), top=(1,)))

Stages = dict[str, Stage]


def stage(on: str, seconds: float, *after: str, priority: int = 0, **more) -> Stage:
    return Stage(does="given", seconds=seconds, on=tuple(on.split()), after=after, priority=priority, **more)


def work(on: str, does: str, *after: str, **more) -> Stage:
    return Stage(does=does, on=tuple(on.split()), after=after, **more)


def system_of(stages: Stages, devices: Mapping[str, Device] | None = None) -> System:
    roles = sorted({role for each in stages.values() for role in (*each.on, *each.beside)} | set(devices or ()))
    return System(title="test", devices={role: role for role in roles}, stages=stages)


def run(stages: Stages, *, batches: int = 6, **devices: Device) -> Run:
    """Roles without a device are served by one that does one thing at a time."""
    system = system_of(stages, devices)
    processor = Compute(kind="compute", flops_per_s=1.0)
    return simulate(system, {role: devices.get(role, processor) for role in system.devices}, WORKLOAD, batches=batches)


def exactly(value: float):
    return pytest.approx(value, rel=1e-9, abs=0.0)


def begins(found: Run, stage: str) -> list[float]:
    return [span.begin_s for span in sorted(found.spans, key=lambda span: span.batch) if span.stage == stage]


def latency_s(found: Run) -> float:
    """Of the first batch, which has the system for itself."""
    return max(span.end_s for span in found.spans if span.batch == 0)


def chain(seconds: list[float], roles: list[str]) -> Stages:
    names = [f"stage{place}" for place in range(len(seconds))]
    befores = [(), *((name,) for name in names)]
    parts = zip(names, roles, seconds, befores, strict=False)
    return {name: stage(role, each, *before) for name, role, each, before in parts}


DURATIONS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=5)


@settings(max_examples=30)
@given(seconds=st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_a_chain_on_devices_of_its_own_ends_a_batch_per_longest_stage_the_first_after_the_sum_of_all(seconds):
    found = run(chain(seconds, [f"device{place}" for place in range(len(seconds))]))
    assert found.batch_s == exactly(max(seconds))
    assert min(span.end_s for span in found.spans if span.stage == f"stage{len(seconds) - 1}") == exactly(sum(seconds))


@settings(max_examples=30)
@given(seconds=DURATIONS)
def test_a_chain_on_one_device_takes_the_sum_of_its_stages(seconds):
    stages = chain(seconds, ["gpu"] * len(seconds))
    assert run(stages).batch_s == exactly(sum(seconds))
    first, last = "stage0", f"stage{len(seconds) - 1}"
    in_turn = stages | {first: replace(stages[first], after=(PREVIOUS + last,))}
    assert run(in_turn).batch_s == exactly(sum(seconds))
    assert latency_s(run(in_turn)) == exactly(sum(seconds))


@pytest.mark.parametrize(("left_s", "right_s"), [(2.0, 5.0), (5.0, 2.0), (3.0, 3.0)])
def test_a_diamond_takes_its_longer_side(left_s, right_s):
    stages = {
        "top": stage("a", 1.0, "previous.bottom"),
        "left": stage("b", left_s, "top"),
        "right": stage("c", right_s, "top"),
        "bottom": stage("d", 0.5, "left", "right"),
    }
    found = run(stages)
    assert found.batch_s == exactly(1.0 + max(left_s, right_s) + 0.5)
    assert found.stage_s == {"top": 1.0, "left": exactly(left_s), "right": exactly(right_s), "bottom": 0.5}
    pipelined = run(stages | {"top": stage("a", 1.0)})
    assert pipelined.batch_s == exactly(max(left_s, right_s))
    assert latency_s(pipelined) == exactly(1.0 + max(left_s, right_s) + 0.5)


@pytest.mark.parametrize(
    ("awaited", "batch_s"), [("first", 3.0), ("second", 3.0 + 4.0), ("third", 3.0 + 4.0 + 2.0), (None, 4.0)]
)
def test_a_wait_across_batches_closes_a_loop_that_no_batch_is_faster_than(awaited, batch_s):
    stages = chain([3.0, 4.0, 2.0], ["a", "b", "c"])
    first, second, third = stages.values()
    after = () if awaited is None else (f"previous.{awaited}",)
    named = {
        "first": replace(first, after=after),
        "second": replace(second, after=("first",)),
        "third": replace(third, after=("second",)),
    }
    assert run(named).batch_s == exactly(max(batch_s, 4.0))


def test_waiting_for_several_batches_back_shares_the_loop_among_them():
    stages = {
        "first": stage("a", 1.0, after_earlier={"last": 3}),
        "middle": stage("b", 1.0, "first"),
        "last": stage("c", 10.0, "middle"),
    }
    assert run(stages).batch_s == exactly(10.0)
    enough = Compute(kind="compute", flops_per_s=1.0, parallelism=3)
    assert run(stages, c=enough).batch_s == exactly((1.0 + 1.0 + 10.0) / 3)


def unrolled_batch_s(stages: Stages) -> float:
    """Of stages with devices of their own, by the recurrence of their ends: each begins when what it waits for, and
    its own turn in the batch before, has ended. Over 60 batches, which are whole periods of any loop of five stages."""
    before: dict[str, float] = {}
    ends_s = []
    for _ in range(1200):
        now: dict[str, float] = {}
        for name, each in stages.items():
            waits = [
                before.get(w.removeprefix(PREVIOUS), 0.0) if w.startswith(PREVIOUS) else now[w] for w in each.after
            ]
            now[name] = max([before.get(name, 0.0), *waits]) + (each.seconds or 0.0)
        before = now
        ends_s.append(max(now.values()))
    return (ends_s[-1] - ends_s[-61]) / 60


@st.composite
def graphs(draw, *, roles: str | None = None, most: int = 5) -> Stages:
    """Stages that wait for earlier ones of the batch, and for any of the batch before; on the roles, or their own."""
    names = "abcde"[: draw(st.integers(1, most))]
    stages = {}
    for place, name in enumerate(names):
        within = draw(st.lists(st.sampled_from(names[:place]), unique=True)) if place else []
        across = draw(st.lists(st.sampled_from(names), unique=True, max_size=2))
        own = draw(st.lists(st.sampled_from(roles), unique=True, min_size=1, max_size=2)) if roles else [name]
        priority = draw(st.integers(0, 1)) if roles else 0
        waits = (*within, *(PREVIOUS + other for other in across))
        stages[name] = stage(" ".join(own), draw(st.integers(1, 6)), *waits, priority=priority)
    return stages


@settings(max_examples=30)
@given(stages=graphs())
def test_stages_with_devices_of_their_own_go_at_the_pace_of_their_slowest_loop(stages):
    assert run(stages).batch_s == exactly(unrolled_batch_s(stages))


@settings(max_examples=30)
@given(stages=graphs(), chosen=st.integers(0, 4), longer_s=st.integers(0, 5))
def test_where_nothing_shares_a_device_a_slower_one_never_makes_a_batch_shorter(stages, chosen, longer_s):
    name = list(stages)[chosen % len(stages)]
    slower = stages | {name: replace(stages[name], seconds=stages[name].seconds + longer_s)}
    batch_s, slower_s = run(stages).batch_s, run(slower).batch_s
    assert batch_s * (1 - 1e-9) <= slower_s <= (batch_s + longer_s) * (1 + 1e-9)


def test_where_stages_share_a_device_a_slower_one_may_make_a_batch_shorter():
    stages = {
        "a": stage("y", 4.0, "previous.b", "previous.c"),
        "b": stage("x", 4.0, "a", "previous.b", priority=1),
        "c": stage("x", 5.0, "previous.a"),
    }
    slower = stages | {"a": replace(stages["a"], seconds=5.0)}
    assert run(stages).batch_s == exactly(11.0)
    assert run(slower).batch_s == exactly(9.0)


@settings(max_examples=30)
@given(stages=graphs(roles="xyz"), parallelism=st.integers(1, 3))
def test_a_batch_takes_what_its_busiest_device_does_at_least_and_all_of_its_stages_at_most(stages, parallelism):
    found = run(stages, x=Compute(kind="compute", flops_per_s=1.0, parallelism=parallelism))
    busy_s = [busy / (parallelism if role == "x" else 1) for role, busy in found.busy_s.items()]
    assert found.batch_s >= max(busy_s) * (1 - 1e-9)
    assert found.batch_s <= sum(found.stage_s.values()) * (1 + 1e-9)


@settings(max_examples=30)
@given(stages=graphs(roles="xyz"), parallelism=st.integers(1, 3))
def test_stages_begin_after_what_they_wait_for_and_no_device_serves_more_than_it_can(stages, parallelism):
    found = run(stages, x=Compute(kind="compute", flops_per_s=1.0, parallelism=parallelism))
    spans = {(span.batch, span.stage): span for span in found.spans}
    num_batches = max(span.batch for span in found.spans) + 1
    assert len(spans) == len(found.spans) == num_batches * len(stages)
    for (batch, name), span in spans.items():
        assert span.end_s - span.begin_s == pytest.approx(stages[name].seconds)
        assert span.ready_s <= span.begin_s
        for wait in stages[name].after:
            awaited = spans.get((batch - wait.startswith(PREVIOUS), wait.removeprefix(PREVIOUS)))
            assert awaited is None or awaited.end_s <= span.ready_s
    for role in "xyz":
        held = [span for span in found.spans if role in stages[span.stage].on]
        for span in held:
            at_once = sum(other.begin_s <= span.begin_s < other.end_s for other in held)
            assert at_once <= (parallelism if role == "x" else 1)


def test_a_stage_with_two_devices_keeps_others_from_both():
    stages = {
        "both": stage("x y", 4.0, "previous.left", "previous.right"),
        "left": stage("x", 1.0, "previous.both"),
        "right": stage("y", 2.0, "previous.both"),
    }
    found = run(stages, batches=24)
    both = [(span.begin_s, span.end_s) for span in found.spans if span.stage == "both"]
    others = [(span.begin_s, span.end_s) for span in found.spans if span.stage != "both"]
    assert all(end <= begin or other_end <= other_begin for begin, other_end in both for other_begin, end in others)
    assert found.busy_s == {"x": exactly(5.0), "y": exactly(6.0)}
    assert found.batch_s == exactly(6.0)


def test_of_stages_that_wait_for_a_device_the_lowest_priority_is_served_first():
    def order(low: int, high: int) -> list[str]:
        stages = {
            "holder": stage("x", 5.0, "previous.slow", "previous.quick"),
            "slow": stage("x", 2.0, "short", priority=low),
            "quick": stage("x", 1.0, "short", priority=high),
            "short": stage("y", 1.0, "previous.slow", "previous.quick"),
        }
        spans = [span for span in run(stages).spans if span.batch == 0 and span.stage != "short"]
        return [span.stage for span in spans]

    assert order(0, 0) == ["holder", "slow", "quick"]
    assert order(0, -1) == ["holder", "quick", "slow"]
    assert order(1, 0) == ["holder", "quick", "slow"]
    assert order(-1, 0) == ["holder", "slow", "quick"]


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_a_device_that_serves_several_at_once_ends_as_many_batches_in_the_time_of_one(parallelism):
    found = run({"only": stage("x", 6.0)}, x=Compute(kind="compute", flops_per_s=1.0, parallelism=parallelism))
    assert found.batch_s == exactly(6.0)
    stages = {name: stage("x", 6.0) for name in "abcdef"}
    found = run(stages, x=Compute(kind="compute", flops_per_s=1.0, parallelism=parallelism))
    assert found.batch_s == exactly(6 * 6.0 / parallelism)


def test_a_schedule_that_alternates_is_measured_over_whole_periods():
    found = run({"first": stage("x", 1.0), "second": stage("x", 3.0, "first")})
    ends_s = [max(span.end_s for span in found.spans if span.batch == batch) for batch in range(found.steady.stop)]
    between_s = [later - earlier for earlier, later in pairwise(ends_s)]
    assert len(found.steady) == 2
    assert sorted(between_s[-2:]) == [3.0, 5.0]
    assert found.batch_s == exactly(4.0)


@pytest.mark.parametrize("batches", [1, 2, 3, 4, 5, 6, 7, 10, 33])
@pytest.mark.parametrize(
    ("stages", "batch_s"),
    [
        ({"first": stage("x", 1.0), "second": stage("x", 3.0, "first")}, 4.0),
        ({"a": stage("x", 2.0), "b": stage("y", 3.0, "a"), "c": stage("x", 2.0, "b")}, 4.0),
        ({"a": stage("x", 1.0, priority=-1), "b": stage("x", 2.0, "a"), "c": stage("x", 3.0, "b", priority=1)}, 6.0),
    ],
)
def test_how_many_batches_are_run_first_does_not_matter(stages, batch_s, batches):
    assert run(stages, batches=batches).batch_s == exactly(batch_s)


def test_the_last_batches_which_nothing_follows_do_not_count():
    stages = {
        "train": stage("gpu", 2.0, "previous.train"),
        "log": stage("disk", 1.0, "train", priority=1),
        "fetch": stage("disk", 1.5, "previous.train"),
        "next": stage("gpu", 0.5, "fetch", "train"),
    }
    assert run(stages).batch_s == exactly(2.5)
    assert run(stages | {"fetch": stage("disk", 3.0, "previous.train")}).batch_s == exactly(4.0)


def test_energy_is_idle_power_all_the_time_and_the_rest_while_busy():
    watts = {"idle_watts": 10.0, "busy_watts": 110.0}
    processor = Compute(kind="compute", flops_per_s=1.0, **watts)
    link = Link(kind="link", bandwidth_bytes_per_s=1.0, idle_watts=1.0, busy_watts=3.0)
    stages = {"compute": stage("gpu", 3.0, "previous.move"), "move": stage("link", 1.0, "compute")}
    found = run(stages, gpu=processor, link=link, spare=processor)
    assert found.joules_by_role == {
        "gpu": exactly(10 * 4 + 100 * 3),
        "link": exactly(1 * 4 + 2 * 1),
        "spare": exactly(10 * 4),
    }
    assert found.joules_per_batch == exactly(340 + 6 + 40)


def test_the_energy_of_a_device_that_serves_several_at_once_counts_its_busy_part():
    two = Compute(kind="compute", flops_per_s=1.0, parallelism=2, idle_watts=10.0, busy_watts=110.0)
    found = run({"a": stage("gpu", 3.0, "previous.b"), "b": stage("link", 1.0, "a")}, gpu=two)
    assert found.joules_by_role["gpu"] == exactly(10 * 4 + 100 * 3 / 2)


def test_every_module_of_a_memory_takes_its_power_also_those_that_the_host_does_not_reach():
    memory = Memory(
        kind="memory",
        read_bandwidth_bytes_per_s=1.0,
        write_bandwidth_bytes_per_s=1.0,
        modules=5,
        idle_watts=2.0,
        busy_watts=6.0,
    )
    stages = {"a": stage("tables", 3.0, "previous.b"), "b": stage("link", 1.0, "a")}
    of_one_j = 2 * 4 + 4 * 3
    assert run(stages, tables=memory).joules_by_role["tables"] == exactly(5 * of_one_j)
    idler = replace(memory, modules=7, modules_at_work=5)
    assert run(stages, tables=idler).joules_by_role["tables"] == exactly(7 * of_one_j)


ROWS_BYTES_PER_S = WORKLOAD.accesses * WORKLOAD.row_bytes  # so that reading a batch's rows takes a second
TABLES = Memory(
    kind="memory",
    read_bandwidth_bytes_per_s=ROWS_BYTES_PER_S,
    write_bandwidth_bytes_per_s=ROWS_BYTES_PER_S,
    granularity_bytes=16,
    raw_penalty=3.0,
    raw_window_s=8.0,
)


@pytest.mark.parametrize(("gap_s", "is_recent"), [(0.0, True), (7.5, True), (8.0, False), (8.5, False)])
def test_reading_is_slow_where_it_begins_within_the_window_of_the_last_write(gap_s, is_recent):
    stages = {
        "lookup": work("tables", "lookup", "previous.gap"),
        "update": work("tables", "update", "lookup"),
        "gap": stage("gpu", gap_s, "update"),
    }
    found = run(stages, tables=TABLES)
    assert 0 < WORKLOAD.overlap < 1
    slow_s = 1.0 + 2.0 * WORKLOAD.overlap
    assert found.stage_s["lookup"] == exactly(slow_s if is_recent else 1.0)
    assert found.stage_s["update"] == exactly(2.0)
    first = min(found.spans, key=lambda span: span.begin_s)
    assert first.end_s - first.begin_s == exactly(1.0)
    assert found.batch_s == exactly(found.stage_s["lookup"] + 2.0 + gap_s)


def test_only_writes_of_rows_to_the_same_memory_slow_reading_down():
    elsewhere = {
        "lookup": work("tables", "lookup", "previous.update"),
        "update": work("others", "update", "lookup"),
    }
    assert run(elsewhere, tables=TABLES, others=TABLES).stage_s["lookup"] == exactly(1.0)
    logged = {"lookup": work("tables", "lookup", "previous.log"), "log": work("tables", "log_rows", "lookup")}
    assert run(logged, tables=TABLES).stage_s["lookup"] == exactly(1.0)


def test_penalties_that_come_and_go_are_taken_as_their_mean():
    stages = {
        "lookup": work("tables", "lookup"),
        "update": work("tables", "update", "lookup"),
    }
    found = run(stages, tables=replace(TABLES, raw_window_s=0.5))
    lookups_s = {span.end_s - span.begin_s for span in found.spans if span.stage == "lookup"}
    assert len({round(each, 9) for each in lookups_s}) == 2
    assert len(found.steady) == 2
    assert found.stage_s["lookup"] == exactly(1.0 + WORKLOAD.overlap)
    assert found.batch_s == exactly(3.0 + WORKLOAD.overlap)
    assert found.busy_s["tables"] == exactly(found.batch_s)


@pytest.mark.parametrize("more_s", [0.0, 0.25, 1.0, 2.0])
def test_a_device_on_the_critical_path_moves_the_batch_by_what_it_is_slower_and_one_beside_it_by_nothing(more_s):
    def batch_s(link_latency_s: float, other_latency_s: float) -> float:
        stages = {
            "compute": stage("gpu", 4.0, "previous.join"),
            "there": work("link", "move_indices", "compute", part=0.0),
            "back": work("link", "move_indices", "there", part=0.0),
            "beside": work("other", "move_indices", "compute", part=0.0),
            "join": stage("gpu", 1.0, "back", "beside"),
        }
        link = Link(kind="link", bandwidth_bytes_per_s=1.0, latency_s=link_latency_s)
        return run(stages, link=link, other=replace(link, latency_s=other_latency_s)).batch_s

    assert batch_s(2.0, 1.0) == exactly(4.0 + 2 * 2.0 + 1.0)
    assert batch_s(2.0 + more_s, 1.0) == exactly(9.0 + 2 * more_s)
    assert batch_s(2.0, 1.0 + more_s) == exactly(9.0)
    assert batch_s(2.0, 4.0 + more_s) == exactly(9.0 + more_s)


@settings(max_examples=30)
@given(stages=graphs(roles="xy"), exponent=st.integers(-8, 8))
def test_in_another_unit_of_time_everything_is_the_same_to_the_bit(stages, exponent):
    factor = 2.0**exponent
    scaled = {name: replace(each, seconds=each.seconds * factor) for name, each in stages.items()}
    found, other = run(stages), run(scaled)
    assert [(s.batch, s.stage, s.begin_s * factor, s.end_s * factor) for s in found.spans] == [
        (s.batch, s.stage, s.begin_s, s.end_s) for s in other.spans
    ]
    assert other.batch_s == found.batch_s * factor


def test_work_beside_a_processors_holder_makes_that_longer_by_its_part():
    stages = {
        "train": stage("gpu", 4.0, "previous.train"),
        "copy": stage("link", 2.0, "previous.train", beside={"gpu": 0.25}),
    }
    found = run(stages)
    assert found.stage_s["train"] == exactly(4.0 + 0.25 * 2.0)
    assert found.batch_s == exactly(4.5)
    assert found.stage_s["copy"] == exactly(2.0)


def test_a_stage_in_slices_lets_others_have_the_device_between_them():
    def ends_s(slice_s: float) -> dict[str, float]:
        stages = {
            "merge": stage("disk", 6.0, "previous.fetch", "previous.merge", slice_s=slice_s),
            "wait": stage("gpu", 1.5, "previous.fetch", "previous.merge"),
            "fetch": stage("disk", 1.0, "wait", priority=-1),
        }
        return {span.stage: span.end_s for span in run(stages).spans if span.batch == 0}

    assert ends_s(100.0) == {"merge": 6.0, "wait": 1.5, "fetch": 7.0}
    assert ends_s(1.0) == {"merge": 7.0, "wait": 1.5, "fetch": 3.0}


SHARED = Memory(kind="memory", read_bandwidth_bytes_per_s=1e9, write_bandwidth_bytes_per_s=1e9, shared=True)
SLOW = Link(kind="link", bandwidth_bytes_per_s=0.25e9)


@pytest.mark.parametrize(
    ("on", "longer"),
    [(("memory", "memory"), 2.0), (("memory", "memory link"), 4 / 3), (("memory link", "memory"), 4 / 3)],
)
def test_two_that_ask_a_shared_memory_at_once_get_what_they_need_or_half(on, longer):
    befores = ("previous.a", "previous.b")
    stages = {name: work(each, "log_network", *befores) for name, each in zip("ab", on, strict=True)}
    alone = run({"a": work("memory", "log_network", "previous.a")}, memory=SHARED, link=SLOW)
    both = run(stages, memory=SHARED, link=SLOW)
    for name, each in zip("ab", on, strict=True):
        # over the link it needs a quarter of the memory, which is less than its share
        assert both.stage_s[name] == exactly((4 if "link" in each else longer) * alone.batch_s)


@pytest.mark.parametrize(
    ("part", "parts", "speed"),
    [
        (1.0, [1.0], 1.0),
        (1.0, [1.0, 0.25], 0.75),
        (0.25, [0.25, 1.0], 1.0),
        (0.5, [0.5, 0.5], 1.0),
        (0.8, [0.8, 0.8], 0.625),
    ],
)
def test_a_share_is_what_is_needed_or_an_equal_part_of_what_others_leave(part, parts, speed):
    assert speed_of_sharer(part, parts) == exactly(speed)


def test_a_timeline_shows_the_asked_batches_of_steady_state_from_the_first_ones_begin():
    stages = {"a": stage("x", 1.0, "previous.b"), "b": stage("y", 2.0, "a")}
    found = run(stages)
    shown = found.timeline(batches=2)
    assert [(span.stage, span.begin_s, span.end_s) for span in shown] == [
        ("a", 0.0, 1.0),
        ("b", 1.0, 3.0),
        ("a", 3.0, 4.0),
        ("b", 4.0, 6.0),
    ]
    assert shown[-1].batch == found.steady[-1]


SCRIPT = """
from holdfast_lab.sim.library import read_library
found = read_library().run("cxl-b", "rm3", batches=9)
print(found.batch_s.hex(), found.joules_per_batch.hex(), *(f"{s.stage}{s.batch} {s.end_s.hex()}" for s in found.spans))
"""


def test_the_same_declarations_give_the_same_bits_in_every_process():
    outputs = set()
    for hash_seed in ("0", "1", "77"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert len(outputs.pop()) > 1000
