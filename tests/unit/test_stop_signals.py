"""A signal that stops a command does so whatever became of the streams that it is said to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_runs import CONFIG
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


def test_a_run_whose_output_nobody_reads_says_by_its_status_that_a_signal_stopped_it(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "holdfast", "train", config, "--pool", tmp_path / "pool", "--steps", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stderr is not None
        assert b"training starts at step 1" in run.stdout.readline()
        run.stdout.close()
        run.send_signal(signal.SIGINT)
        said = run.stderr.read()
    assert run.returncode == 128 + signal.SIGINT, said
