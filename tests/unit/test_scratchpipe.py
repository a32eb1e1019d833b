"""ScratchPipe's systems differ by public switches alone, batches have the skew that is said, and the report's verdict
follows from its cells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.files.config import read_config
from holdfast.run.sections import RunConfig
from scratchpipe.batches import BATCH, ROWS, SKEWS, TABLES, Drawn, Workload, drawn
from scratchpipe.cells import SECTIONS, cells
from scratchpipe.report import complaints, over_static, write_report
from scratchpipe.simulated import Ways, accelerator_of, predicted_s, ways_of
from scratchpipe.systems import (
    LINK,
    MODES,
    ROW_OF_LOG_BYTES,
    Accelerator,
    Log,
    log_bandwidth,
    run_toml,
    scratchpad_rows,
)

V100 = Accelerator(bottom_forward_s=1e-4, top_s=1e-3, bottom_backward_s=1e-4)
SMALL = Workload(skew="medium", cache=0.001, lookups=2)


def source_of(workload: Workload, *, batches: int = 3) -> Drawn:
    return Drawn(lookups=workload.lookups, exponent=workload.exponent, fill=workload.fill_batches, batches=batches)


def read(mode: str, path: Path, workload: Workload = SMALL) -> RunConfig:
    text = run_toml(
        workload, MODES[mode], V100, rows=1000, log_bytes_per_s=LINK, stretch=20.0, fill=2, batches=5
    )  # fmt: skip
    path.write_text(text)
    return read_config(RunConfig, path)


@pytest.mark.parametrize("mode", MODES)
def test_every_system_is_a_run_that_holdfast_train_takes(mode: str, tmp_path: Path):
    run = read(mode, tmp_path / "run.toml")
    assert run.device.dial is not None
    assert (run.pool.dial is None) == (mode == "dram")
    assert run.pool.dial is None or run.pool.dial.duplex
    assert run.train.steps == 7


def test_systems_differ_in_window_in_what_is_in_turn_and_in_what_is_kept(tmp_path: Path):
    runs = {mode: read(mode, tmp_path / "run.toml") for mode in MODES}
    switches = {mode: (run.pool.medium, run.train.window, run.pool.synchronous) for mode, run in runs.items()}
    assert switches == {
        "dram": ("memory", 0, False),
        "none": ("memory", 0, True),
        "static": ("block", 0, True),
        "static-beside": ("block", 0, False),
        "lru": ("block", 0, False),
        "straw": ("block", 1, True),
        "forward": ("block", 4, False),
    }
    assert {name for name, mode in MODES.items() if mode.keeps} == {"static", "static-beside"}


def test_a_row_of_the_run_takes_as_long_as_a_link_takes_for_those_that_it_stands_for(tmp_path: Path):
    dial = read("lru", tmp_path / "run.toml").pool.dial
    assert dial is not None
    row_s = dial.figures[3] / dial.figures[5]
    assert row_s == pytest.approx(20 * 64 * SMALL.row_bytes / LINK)


def test_a_log_takes_as_long_as_the_rows_that_were_missed_would_or_as_all_of_them():
    bytes_of_log = 1000 * (SMALL.row_bytes + ROW_OF_LOG_BYTES)
    assert bytes_of_log / log_bandwidth(SMALL, Log.WRITE_BACK, 1000, 250) == pytest.approx(250 * SMALL.row_bytes / LINK)
    assert log_bandwidth(SMALL, Log.EVERY_ROW, 1000, 250) == LINK


def test_batches_have_the_skew_that_is_said_and_the_filling_brings_what_was_used_last():
    workload = replace(SMALL, skew="high")
    source = drawn(lookups=2, exponent=workload.exponent, fill=workload.fill_batches, batches=40)
    assert isinstance(source, Drawn)
    assert source.read_block(0).num_samples == BATCH
    ids = source.ids[0, workload.fill_batches :].ravel()
    hot = np.isin(ids, source.hottest(0, ROWS // 50)).mean()
    assert 0.85 < hot < 0.94  # 0.894 of Zipf's 1.2
    filled = source.ids[0, : workload.fill_batches].ravel()
    assert np.unique(filled).size == filled.size >= workload.cached_rows
    assert np.isin(source.hottest(0, 10), filled[-40:]).sum() > 5  # what is asked for most was used last


def test_uniform_ids_are_drawn_from_all_rows_alike():
    source = source_of(replace(SMALL, skew="uniform", lookups=20), batches=20)
    halves = (source.ids[0, -20:] < ROWS / 2).mean()
    assert 0.47 < halves < 0.53


def test_what_a_static_cache_lacks_are_the_rows_beside_the_hottest():
    source = source_of(SMALL)
    kept = [set(source.hottest(table, SMALL.cached_rows).tolist()) for table in range(TABLES)]
    lacks = [
        sum(len(set(source.ids[table, number].ravel().tolist()) - kept[table]) for table in range(TABLES))
        for number in range(SMALL.fill_batches, source.ids.shape[1])
    ]
    assert source.missed_rows(SMALL.cached_rows) == pytest.approx(np.mean(lacks))
    assert source.most_missed(SMALL.cached_rows) == max(lacks)
    room = scratchpad_rows(SMALL, MODES["static"], source) - TABLES * SMALL.cached_rows
    assert room == 2 * max(lacks)
    assert scratchpad_rows(SMALL, MODES["forward"], source) == TABLES * SMALL.cached_rows


def test_what_is_in_turn_adds_up_and_of_what_is_side_by_side_the_longest_counts():
    ways = Ways(fetch_s=3.0, write_s=5.0, train_s=1.0)
    found = {name: predicted_s(mode, ways) for name, mode in MODES.items() if name != "dram"}
    assert found == {"none": 9, "static": 9, "static-beside": 5, "lru": 5, "straw": 9, "forward": 5}
    assert predicted_s(MODES["lru"], Ways(fetch_s=3.0, write_s=1.0, train_s=1.0)) == 4.0


def test_without_a_cache_all_rows_of_a_batch_cross_and_in_fast_memory_none():
    none, dram = (ways_of(SMALL, MODES[mode], V100, 100.0, LINK) for mode in ("none", "dram"))
    assert none.fetch_s == none.write_s == pytest.approx(64 * 100 * SMALL.row_bytes / LINK)
    assert (dram.fetch_s, dram.write_s) == (0.0, 0.0)
    assert predicted_s(MODES["dram"], dram) == pytest.approx(V100.total_s)


def test_a_larger_row_takes_the_accelerator_longer():
    assert (
        accelerator_of(Workload(skew="high", dim=128)).total_s > accelerator_of(Workload(skew="high", dim=16)).total_s
    )


def test_every_skew_has_every_system_and_a_cell_comes_once():
    of_skew = {(cell.workload.skew, cell.mode) for cell in SECTIONS["skew"]}
    assert of_skew == {(skew, mode) for skew in SKEWS for mode in MODES}
    everything = cells(tuple(SECTIONS), quick=False)
    assert len({cell.name for cell in everything}) == len(everything)
    assert len(cells((), quick=True)) < 6


def record(**ms: float) -> dict[str, Any]:
    """Times of the skews' cells, by mode."""
    times = {
        "dram": 1.0,
        "none": 9.0,
        "static": 6.0,
        "static-beside": 4.0,
        "lru": 4.0,
        "straw": 5.0,
        "forward": 2.0,
    } | ms
    measured = {}
    for cell in cells(("skew", "durable"), quick=False):
        measured[cell.name] = {
            "batch_ms": times[cell.mode],
            "predicted_ms": times[cell.mode],
            "each_ms": [times[cell.mode]] * 4,
            "counts": {"rows_missed": 10.0, "read_requests": 9.0, "late_s": 0.0},
            "cpu_ms": 0.1,
            "unique_rows": 100.0,
            "predicted_missed_rows": 10.0,
            "fetch_ms": 1.0,
            "write_ms": 1.0,
            "train_ms": 1.0,
            "stretch": 20.0,
            "others_cpus": 0.0,
        }
    machine = {"processor": "p", "cpus": 2, "kernel": "k", "medium": "tmpfs", "holdfast_commit": "c"}
    library = {Workload(skew="low").name: {"static": 4.2, "lru": 3.0, "forward": 2.0}}
    return {"cells": measured, "library": library, "machine": machine}


def test_the_bar_is_the_mean_of_all_skews_and_nothing_less():
    assert over_static(record()["cells"]) == 3.0
    assert complaints(record()) == []
    assert "2.40 ×" in complaints(record(static=4.8))[0]
    some = record(static=4.8)
    del some["cells"][f"{Workload(skew='high').name}/static"]
    assert complaints(some) == []  # not measured


def test_the_report_says_that_it_is_timing_and_has_its_picture(tmp_path: Path):
    write_report(record(), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "**Timing only.**" in text
    assert "**3.00**; 3.00; 2.10" in text  # measured, by arithmetic, the simulator's
    assert (tmp_path / "times.png").stat().st_size > 0
