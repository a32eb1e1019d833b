"""TrainingCXL's configurations differ by public switches alone, and the report's verdicts follow from its cells."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from holdfast.files.config import read_config
from holdfast.run.sections import RunConfig
from trainingcxl.batches import drawn
from trainingcxl.models import BATCH, SHAPES
from trainingcxl.report import bars, complaints, write_report
from trainingcxl.simulated import accelerator_of, simulated
from trainingcxl.systems import CONFIGURATIONS, PAPERS, run_toml


def cell(ms: float, simulated_ms: float | None = None) -> dict[str, Any]:
    return {
        "batch_ms": ms,
        "each_ms": [ms] * 10,
        "stage_ms": {"capture": 0.1 * ms, "train": 0.9 * ms},
        "dial": {"declared_s": 1e-3 * ms, "late_s": 0.0},
        "cpu_s": 1e-3,
        "verbs": [("train", 0.0, ms)],
        "background": [("dense", 0.0, ms)],
        "stretch": 50.0,
        "simulated_ms": simulated_ms or ms,
        "simulated_stage_ms": {},
        "accelerator_ms": 1.0,
        "modules": 6,
        "run": "",
        "others_cpus": 0.0,
    }


def record(**ms: float) -> dict[str, Any]:
    times = {
        "pmem": 30.0,
        "pmem-third": 40.0,
        "pmem-2": 60.0,
        "pcie": 8.0,
        "cxl-d": 7.0,
        "cxl-b": 6.0,
        "cxl": 5.0,
        "none": 5.0,
    } | ms
    cells = {f"{model}/{system}": cell(length) for model in SHAPES for system, length in times.items()}
    machine = {"processor": "p", "cpus": 2, "kernel": "k", "medium": "tmpfs", "holdfast_commit": "c"}
    return {"cells": cells, "machine": machine}


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("system", CONFIGURATIONS)
def test_every_cell_is_a_run_that_holdfast_train_takes(model: str, system: str, tmp_path: Path):
    shape, configuration = SHAPES[model], CONFIGURATIONS[system]
    path = tmp_path / "run.toml"
    path.write_text(run_toml(shape, configuration, accelerator_of(shape), 50.0, 14))
    run = read_config(RunConfig, path)
    assert run.pool.dial is not None
    assert run.pool.dial.stretch == 50.0
    assert run.device.dial is not None
    assert run.pool.synchronous == configuration.synchronous


def test_what_ends_a_paper_s_ladder_is_relaxed_and_what_begins_it_is_synchronous():
    assert [CONFIGURATIONS[name].synchronous for name in PAPERS] == [True, True, True, True, False, False]
    assert [CONFIGURATIONS[name].relaxed for name in PAPERS] == [False] * 5 + [True]


@pytest.mark.thorough
def test_no_step_of_the_simulator_s_ladder_goes_up_in_any_model():
    for shape in SHAPES.values():
        ladder = [simulated(shape, CONFIGURATIONS[name], accelerator_of(shape)).batch_s for name in PAPERS]
        assert all(faster < 1.001 * slower for slower, faster in itertools.pairwise(ladder))
        assert ladder[-1] < ladder[3] < ladder[1] < ladder[0]


def test_batches_are_those_of_the_shape():
    source = drawn(tables=3, rows=1000, lookups=4, num_dense=2, batch=BATCH, batches=2)
    block = source.read_block(1)
    assert (source.num_samples, block.num_samples) == (2 * BATCH, BATCH)
    assert all(bags.ids.shape == (BATCH, 4) and bags.ids.max() < 1000 for bags in block.bags)  # type: ignore[union-attr]


def test_bars_that_hold_leave_nothing_to_complain_about():
    missed = complaints(record())
    assert ["all of it" in line for line in missed] == [True]  # parameters of every batch are dearer than none
    assert [bar.value for bar in bars(record())][:3] == [8.0, 6.0, 12.0]


@pytest.mark.parametrize(
    ("ms", "named"),
    [
        ({"pmem": 20.0}, "PMEM, six modules: over CXL"),
        ({"cxl-b": 6.9}, "CXL-B: time less than CXL-D's"),
        ({"cxl": 5.9}, "CXL: time less than CXL-B's"),
        ({"none": 4.5}, "rows every batch"),
    ],
)
def test_a_bar_that_is_missed_is_named(ms: dict[str, float], named: str):
    assert any(named in line for line in complaints(record(**ms)))


def test_an_error_of_the_simulator_is_named_with_the_worst():
    wrong = record()
    wrong["cells"]["rm1/cxl"] = cell(5.0, simulated_ms=7.0)
    assert any("worst error" in line for line in complaints(wrong))


def test_the_report_says_that_it_is_timing_and_has_its_pictures(tmp_path: Path):
    write_report(record(), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "**Timing only.**" in text
    assert {path.name for path in tmp_path.glob("*.png")} == {"stages.png", "batches.png", "energy.png"}
