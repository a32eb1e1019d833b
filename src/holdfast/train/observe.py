"""What a run shows of itself while it trains: a progress bar or plain lines, metrics as JSON lines, TensorBoard.

The metrics file holds one object a step, ``{"step", "durable_step", "loss", "samples_per_second", "logged_bytes",
"stage_ms", "background_ms"}``, where rows are updated on a device ``"device_ms"``, and where they come through a
scratchpad ``"traffic"`` (see StepReport) and ``"rates"``, where tables have keys that may wait or be left behind
``"keys"``; objects ``{"event": "evaluation", "step", "auc", "logloss"}`` where the run evaluates in between, and last
of all ``{"event": "end", "step", "auc", "logloss"}``. It always reads like one run without a break, every step once:

- a run that resumes at step s first cuts off what the file holds of steps after s (they are trained again), a line that
  a crash left unfinished, and the end of a run that now goes on;
- a run in a new pool keeps a file that is there already, as FILE.1, FILE.2...

durable_step is as it was when the step was committed; the step itself becomes durable a moment later. logged_bytes is
what the step wrote to the log. background_ms is wall time, added up, of the stages that ran beside training and were
over since the line before, whichever step they were for (see trace.py for what they are). rates are what traffic comes
to: scratchpad_hit_rate and device_hit_rate, of the rows that were looked for there in this step (left out where none
was), and write_amplification, bytes written to the pool's device over bytes of updated rows, of all steps since the run
was started: merges come in bursts.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from holdfast.errors import ConfigError
from holdfast.files.names import advice_on, named

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from holdfast.train.metrics import Evaluation
    from holdfast.train.step_report import Span, StepReport

_TENSORBOARD_EVERY = 10
_PLAIN_SECONDS = 10.0
_SHOWN_SECONDS = 0.1


class Observer(Protocol):
    """Is told of every step and every evaluation. began: when the evaluation did, by ``time.perf_counter``."""

    def step(self, report: StepReport, samples_per_second: float) -> None: ...
    def evaluation(self, step: int, evaluation: Evaluation, *, began: float, is_end: bool) -> None: ...
    def close(self) -> None: ...


class Observers:
    """Several as one; measures the samples per second between two steps. Context manager: closes them all."""

    def __init__(self, observers: list[Observer]) -> None:
        self._observers = observers
        self._last = time.perf_counter()

    def step(self, report: StepReport) -> None:
        now = time.perf_counter()
        samples_per_second = report.samples / max(now - self._last, 1e-9)
        self._last = now
        for observer in self._observers:
            observer.step(report, samples_per_second)

    def evaluation(self, step: int, evaluation: Evaluation, *, began: float, is_end: bool) -> None:
        for observer in self._observers:
            observer.evaluation(step, evaluation, began=began, is_end=is_end)
        self._last = time.perf_counter()  # the pause is not the next step's

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:  # one that cannot write what it has left leaves the others to close
            for observer in reversed(self._observers):
                stack.callback(observer.close)


class MetricsFile:
    """JSON lines, as the module's text says. is_new: the run begins in a new pool.

    Raises ConfigError that names the file where it cannot be written, and OSError that does where that happens later.
    """

    def __init__(self, path: Path, *, resumed_step: int, is_new: bool) -> None:
        self._path = path
        self._rates = _Rates()
        try:
            if holds_earlier(path):
                if is_new:
                    path.rename(free_name(path))
                else:
                    _cut_after(path, resumed_step)
            path.parent.mkdir(parents=True, exist_ok=True)
            # Line by line: a crash loses at most the line that was being written.
            self._file = open_at_end(path)
        except OSError as error:
            raise ConfigError(f"metrics file {path}: {error.strerror}{advice_on(error)}") from error

    def step(self, report: StepReport, samples_per_second: float) -> None:
        self._write(
            {
                "step": report.step,
                "durable_step": report.durable_step,
                "loss": report.loss,
                "samples_per_second": round(samples_per_second, 1),
                "logged_bytes": report.logged_bytes,
                "stage_ms": {stage: round(ms, 4) for stage, ms in report.stage_ms.items()},
                "background_ms": _background_ms(report),
                **({} if not report.device else {"device_ms": _milliseconds(report.device)}),
                **({} if report.keys is None else {"keys": report.keys}),
                **(
                    {}
                    if report.traffic is None
                    else {"traffic": report.traffic, "rates": self._rates.of(report.traffic)}
                ),
            }
        )

    def evaluation(self, step: int, evaluation: Evaluation, *, began: float, is_end: bool) -> None:
        event = "end" if is_end else "evaluation"
        self._write(
            {"event": event, "step": step, "auc": _finite(evaluation.auc), "logloss": _finite(evaluation.log_loss)}
        )

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, object]) -> None:
        write_whole(self._file, json.dumps(line).encode() + b"\n", self._path)


class TensorBoard:
    """Scalars for TensorBoard: loss, samples_per_second, durable_lag (steps) and what the metrics file has under
    stage_ms, background_ms, device_ms, keys, traffic and rates, of every tenth step; AUC and log-loss of every
    evaluation. Steps after `resumed_step` of an earlier life are hidden."""

    def __init__(self, directory: Path, *, resumed_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("--tensorboard needs tensorboard: pip install 'holdfast[tensorboard]'") from error
        self._directory = directory
        with named(directory):
            self._writer: SummaryWriter = SummaryWriter(str(directory), purge_step=resumed_step + 1)
        self._rates = _Rates()

    def step(self, report: StepReport, samples_per_second: float) -> None:
        rates = {} if report.traffic is None else self._rates.of(report.traffic)  # the sums are of every step
        if report.step % _TENSORBOARD_EVERY:
            return
        scalars = {
            "loss": report.loss,
            "samples_per_second": samples_per_second,
            "durable_lag": report.step - report.durable_step,
            **{f"stage_ms/{stage}": ms for stage, ms in report.stage_ms.items()},
            **{f"background_ms/{stage}": ms for stage, ms in _background_ms(report).items()},
            **{f"device_ms/{name}": ms for name, ms in _milliseconds(report.device).items()},
            **{f"keys/{name}": value for name, value in (report.keys or {}).items()},
            **{f"traffic/{name}": value for name, value in (report.traffic or {}).items()},
            **{f"rates/{name}": value for name, value in rates.items()},
        }
        self._add(scalars, report.step)

    def evaluation(self, step: int, evaluation: Evaluation, *, began: float, is_end: bool) -> None:
        self._add({"auc": evaluation.auc, "logloss": evaluation.log_loss}, step)

    def _add(self, scalars: Mapping[str, float], step: int) -> None:
        with named(self._directory):
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        with named(self._directory):
            self._writer.close()


class Display:
    """The progress of a run on standard output: a bar on a terminal, a plain line now and then elsewhere."""

    def __init__(self, *, first_step: int, last_step: int) -> None:
        self._last_step = last_step
        self._console = Console(file=sys.stdout, highlight=False)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[shown]}"),
                TimeRemainingColumn(compact=True),
                console=self._console,
                auto_refresh=False,  # a thread that draws would compete with the step for the interpreter
            )
            self._task = self._progress.add_task("", total=last_step, completed=first_step, shown="")
            self._progress.start()
        self._shown_at = time.monotonic()
        self._rate = 0.0
        self._window_shrunk = False

    def step(self, report: StepReport, samples_per_second: float) -> None:
        if report.traffic and report.traffic.get("window_shrunk") and not self._window_shrunk:
            self._window_shrunk = True
            self._say_window_shrinks(report.step)
        self._rate = samples_per_second if self._rate == 0.0 else 0.95 * self._rate + 0.05 * samples_per_second
        now = time.monotonic()
        wait = _PLAIN_SECONDS if self._progress is None else _SHOWN_SECONDS
        if now - self._shown_at < wait and report.step < self._last_step:
            return
        self._shown_at = now
        shown = f"{self._rate:,.0f} samples/s · loss {report.loss:.4f} · durable {report.durable_step}"
        if self._progress is None:
            print(f"step {report.step}/{self._last_step} · {shown}", flush=True)  # noqa: T201
        else:
            self._progress.update(self._task, completed=report.step, shown=shown, refresh=True)

    def _say_window_shrinks(self, step: int) -> None:
        self._console.print(
            f"step {step}: the scratchpad has no room for the rows of all train.window coming batches, so fewer are "
            "fetched ahead; where steps wait for that (traffic.stall_seconds of --metrics), raise "
            "pool.scratchpad_bytes",
            soft_wrap=True,
        )

    def evaluation(self, step: int, evaluation: Evaluation, *, began: float, is_end: bool) -> None:
        if not is_end:
            self._console.print(f"step {step}: AUC {evaluation.auc:.5f}, log-loss {evaluation.log_loss:.5f}")

    def pause(self, what: str) -> None:
        """Training is over for now; says what comes."""
        if self._progress is not None:
            self._progress.update(self._task, shown=what, refresh=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class Advance(Protocol):
    """Takes how much was just done, and how much there is in all where that was not known before."""

    def __call__(self, done: int, total: int | None = None, /) -> None: ...


@contextmanager
def counting(what: str, total: int | None, *, is_bytes: bool = False) -> Iterator[Advance]:
    """A progress bar for what takes a while, on standard error and on a terminal only."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda done, total=None, /: None
        return
    counts = [DownloadColumn(), TransferSpeedColumn()] if is_bytes else [MofNCompleteColumn()]
    with Progress(
        TextColumn(what), BarColumn(), *counts, TimeRemainingColumn(), console=console, transient=True
    ) as progress:
        task = progress.add_task("", total=total)

        def advance(done: int, total: int | None = None, /) -> None:
            progress.update(task, advance=done, total=total)

        yield advance


@contextmanager
def counting_up_to(what: str) -> Iterator[Callable[[int, int], None]]:
    """The same for what says how much is done of how much in all."""
    done = 0
    with counting(what, None) as advance:

        def progress(now: int, total: int) -> None:
            nonlocal done
            advance(now - done, total)
            done = now

        yield progress


def _milliseconds(spans: Mapping[str, Span]) -> dict[str, float]:
    return {name: round((span.ended - span.began) * 1e3, 4) for name, span in spans.items()}


class _Rates:
    """What traffic comes to, as the module's text says; is shown every step once, in order."""

    def __init__(self) -> None:
        self._written_bytes = self._updated_bytes = 0.0

    def of(self, traffic: Mapping[str, float]) -> dict[str, float]:
        rates = {}
        for tier, prefix in (("scratchpad", ""), ("device", "device_")):
            hit, missed = traffic.get(f"{prefix}rows_hit", 0.0), traffic.get(f"{prefix}rows_missed", 0.0)
            if hit + missed > 0:
                rates[f"{tier}_hit_rate"] = round(hit / (hit + missed), 6)
        self._written_bytes += traffic.get("appended_bytes", 0.0) + traffic.get("home_bytes_written", 0.0)
        self._updated_bytes += traffic.get("updated_row_bytes", 0.0)
        if self._updated_bytes > 0:
            rates["write_amplification"] = round(self._written_bytes / self._updated_bytes, 4)
        return rates


def _background_ms(report: StepReport) -> dict[str, float]:
    milliseconds: defaultdict[str, float] = defaultdict(float)
    for stage, span in report.background:
        milliseconds[stage] += (span.ended - span.began) * 1e3
    return {stage: round(ms, 4) for stage, ms in milliseconds.items()}


def _finite(value: float) -> float | None:
    """JSON has no NaN: null stands for it (an AUC of one class only)."""
    return value if math.isfinite(value) else None


def write_whole(file: FileIO, data: bytes, path: Path) -> None:
    """Appends to a file without a buffer. After an error it is closed: what has failed once is not tried again."""
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        file.close()
        raise OSError(error.errno, error.strerror, str(path)) from error


def holds_earlier(path: Path) -> bool:
    """Whether the file has something that an earlier life may have written. Pipes, devices and this process's own
    output (/dev/stdout, also where that is a file) keep nothing that could be cut or moved away. Raises OSError."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return path.is_file() and _own_output(path) is None and path.stat().st_size > 0


def open_at_end(path: Path) -> FileIO:
    """The file without a buffer, for `write_whole`. Raises OSError."""
    output = _own_output(path)
    # another opening of a file would have a place of its own in it, and each would write over the other
    return path.open("ab", buffering=0) if output is None else FileIO(os.dup(output), "wb")


def _own_output(path: Path) -> int | None:
    """The descriptor of standard output or standard error where that is what the path leads to."""
    for fd in (1, 2):
        with suppress(OSError):  # one of them is closed, or nothing is there
            if os.path.samestat(path.stat(), os.fstat(fd)):
                return fd
    return None


def free_name(path: Path) -> Path:
    """Where a file goes that is in the way of a new one: FILE.1, FILE.2..."""
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate


def _cut_after(path: Path, step: int) -> None:
    """Cuts the file before its first line that is of a step after `step`, unfinished, or the end of the run.

    Raises ConfigError where the file holds something else than metrics."""
    with path.open("rb+") as file:
        end = 0
        for line in file:
            if not line.endswith(b"\n") and line.startswith(b"{"):
                break  # the last line, which a crash left unfinished
            try:
                entry = json.loads(line)
                line_step, event = int(entry["step"]), entry.get("event")
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise ConfigError(f"metrics file {path}: it holds something else than metrics; name another") from None
            if line_step > step or (line_step == step and event == "end"):
                break
            end += len(line)
        file.truncate(end)
