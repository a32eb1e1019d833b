"""The trace of a run as a viewer meets it."""

from __future__ import annotations

import errno
import json
import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from cli_runs import Commands, start
from holdfast.errors import ConfigError
from holdfast.train import observe, trace
from holdfast.train.metrics import Evaluation
from holdfast.train.observe import Observers
from holdfast.train.step_report import Span, StepReport
from holdfast.train.trace import TraceFile

NO_ROOM = "No space left on device; free space there, or inodes (df -i)"
pytestmark = pytest.mark.dear

VERBS = ["wait for loader", "capture", "lookup", "train", "update", "commit"]
EVALUATION = Evaluation(auc=0.5, log_loss=0.7, samples=2, positives=1)


@pytest.fixture
def holdfast(pool_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Commands:
    return Commands(pool_root, monkeypatch, capfd)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def step_at(began: float, step: int, seconds: float = 0.006) -> StepReport:
    stages = ("plan", "capture", "lookup", "train", "update", "commit")
    return StepReport(
        step=step,
        durable_step=step - 1,
        loss=0.7,
        samples=2,
        began=began,
        stage_ms=dict.fromkeys(stages, seconds * 1e3 / len(stages)),
        planning=Span("holdfast-loader-0", began, began + 0.001),
        logged_bytes=4096,
        log_bytes_free=1 << 20,
    )


def write_steps(file: TraceFile, first: int, last: int) -> None:
    began = time.perf_counter()
    for step in range(first, last + 1):
        file.step(step_at(began + step * 0.006, step), 1.0)


def events_of(path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text())


def complete(events: list[dict[str, object]]) -> list[dict[str, object]]:
    return [event for event in events if event["ph"] == "X"]


def steps_of(events: list[dict[str, object]], name: str = "commit") -> list[int]:
    return [event["args"]["step"] for event in complete(events) if event["name"] == name]


def test_a_run_traces_every_verb_of_every_step_once_and_its_evaluations(holdfast: Commands) -> None:
    path = holdfast.root / "trace.json"
    result = holdfast.train("pool", "--trace", path, "--set", "train.eval_every=8", "--set", "train.workers=2")
    assert result.code == 0, result.err
    events = events_of(path)
    for name in ("plan", *VERBS):
        assert steps_of(events, name) == list(range(1, 21))
    assert steps_of(events, "evaluation") == [8, 16, 20]
    assert Counter(event["name"] for event in events if event["ph"] == "C") == {"durable lag": 20, "log free": 20}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 and event["pid"] == 1 for event in complete(events))
    threads = {"plan": "holdfast-loader-", "persist": "hf-commit", "dense": "hf-commit"}
    assert all(thread.startswith(threads.get(name, "main")) for thread, name, _ in work_of(events))
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["holdfast train"]


def work_of(events: list[dict[str, object]]) -> list[tuple[str, str, tuple[float, float]]]:
    """(thread, name, (when it began, ended)) of every complete event."""
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [
        (names[event["tid"]], event["name"], (event["ts"], event["ts"] + event["dur"])) for event in complete(events)
    ]


def test_what_runs_beside_training_on_a_row_log_is_traced_on_threads_of_its_own(holdfast: Commands) -> None:
    path = holdfast.root / "trace.json"
    settings = ["medium=block", "log_bytes=65536", "scratchpad_bytes=10000"]
    result = holdfast.train("pool", "--trace", path, *(part for item in settings for part in ("--set", f"pool.{item}")))
    assert result.code == 0, result.err
    spans: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for thread, name, span in work_of(events_of(path)):
        spans[thread, name].append(span)
    background = {work for work in spans if work[0].startswith("hf-")}
    assert background == {
        ("hf-collect", "collect"),
        ("hf-exchange", "exchange"),
        ("hf-exchange", "insert"),
        ("hf-merge", "merge"),
        ("hf-commit", "persist"),
        ("hf-commit", "append"),
        ("hf-commit", "sync"),
        ("hf-commit", "dense"),
    }
    persisted = spans["hf-commit", "persist"]
    assert 18 <= len(persisted) <= 20, "the last steps' may come after the run's last report"
    for part in ("append", "sync"):
        assert len(spans["hf-commit", part]) in (len(persisted), len(persisted) + 1)
        for began, ended in spans["hf-commit", part][: len(persisted)]:
            assert any(outer[0] <= began and ended <= outer[1] + 0.01 for outer in persisted)
    assert len(spans["hf-collect", "collect"]) >= 20, "a batch that had to give way is collected again"
    fetched, inserted = spans["hf-exchange", "exchange"], spans["hf-exchange", "insert"]
    assert len(fetched) == len(inserted) > 0
    assert all(fetch[1] <= insert[0] + 0.01 for fetch, insert in zip(fetched, inserted, strict=True))


def test_what_was_over_before_the_trace_began_is_no_part_of_it(path: Path) -> None:
    began = time.perf_counter()
    file = TraceFile(path, resumed_step=0, is_new=True)
    ended = time.perf_counter()
    report = step_at(ended, 1)
    over, cut = Span("hf-merge", began - 2.0, began - 1.0), Span("hf-merge", began - 0.5, ended + 0.5)
    file.step(replace(report, background=[("merge", over), ("merge", cut)]), 1.0)
    file.close()
    (merge,) = [event for event in complete(events_of(path)) if event["name"] == "merge"]
    assert merge["ts"] == 0.0
    assert 5e5 <= merge["dur"] < 6e5


def test_what_one_thread_does_never_overlaps_and_a_batch_is_captured_after_it_was_planned(holdfast: Commands) -> None:
    path = holdfast.root / "trace.json"
    holdfast.train("pool", "--trace", path, "--set", "train.eval_every=10")
    events = complete(events_of(path))
    for thread in {event["tid"] for event in events}:
        mine = [event for event in events if event["tid"] == thread]
        for before, after in pairwise(mine):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01
    planned = {event["args"]["step"]: event["ts"] + event["dur"] for event in events if event["name"] == "plan"}
    captured = {event["args"]["step"]: event["ts"] for event in events if event["name"] == "capture"}
    assert all(planned[step] <= captured[step] for step in range(1, 21))


def test_capturing_ahead_is_traced_apart_from_lookup(holdfast: Commands) -> None:
    path = holdfast.root / "trace.json"
    holdfast.train("pool", "--trace", path, "--set", "train.capture_ahead=true")
    events = events_of(path)
    assert steps_of(events, "capture ahead") == list(range(1, 20))  # nothing comes after the last
    assert steps_of(events, "plan") == list(range(1, 21))
    assert Counter(steps_of(events, "wait for loader")) == dict.fromkeys(range(1, 21), 1)


def whole_events(text: str) -> list[dict[str, object]]:
    """Of a killed run, which may have been in the middle of a write: without the half event that it then leaves."""
    try:
        return json.loads(text + "]")
    except json.JSONDecodeError:
        return json.loads(text[: text.rindex(",\n")] + "]")


def test_a_killed_run_leaves_a_trace_without_its_end_and_every_step_before_it_once(holdfast: Commands) -> None:
    path = holdfast.root / "trace.json"
    command = ("train", holdfast.config, "--pool", holdfast.root / "pool", "--trace", path)
    process = start(*command, "--set", "train.epochs=100000")
    deadline = time.monotonic() + 60
    while not path.exists() or path.stat().st_size < 10_000:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    events = whole_events(path.read_text())
    reached = steps_of(events)[-1]
    assert steps_of(events) == list(range(1, reached + 1))
    again = holdfast(*command, "--set", "train.epochs=100000", "--steps", reached + 5)
    assert again.code == 0, again.err
    resumed = steps_of(events_of(path))
    # Between the two lies what was not written yet when the run was killed.
    assert resumed[:reached] == list(range(1, reached + 1))
    assert resumed == sorted(set(resumed))


def test_a_trace_of_a_run_in_pieces_reads_like_one_run(holdfast: Commands) -> None:
    path = holdfast.root / "trace.json"
    holdfast.train("pool", "--trace", path, "--steps", 8)
    holdfast.train("pool", "--trace", path)
    events = events_of(path)
    for name in ("plan", *VERBS):
        assert steps_of(events, name) == list(range(1, 21))
    main = [event for event in complete(events) if event["tid"] == 1]
    assert [event["ts"] for event in main] == sorted(event["ts"] for event in main)
    assert [event["args"]["step"] for event in events if event["name"] == "resume"] == [8]


def test_a_run_that_resumes_cuts_off_the_steps_that_are_trained_again_and_half_an_event(path: Path) -> None:
    crashed = TraceFile(path, resumed_step=0, is_new=True)
    write_steps(crashed, 1, 12)
    crashed.close()
    path.write_text(path.read_text().removesuffix("\n]\n") + ',\n{"name":"plan","ph":"X","ts"')
    resumed = TraceFile(path, resumed_step=9, is_new=False)
    write_steps(resumed, 10, 11)
    resumed.close()
    events = events_of(path)
    assert steps_of(events) == list(range(1, 12))
    assert [event["name"] for event in events].count("durable lag") == 11


def test_a_run_that_resumes_before_every_step_of_the_trace_keeps_none_of_them(path: Path) -> None:
    for first in (5, 3):
        file = TraceFile(path, resumed_step=first - 1, is_new=False)
        write_steps(file, first, first + 2)
        file.close()
    assert steps_of(events_of(path)) == [3, 4, 5]


def test_a_trace_of_another_run_is_kept_and_other_files_are_refused(holdfast: Commands) -> None:
    path = holdfast.root / "trace.json"
    holdfast.train("first", "--trace", path, "--steps", 2)
    text = path.read_text()
    holdfast.train("second", "--trace", path, "--steps", 3)
    assert (holdfast.root / "trace.json.1").read_text() == text
    assert steps_of(events_of(path)) == [1, 2, 3]
    notes = holdfast.root / "notes"
    notes.write_text("precious\n")
    result = holdfast.train("second", "--trace", notes, "--steps", 4)
    assert (result.code, notes.read_text()) == (1, "precious\n")
    assert "something else than a trace" in result.err


def test_events_are_written_once_a_second_and_never_kept_longer(path: Path) -> None:
    file = TraceFile(path, resumed_step=0, is_new=True)
    sizes = [path.stat().st_size]
    began = time.perf_counter()
    for step in range(1, 101):
        file.step(step_at(began + step * 0.05, step, seconds=0.05), 1.0)
        sizes.append(path.stat().st_size)
    grew = [step for step in range(1, 101) if sizes[step] > sizes[step - 1]]
    assert 4 <= len(grew) <= 5
    assert steps_of(json.loads(path.read_text() + "]")) == list(range(1, grew[-1] + 1))


def test_fast_steps_are_written_before_they_take_much_memory(path: Path) -> None:
    file = TraceFile(path, resumed_step=0, is_new=True)
    began = time.perf_counter()
    for step in range(1, trace._WRITE_STEPS + 1):
        file.step(step_at(began, step, seconds=1e-6), 1.0)
    assert path.stat().st_size > 500_000


def test_a_full_disk_is_named_and_what_is_there_can_be_gone_on_with(path: Path) -> None:
    file = TraceFile(path, resumed_step=0, is_new=True)
    other = Closed()
    with file_size_limit(10_000), pytest.raises(OSError, match="too large") as caught:
        train_into(Observers([file, other]))
    assert caught.value.filename == str(path)
    assert other.is_closed
    assert path.stat().st_size == 10_000
    resumed = TraceFile(path, resumed_step=20, is_new=False)
    resumed.close()
    steps = steps_of(events_of(path), "plan")
    assert steps == list(range(1, len(steps) + 1))


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def train_into(observers: Observers) -> None:
    with observers as watch:
        for step in range(1, 21):
            watch.step(step_at(time.perf_counter(), step))
        watch.evaluation(20, EVALUATION, began=time.perf_counter() - 2.0, is_end=True)


class Closed:
    """An observer that knows whether it was closed."""

    is_closed = False

    def step(self, report: StepReport, samples_per_second: float) -> None: ...
    def evaluation(self, step: int, evaluation: Evaluation, *, began: float, is_end: bool) -> None: ...
    def close(self) -> None:
        self.is_closed = True


def test_a_trace_that_cannot_be_written_stops_the_run_and_the_pool_stays_at_its_last_step(
    holdfast: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = holdfast.root / "trace.json"
    step = TraceFile.step

    def full(self: TraceFile, report: StepReport, samples_per_second: float) -> None:
        step(self, report, samples_per_second)
        if report.step == 7:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(TraceFile, "step", full)
    result = holdfast.train("pool", "--trace", path)
    assert (result.code, result.err) == (1, f"holdfast: {path}: {NO_ROOM}\n")
    monkeypatch.undo()
    found = json.loads(holdfast("inspect", holdfast.root / "pool", "--json").out)
    assert (found["clean"], found["step"], found["dense_step"]) == (True, 7, 7)


def test_a_disk_that_fills_up_under_the_metrics_costs_no_step_whatever_the_dense_interval(holdfast: Commands) -> None:
    path = holdfast.root / "metrics.jsonl"
    interval = ("--set", "pool.dense_interval=5")
    assert holdfast.train("pool", *interval, "--steps", 10).code == 0  # the pool's files have their sizes
    with file_size_limit(600):
        result = holdfast.train("pool", *interval, "--metrics", path)
    limit = "the limit on the size of files (ulimit -f), or the filesystem, allows no larger one"
    assert (result.code, result.err) == (1, f"holdfast: {path}: File too large; {limit}\n")
    found = json.loads(holdfast("inspect", holdfast.root / "pool", "--json").out)
    step = found["step"]
    assert step in (12, 13, 14), "between two dense states"
    assert (found["clean"], found["dense_step"]) == (True, step)


def test_a_trace_that_cannot_be_opened_is_named(path: Path) -> None:
    path.mkdir()
    with pytest.raises(ConfigError, match=r"trace file .*trace\.json: Is a directory"):
        TraceFile(path, resumed_step=3, is_new=False)


@pytest.mark.parametrize(("option", "module"), [("--metrics", observe), ("--trace", trace)])
def test_a_file_that_a_full_disk_does_not_let_begin_is_named_with_what_to_do(
    holdfast: Commands, monkeypatch: pytest.MonkeyPatch, option: str, module: ModuleType
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(module, "open_at_end", refuse)
    path = holdfast.root / "file"
    result = holdfast.train("pool", option, path)
    assert result.code == 1
    assert result.err.endswith(f"{option[2:]} file {path}: {NO_ROOM}\n")
