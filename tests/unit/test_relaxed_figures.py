"""What benchmarks/relaxed makes of its trials: paired differences, their intervals, the spread, and what is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relaxed.figures import estimate, lead, price, same_bits, set_back, spread
from relaxed.record import Record
from relaxed.trial import check_recovered
from relaxed.workloads import Crash, Workload, workloads

CRASH = Crash(step=20, lag=10)


def life(digest: str, **auc_at: float) -> dict[str, Any]:
    evaluations = [{"step": int(step[1:]), "auc": auc, "log_loss": 1.0 - auc} for step, auc in auc_at.items()]
    return {"evaluations": evaluations, "digest": digest}


def trial(seed: int, end: float, gap: float) -> dict[str, Any]:
    whole = life("whole", _10=end - 0.03, _20=end - 0.02, _30=end - 0.01, _40=end)
    relaxed = life("relaxed", _20=end - 0.02 + 4 * gap, _30=end - 0.01 + 2 * gap, _40=end + gap)
    return {
        "workload": "some",
        "seed": seed,
        "world": seed // 2,
        "whole": whole,
        "recoveries": [{"crash_step": 20, "lag": 10, **relaxed}, {"crash_step": 20, "lag": 0, **whole}],
    }


TRIALS = [trial(0, 0.70, -0.001), trial(1, 0.72, -0.003), trial(2, 0.80, -0.002)]


def test_an_interval_is_students() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0])
    # 3.182 = t(0.975, 3); the standard error is 1.291 / 2
    assert (found.mean, found.low, found.high) == pytest.approx(
        (2.5, 2.5 - 3.1824 * 0.6455, 2.5 + 3.1824 * 0.6455), rel=1e-3
    )
    assert estimate([-4.0, -3.0]).furthest == pytest.approx(3.5 + 12.706 * 0.5, rel=1e-3)
    assert estimate([7.0]).furthest is None


def test_differences_are_between_runs_of_one_seed() -> None:
    assert price(TRIALS, CRASH, 40, "auc") == pytest.approx([-0.001, -0.003, -0.002])
    assert price(TRIALS, CRASH, 20, "log_loss") == pytest.approx([0.004, 0.012, 0.008])


def test_exact_recovery_is_set_back_by_the_lag_and_relaxed_recovery_leads_by_it() -> None:
    assert set_back(TRIALS, CRASH, "auc") == pytest.approx([-0.01] * 3)
    assert lead(TRIALS, CRASH, "auc") == pytest.approx([0.01 - 0.002, 0.01 - 0.006, 0.01 - 0.004])


def test_the_spread_is_that_of_runs_on_the_same_data() -> None:
    assert spread(TRIALS, 40, "auc") == pytest.approx(0.02 / 2**0.5)
    assert spread([*TRIALS, trial(3, 0.80, 0.0)], 40, "auc") == pytest.approx(0.01)
    assert spread(TRIALS[1:], 40, "auc") is None


def test_bits_are_compared_by_digest() -> None:
    assert same_bits(TRIALS, replace(CRASH, lag=0)) == 3
    assert same_bits(TRIALS, CRASH) == 0


def test_a_recovery_of_another_crash_than_was_meant_is_refused() -> None:
    found = {"step": 20, "cursor": 80, "rows_step": 20, "dense_step": 10, "clean": False}
    check_recovered(found, CRASH, batch_size=4)
    for wrong in ({"dense_step": 12}, {"rows_step": 19}, {"cursor": 40}, {"clean": True}):
        with pytest.raises(RuntimeError, match="was meant"):
            check_recovered(found | wrong, CRASH, batch_size=4)


@pytest.fixture
def workload() -> Workload:
    return replace(workloads(Path("nowhere"), quick=True)[0], name="some")


def test_every_step_that_is_compared_is_evaluated(workload: Workload) -> None:
    for crash in workload.crashes:
        assert {crash.dense_step, *workload.evaluated_from(crash.step)} <= set(workload.evaluated)
        assert crash.step in workload.evaluated_from(crash.step)
        assert workload.last_step in workload.evaluated_from(crash.step)


def test_a_run_that_goes_on_keeps_the_trials_of_the_same_settings_alone(workload: Workload, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Record(path, [workload], memory=tmp_path).add(TRIALS[1])
    again = Record(path, [workload], memory=tmp_path)
    assert again.has("some", 1)
    assert not again.has("some", 0)
    again.add(TRIALS[0])
    assert [each["seed"] for each in json.loads(path.read_text())["trials"]] == [1, 0]
    assert [each["seed"] for each in again.of("some")] == [0, 1]
    with pytest.raises(SystemExit, match="other settings"):
        Record(path, [replace(workload, last_step=workload.last_step + 1)], memory=tmp_path)
