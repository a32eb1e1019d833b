"""benchmarks/gpu: its arithmetic on made-up numbers, what becomes of parts that fail, and all of it on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu.batches import write_batches
from gpu.host_work import HostTime, host_times
from gpu.process import LeftOut, Part, Settings, Telling, run_part
from gpu.report import Results, lines_of, with_what_was_measured_before
from gpu.resident import BatchArrays, ResidentTables
from gpu.rooflines import Counts, Link, commit_bytes, link_seconds, lookup_bytes, step_bound, update_bytes
from gpu.shapes import make_case
from holdfast.train.step_report import Span, StepReport
from larger.workload import IdDrawer

pytestmark = pytest.mark.thorough

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_bytes_of_kernels_count_unique_rows_once() -> None:
    batch = Counts(num_unique=10, num_lookups=100, num_bags=20, dim=8)
    assert lookup_bytes(batch) == 10 * 32 + 4 * 100 + 4 * 20 + 20 * 32
    assert update_bytes(batch, state_floats=1) == 20 * 32 + 4 * 100 + 8 * 10 + 3 * 10 * 36


def test_a_link_is_as_slow_as_its_slower_way_or_both_together() -> None:
    link = Link(to_device=10.0, to_host=5.0, both=12.0)
    assert link_seconds(20, 0, link) == 2.0
    assert link_seconds(0, 20, link) == 4.0
    assert link_seconds(40, 20, link) == 5.0


def test_the_bound_is_the_largest_of_three_and_says_which() -> None:
    assert commit_bytes(100.0, 10.0) == 420.0
    assert step_bound(resident_ms=1.0, link_ms=2.0, commit_ms=0.5).by == "the host link"
    assert step_bound(resident_ms=3.0, link_ms=2.0, commit_ms=0.5).ms == 3.0


def _report(step: int, began: float, *, plan: float, commit: float, planned: float, back: float) -> StepReport:
    return StepReport(
        step=step,
        durable_step=step,
        loss=0.5,
        samples=1,
        began=began,
        stage_ms={"plan": plan, "lookup": 1.0, "commit": commit},
        planning=Span("loader", 0.0, planned),
        logged_bytes=0,
        log_bytes_free=0,
        device={"update": Span("device", 0.0, back - 1e-4), "rows back": Span("device", 0.0, back)},
    )


def test_host_work_is_what_is_left_without_the_waits() -> None:
    # Step 5 takes batch 6 and retires step 3.
    reports = {
        3: _report(3, 9.0, plan=1.0, commit=1.0, planned=0.0, back=10.006),
        5: _report(5, 10.0, plan=3.0, commit=4.0, planned=0.0, back=11.0),
        6: _report(6, 11.0, plan=1.0, commit=1.0, planned=10.002, back=12.0),
    }
    times = host_times(reports, {3: 5, 5: 7, 6: 8}, window=2)
    assert set(times) == {5}, "nothing is said of steps whose neighbours are not known"
    # plan: 10.000 to 10.003, its batch was there at 10.002; commit: 10.004 to 10.008, the rows were back at 10.006.
    assert astuple(times[5]) == pytest.approx((4.0, 2.0, 2.0), abs=1e-6)


def test_a_batch_that_was_planned_long_ago_is_not_waited_for() -> None:
    reports = {
        1: _report(1, 9.0, plan=1.0, commit=1.0, planned=0.0, back=9.0),
        3: _report(3, 10.0, plan=3.0, commit=4.0, planned=1.0, back=11.0),
    }
    times = host_times(reports, {1: 3}, window=1)
    assert times[3] == HostTime(8.0, 0.0, 0.0)


def _record(device: str = "cuda", **results: dict[str, Any]) -> dict[str, Any]:
    return {
        "settings": {"device": device, "smoke": False},
        "results": {key.replace("__", "/"): value for key, value in results.items()},
    }


_KERNELS = {
    "lookup_ms": 1.0,
    "update_ms": 2.0,
    "lookup_bytes": 85e6,
    "update_bytes": 150e6,
    "both_ms": 4.0,
    "embedding_bag_ms": {"one a table": 8.0, "one of all": 6.0},
}
_STEPS = {
    "median_ms": 1.05,
    "host_work_ms": 0.5,
    "device_bytes_in": 10e6,
    "device_bytes_out": 20e6,
    "dense_bytes_in": 1e6,
    "dense_bytes_out": 2e6,
}
_MACHINE = {
    "machine__device_copy": {"bytes_per_s": 100e9},
    "machine__link": {"to_device": 50e9, "to_host": 50e9, "both": 80e9, "bytes": 1},
    "machine__host_copy": {"bytes_per_s": 100e9},
}


def _line(record: dict[str, Any], beginning: str) -> Any:
    (found,) = [line for line in lines_of(Results(record)) if line.what.startswith(beginning)]
    return found


def test_a_line_says_whether_its_bar_is_met() -> None:
    record = _record(**_MACHINE, kernels__kaggle__skewed=_KERNELS)
    lookup, update = (_line(record, f"{kernel}, kaggle, skewed") for kernel in ("lookup", "update"))
    assert (lookup.value, lookup.met) == (pytest.approx(0.85), True)
    assert (update.value, update.met) == (pytest.approx(0.75), False)
    assert _line(record, "lookup and update, kaggle, skewed").value == 1.5, "the faster of torch's two is what counts"


def test_a_step_is_held_against_the_largest_bound() -> None:
    record = _record(
        **_MACHINE, steps__mlperf__resident={"median_ms": 1.0}, **{"steps__mlperf__scratchpad, 1/10": _STEPS}
    )
    over, beside, host = (
        _line(record, f"mlperf, tables 10 × the scratchpad: {what}") for what in ("step", "speed", "host")
    )
    assert (over.value, over.met) == (pytest.approx(1.05), True)
    assert (beside.value, beside.met) == (pytest.approx(1 / 1.05), True)
    assert (host.value, host.met) == (pytest.approx(0.5 / 1.05), False)


def test_numbers_of_a_processor_meet_and_miss_nothing() -> None:
    line = _line(_record("cpu", **_MACHINE, kernels__kaggle__skewed=_KERNELS), "lookup, kaggle, skewed")
    assert (line.met, line.why) == (None, "no figure of a GPU")


def test_what_was_not_measured_says_why() -> None:
    record = _record(kernels__kaggle__skewed=_KERNELS, machine__device_copy={"failed": "OutOfDeviceMemory: 5 bytes"})
    line = _line(record, "lookup, kaggle, skewed")
    assert (line.value, line.met, line.why) == (None, None, "failed: OutOfDeviceMemory: 5 bytes")


def _run(part: Part, tmp_path: Path, seconds: float) -> dict[str, dict[str, Any]]:
    return dict(run_part(part, Settings(device="cpu", smoke=True, medium=tmp_path), tmp_path, seconds))


def test_a_run_that_had_no_time_for_all_keeps_what_was_measured_before_and_says_when() -> None:
    def record(day: int, **results: dict[str, Any]) -> dict[str, Any]:
        machine = {"holdfast_commit": f"commit {day}"}
        return {"date": f"2026-11-0{day}T00:00", "machine": machine, "results": results}

    first = record(1, kernels={"ms": 1}, links={"ms": 1}, steps={"ms": 1})
    second = record(2, links={"ms": 2}, steps={"left_out": "time was up"}, gather={"left_out": "time was up"})
    third = record(3, steps={"ms": 3}, links={"failed": "it fell"})
    both = with_what_was_measured_before(second, first)
    assert {name: found.get("ms") for name, found in both["results"].items()} == {
        "kernels": 1, "links": 2, "steps": 1, "gather": None,
    }  # fmt: skip
    assert both["kept"] == dict.fromkeys(("kernels", "steps"), "2026-11-01, holdfast commit 1")
    newest = with_what_was_measured_before(third, both)
    assert newest["results"] == {"kernels": {"ms": 1}, "steps": {"ms": 3}, "links": {"failed": "it fell"}}
    assert newest["kept"] == {"kernels": "2026-11-01, holdfast commit 1"}


def test_a_part_that_dies_loses_only_what_it_had_not_told(tmp_path: Path) -> None:
    def work(telling: Telling, settings: Settings, directory: Path) -> None:
        telling.measure("first", lambda: {"value": 1})
        telling.measure("second", lambda: 1 // 0)
        os._exit(9)

    found = _run(Part("dying", ("first", "second", "third", "fourth"), 1, work), tmp_path, 60)
    assert found["first"]["value"] == 1
    assert found["second"]["failed"].startswith("ZeroDivisionError")
    assert found["third"] == found["fourth"] == {"failed": "its process ended without it (exit status 9)"}


def test_a_part_that_cannot_begin_says_why_for_all_it_has(tmp_path: Path) -> None:
    def work(telling: Telling, settings: Settings, directory: Path) -> None:
        raise MemoryError("no room for a pool")

    found = _run(Part("large", ("first", "second"), 1, work), tmp_path, 60)
    assert all(result["failed"] == "MemoryError: no room for a pool" for result in found.values())
    assert list(found) == ["first", "second"]


def test_a_part_whose_time_is_up_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.process._GRACE_S", 0.1)

    def leave_out() -> dict[str, Any]:
        raise LeftOut("wants a GPU")

    def work(telling: Telling, settings: Settings, directory: Path) -> None:
        telling.measure("other", leave_out)
        telling.measure("long", lambda: {"value": 1}, needs_s=1e6)
        time.sleep(600)

    began = time.monotonic()
    found = _run(Part("hanging", ("other", "long", "last"), 1, work), tmp_path, 1)
    assert time.monotonic() - began < 60
    assert found["other"]["left_out"] == "wants a GPU"
    assert "it may take" in found["long"]["left_out"] and "was stopped" in found["last"]["left_out"]


@pytest.mark.parametrize("name", ["kaggle", "rm1", "mlperf"])
def test_filling_batches_hold_the_most_popular_rows_each_once(name: str, tmp_path: Path) -> None:
    case = make_case(name, smoke=True)
    source, num_filling = write_batches(case, tmp_path / "ids", 2)
    assert source.num_batches == num_filling + 2
    rows_of = [[np.unique(of_table) for of_table in source.read_ids(number)] for number in range(num_filling)]
    most = max(rows.size for of_batch in rows_of for rows in of_batch)
    assert most * 8 <= case.shape.num_embeddings // 100, "a window of them must fit a hundredth"
    drawer = IdDrawer(source.workload)
    for table in range(case.shape.num_tables):
        rows = np.sort(np.concatenate([of_batch[table] for of_batch in rows_of]))
        np.testing.assert_array_equal(rows, drawer.hottest(table, rows.size))


def test_resident_tables_look_up_and_update_as_torch_does() -> None:
    case = make_case("rm1", smoke=True)
    shape, device = case.shape, torch.device("cpu")
    ids = torch.randint(0, 50, (shape.num_tables, shape.batch_size, shape.lookups_per_bag))
    tables = ResidentTables(shape, device)
    batch = BatchArrays.of(ids.numpy(), shape, device)
    old = tables.weights.clone().view(shape.num_tables, shape.num_embeddings, -1).requires_grad_()
    expected = torch.cat([old[table][of_table].sum(1) for table, of_table in enumerate(ids)], dim=1)
    torch.testing.assert_close(tables.lookup(batch), expected)

    grad = torch.randn_like(expected)
    expected.backward(grad)
    assert old.grad is not None
    squares = old.grad.square().mean(-1, keepdim=True)
    new = old.detach() - 0.01 * old.grad / (squares.sqrt() + 1e-8)
    tables.update(batch, grad)
    torch.testing.assert_close(tables.weights, new.view_as(tables.weights), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(tables.state, squares.view_as(tables.state), rtol=1e-4, atol=1e-8)
    assert batch.counts.num_unique == len({(t, int(i)) for t, of_table in enumerate(ids) for i in of_table.flatten()})


def test_everything_runs_on_the_processor(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpu", "--device", "cpu", "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"replay: cd benchmarks && {' '.join(command[1:])}\n{done.stdout}\n{done.stderr}"
    results = json.loads((tmp_path / "results.json").read_text())
    left_out = {key for key, result in results["results"].items() if "left_out" in result}
    assert left_out and all("compile" in key or "graphs" in key for key in left_out), "only a GPU has those"
    for line in results["lines"]:
        assert line["met"] is None, "a processor meets no bar of a GPU"
        assert line["value"] is not None or line["why"].startswith("left out"), line
    assert "They mean nothing" in done.stdout and done.stdout.rstrip().endswith("|"), "the table comes last"
    assert (tmp_path / "report.md").exists()
