"""The trace of a simulated run as a viewer meets it."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast_lab.sim.chrome_trace import event_name, trace_events, write_trace
from holdfast_lab.sim.library import read_library
from holdfast_lab.sim.machine import Run
from holdfast_lab.sim.system import System

LIBRARY = read_library()
REAL_NAMES = {"plan", "wait for loader", "capture", "lookup", "train", "update", "commit"}


def simulated(name: str) -> tuple[Run, System]:
    return LIBRARY.run(name, "rm1"), LIBRARY.system(name)


def complete(run: Run, system: System) -> list[dict]:
    return [event for event in trace_events(run, system) if event["ph"] == "X"]


@pytest.mark.parametrize("name", ["pmem", "cxl-d", "cxl", "scratchpipe", "mtrains"])
def test_every_span_is_there_once_on_each_device_that_it_holds(name: str) -> None:
    run, system = simulated(name)
    roles = {e["tid"]: e["args"]["name"] for e in trace_events(run, system) if e["name"] == "thread_name"}
    found = sorted(
        (event["args"]["step"], event["args"]["stage"], roles[event["tid"]].split(" ")[0], event["ts"], event["dur"])
        for event in complete(run, system)
    )
    expected = sorted(
        (span.batch + 1, span.stage, role, span.begin_s * 1e6, (span.end_s - span.begin_s) * 1e6)
        for span in run.spans
        for role in system.stages[span.stage].on
    )
    assert found == expected


@pytest.mark.parametrize("name", sorted(LIBRARY.systems))
def test_events_of_a_thread_never_overlap(name: str) -> None:
    by_thread = defaultdict(list)
    for event in complete(*simulated(name)):
        by_thread[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for events in by_thread.values():
        assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(sorted(events)))


def test_the_same_work_has_the_name_that_a_real_run_gives_it() -> None:
    undo, redo = LIBRARY.system("cxl-b"), LIBRARY.system("cxl-d")
    assert event_name(undo, "log_rows_before") == "capture"
    assert event_name(redo, "log_rows") == "commit"
    for system in (undo, redo):
        assert {event_name(system, stage) for stage in ("bottom_forward", "interaction_top", "bottom_backward")} == {
            "train"
        }
        assert event_name(system, "log_network") == "commit"
        names = {event_name(system, stage) for stage in system.active}
        assert names - REAL_NAMES == {"doorbell", "move pooled", "move gradients"}


def test_a_relaxed_row_log_is_a_capture_as_well() -> None:
    assert event_name(LIBRARY.system("cxl"), "log_rows_before") == "capture"


def test_a_stage_that_holds_no_device_has_a_thread_of_its_own() -> None:
    run, system = simulated("cxl-d")
    stages = dict(system.stages)
    stages["lookup"] = replace(stages["lookup"], does="given", seconds=1e-3, on=())
    free = replace(system, stages=stages)
    threads = {e["args"]["name"]: e["tid"] for e in trace_events(run, free) if e["name"] == "thread_name"}
    assert {event["tid"] for event in complete(run, free) if event["args"]["stage"] == "lookup"} == {
        threads["no device"]
    }


def test_a_written_trace_is_one_array_of_events_and_replaces_nothing(tmp_path: Path) -> None:
    run, system = simulated("cxl")
    path = tmp_path / "trace.json"
    write_trace(path, run, system)
    events = json.loads(path.read_text())
    assert events == list(trace_events(run, system))
    assert events[0] == {"name": "process_name", "ph": "M", "pid": 2, "args": {"name": "holdfast sim CXL"}}
    with pytest.raises(ConfigError, match="is there already"):
        write_trace(path, run, system)
    write_trace(path, *simulated("pcie"), overwrite=True)
    assert "PCIe" in path.read_text()
