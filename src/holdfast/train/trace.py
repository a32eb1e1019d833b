"""The trace of a run: what ran when, as trace events for Perfetto (ui.perfetto.dev) and chrome://tracing.

- Thread `main`: the verbs of every step, `wait for loader` in plan's place, and every `evaluation`. The loader's
  threads: `plan`. Where rows are updated on a device: what its queues did, as threads of their names, by the device's
  clock. All of them complete events with args ``{"step"}``. With train.capture_ahead a step also captures the next
  step's rows, as `capture ahead`; its args name the step in which it ran.
- The pool's own threads (hf-...): `collect`, `exchange` (what the scratchpad lacks is fetched) and `insert` of coming
  batches, the parts of a `merge`; `persist` of a step that is over, with `append` and `sync` in it where rows are in a
  log store, and `dense`, a part of a dense state. Their args name the step at whose end they were over.
- Counters, at the end of every step: `durable lag` (step - durable_step) and `log free` (bytes of the undo log).

Like the metrics file it reads like one run without a break, every step once: a run that resumes at step s cuts off
what the file holds of steps after s, marks the place with a `resume`, and goes on at the time at which the rest ended,
so the pause between two starts takes no room; a run in a new pool keeps a file that is there already, as FILE.1...
But for a gap where a run was killed: what is not written yet is lost, so steps of the second before are missing.

Invariants
- The file is an array that lacks at most its closing bracket, which viewers do without: events are written many at
  once, each after its comma. Only who is killed in the middle of a write, which the kernel then ends behind some page,
  leaves half an event at the end; the next run cuts it off.
- What is not written yet is the steps of one second at most. Nothing else of the trace is kept in memory.
- A step's complete events are its last, so whoever reads from the end of the file meets the step before anything of it.
"""

from __future__ import annotations

import json
import mmap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError
from holdfast.files.names import advice_on
from holdfast.train.observe import free_name, holds_earlier, open_at_end, write_whole

if TYPE_CHECKING:
    from holdfast.train.metrics import Evaluation
    from holdfast.train.step_report import StepReport

_MAIN = 1
EVENT_NAMES = {"plan": "wait for loader", "capture_ahead": "capture ahead"}
"""Of the main thread's verbs, where they are not the verb's."""

_HEAD = (
    '[\n{"name":"process_name","ph":"M","pid":1,"args":{"name":"holdfast train"}}'
    ',\n{"name":"thread_name","ph":"M","pid":1,"tid":1,"args":{"name":"main"}}'
)
_SEPARATOR = b",\n"
_TAIL = "\n]\n"
_WRITE_SECONDS = 1.0
_WRITE_STEPS = 1000  # of about 2.5 kB


class TraceFile:
    """Trace events, as the module's text says. is_new: the run begins in a new pool.

    Raises ConfigError that names the file where it cannot be written or is something else than a trace of holdfast, and
    OSError that names it where that happens later.
    """

    def __init__(self, path: Path, *, resumed_step: int, is_new: bool) -> None:
        self._path = path
        self._pending: list[str] = []
        self._threads: dict[str, int] = {}
        self._written_at = self._origin = time.perf_counter()
        self._origin_us = 0.0
        try:
            if is_new and holds_earlier(path):
                path.rename(free_name(path))
            if holds_earlier(path):
                self._origin_us = _cut_after(path, resumed_step)
                self._pending.append(
                    f',\n{{"name":"resume","ph":"i","s":"p","ts":{self._origin_us:.3f},"pid":1,"tid":{_MAIN},'
                    f'"args":{{"step":{resumed_step}}}}}'
                )
            else:
                self._pending.append(_HEAD)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_at_end(path)
            self._write()
        except OSError as error:
            raise ConfigError(f"trace file {path}: {error.strerror}{advice_on(error)}") from error

    def step(self, report: StepReport, samples_per_second: float) -> None:
        planning = report.planning
        plan = self._complete("plan", report.step, planning.began, planning.ended, self._thread(planning.thread))
        verbs = []
        began = report.began
        for stage, ms in report.stage_ms.items():
            ended = began + ms * 1e-3
            verbs.append(self._complete(EVENT_NAMES.get(stage, stage), report.step, began, ended, _MAIN))
            began = ended
        work = []
        for name, span in report.device.items():
            work.append(self._complete(name, report.step, span.began, span.ended, self._thread(span.thread)))
        for name, span in report.background:
            if span.ended <= self._origin:
                continue  # a merge that the pool was opened to
            began_here = max(span.began, self._origin)
            work.append(self._complete(name, report.step, began_here, span.ended, self._thread(span.thread)))
        lag = self._counter("durable lag", "steps", began, report.step - report.durable_step)
        free = self._counter("log free", "bytes", began, report.log_bytes_free)
        self._add("".join((lag, free, plan, *work, *verbs)), began)

    def evaluation(self, step: int, evaluation: Evaluation, *, began: float, is_end: bool) -> None:
        ended = time.perf_counter()
        self._add(self._complete("evaluation", step, began, ended, _MAIN), ended)

    def close(self) -> None:
        if not self._file.closed:
            self._pending.append(_TAIL)
            self._write()
            self._file.close()

    def _complete(self, name: str, step: int, began: float, ended: float, thread: int) -> str:
        return (
            f',\n{{"name":"{name}","cat":"verb","ph":"X","ts":{self._us(began):.3f},"dur":{(ended - began) * 1e6:.3f},'
            f'"pid":1,"tid":{thread},"args":{{"step":{step}}}}}'
        )

    def _counter(self, name: str, unit: str, at: float, value: int) -> str:
        return f',\n{{"name":"{name}","ph":"C","ts":{self._us(at):.3f},"pid":1,"args":{{"{unit}":{value}}}}}'

    def _thread(self, name: str) -> int:
        """Its number; the file is told the name when it comes up first."""
        if name in self._threads:
            return self._threads[name]
        thread = self._threads[name] = _MAIN + 1 + len(self._threads)
        self._pending.append(
            f',\n{{"name":"thread_name","ph":"M","pid":1,"tid":{thread},"args":{{"name":{json.dumps(name)}}}}}'
        )
        return thread

    def _us(self, at: float) -> float:
        return self._origin_us + (at - self._origin) * 1e6

    def _add(self, events: str, now: float) -> None:
        self._pending.append(events)
        if now - self._written_at >= _WRITE_SECONDS or len(self._pending) >= _WRITE_STEPS:
            self._write()
            self._written_at = now

    def _write(self) -> None:
        data = "".join(self._pending).encode()
        self._pending.clear()
        write_whole(self._file, data, self._path)


def _cut_after(path: Path, step: int) -> float:
    """Cuts the file behind its last event of a step up to `step`; returns when that ended, in µs.

    Reads from the end, so it takes as long as what is cut. Raises ConfigError where the file is no trace of holdfast.
    """
    end_us = 0.0
    with path.open("rb+") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            head = len(_HEAD)
            if text[:head] != _HEAD.encode():
                raise ConfigError(f"trace file {path}: it holds something else than a trace of holdfast; name another")
            end = len(text) - len(_TAIL) if text[-len(_TAIL) :] == _TAIL.encode() else len(text)
            while (start := text.rfind(_SEPARATOR, head, end)) >= 0:
                event = _parse(text[start + len(_SEPARATOR) : end])
                if event.get("args", {}).get("step", step + 1) <= step:
                    end_us = event["ts"] + event.get("dur", 0.0)
                    break
                end = start
            else:
                end = head
        file.truncate(end)
    return end_us


def _parse(text: bytes) -> dict[str, Any]:
    """An event; nothing for one that a full disk or a crash left unfinished."""
    try:
        event: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return event
