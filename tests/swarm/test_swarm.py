"""The swarm with fresh seeds, a minute or in a sample seconds; and that it would notice what it is there to notice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from defects import DEFECTS
from draw import DENSE_OPTIMIZERS, ROW_OPTIMIZERS, VERBS_AT_REST, VERBS_BESIDE, draw
from swarm import options_of

SECONDS, SECONDS_OF_A_SAMPLE = (float(os.environ.get("SWARM_SECONDS", otherwise)) for otherwise in ("45", "8"))
CAUGHT_WITHIN = 80


def swarm(*options: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(Path(__file__).with_name("swarm.py")), *options]
    return subprocess.run(line, capture_output=True, text=True, check=False)


@pytest.mark.timeout(900)
def test_whatever_is_combined_nothing_is_lost_and_nothing_unnoticed(is_sample: bool) -> None:
    found = swarm("--seconds", str(SECONDS_OF_A_SAMPLE if is_sample else SECONDS), "--failures", "1")
    print(found.stdout)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.dear
@pytest.mark.timeout(900)
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_caught(defect: str) -> None:
    found = swarm(
        *("--plant", defect, "--episodes", str(CAUGHT_WITHIN), "--seed", "77", "--failures", "1"),
        *("--without", "groups,disk", "--no-shrink"),
    )
    assert found.returncode == 1, f"{CAUGHT_WITHIN} episodes did not notice: {defect}\n{found.stdout}{found.stderr}"
    assert "to play it again" in found.stdout


def test_a_seed_draws_one_episode_and_another_another() -> None:
    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


def test_nothing_is_never_drawn() -> None:
    counts = Counter(option for seed in range(600) for option in options_of(draw(seed)))
    verbs = {f"then: {name}" for name in VERBS_AT_REST} | {f"beside: {name}" for name in VERBS_BESIDE}
    kills = {f"kill {how}" for how in ("persist point", "call", "point", "time", "term")}
    rows = {
        f"rows {name}"
        for name in (*ROW_OPTIMIZERS, "with keys", "with keys, left behind", "fp32, sum", "fp16, mean", "bf16, mean")
    }
    for wanted in (*verbs, *kills, *rows, *(f"run optimizer: {name}" for name in DENSE_OPTIMIZERS)):
        assert counts[wanted] > 10, f"{wanted}: {counts[wanted]} of 600"
