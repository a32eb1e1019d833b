"""A signal that stops a command does so whatever became of the streams that it is said to."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from holdfast.cli.stop_signals import StopSignals


@pytest.fixture
def stderr_that_nobody_reads() -> Iterator[None]:
    """As Ctrl-C leaves it, which ends a `tee` before the run."""
    before = os.dup(2)
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(reader), os.close(writer)
    yield
    os.dup2(before, 2)
    os.close(before)


@pytest.mark.usefixtures("stderr_that_nobody_reads")
def test_a_run_whose_output_nobody_reads_is_stopped_between_two_steps_or_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "stdout", None)
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_wanted() and not ended
        stop._at -= 1.0
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM]
