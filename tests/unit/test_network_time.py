"""What is counted of a network's time: its steps, and nothing of what is between them."""

from __future__ import annotations

import pytest

from holdfast_lab.placement import network_time


class Work:
    """Fills caches and steps; tells so much CPU time of others for each."""

    def __init__(self) -> None:
        self.spent = 0.0
        self.done: list[str] = []

    def fill_caches(self) -> None:
        self.done.append("fill")
        self.spent += 100.0

    def step(self) -> None:
        self.done.append("step")
        self.spent += 2.0


def test_caches_are_filled_before_each_step_and_what_others_use_meanwhile_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network_time, "_ROUND_S", 0.0)
    work = Work()
    _, busy_s = network_time._time(work.step, work, lambda: work.spent)  # type: ignore[arg-type]
    assert busy_s == 2.0
    assert work.done == ["fill", "step"] * network_time._MIN_STEPS
