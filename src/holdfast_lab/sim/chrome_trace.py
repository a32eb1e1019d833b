"""The trace of a simulated run: trace events for Perfetto (ui.perfetto.dev) and chrome://tracing, beside a real run's.

A thread for each device; where a device serves several stages at once, one for each that it serves. A stage is a
complete event on every device that it holds, so the events of a device add up to the time that it was busy.
args: {"step", "stage"}: the batch, counted from 1 as a run counts its steps, and the stage's name in the system.

An event's name is the one that a real run's trace (holdfast.train.trace) has for the same work, so that both can be
compared by name:

- `lookup`, `update`: as there.
- `train`: the network, forward and backward; three stages of a simulated system.
- `capture`: rows are logged before they are updated (an undo log).
- `commit`: what makes a finished batch durable: the parameters' log, and rows that are logged after their update.
- Everything else keeps its stage's name, with spaces: only simulated systems have it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.data.output import whole_file
from holdfast_lab.sim.lanes import lanes_of, stages_by_role
from holdfast_lab.sim.machine import Run, Span
from holdfast_lab.sim.system import PREVIOUS, Does, System

_PROCESS = 2  # a real run's is 1: the events of both can be put into one file
_NETWORK: tuple[Does, ...] = ("bottom_forward", "interaction_top", "bottom_backward")


def write_trace(path: Path, run: Run, system: System, *, overwrite: bool = False) -> None:
    """All of the run's spans. Raises ConfigError where the file is there already."""
    with whole_file(path, overwrite=overwrite) as partial:
        partial.write_text(
            "[\n"
            + ",\n".join(json.dumps(event, separators=(",", ":")) for event in trace_events(run, system))
            + "\n]\n",
            encoding="utf-8",
        )


def trace_events(run: Run, system: System) -> Iterator[dict[str, Any]]:
    names = {stage: event_name(system, stage) for stage in system.active}
    yield _metadata("process_name", f"holdfast sim {run.system}")
    thread = 0
    for role, stages in stages_by_role(system).items():
        spans = [span for span in run.spans if span.stage in stages]
        lanes = lanes_of(spans)
        for lane in range(max(lanes, default=-1) + 1):
            thread += 1
            yield _metadata("thread_name", role if lane == 0 else f"{role} {lane + 1}", thread)
            for span, of_span in zip(spans, lanes, strict=True):
                if of_span == lane:
                    yield _complete(span, names[span.stage], thread)


def event_name(system: System, stage: str) -> str:
    does = system.stages[stage].does
    if does in _NETWORK:
        return "train"
    if does in ("lookup", "update"):
        return does
    if does == "log_rows":
        return "capture" if _is_before_update(system, stage) else "commit"
    return "commit" if does == "log_network" else stage.replace("_", " ")


def _is_before_update(system: System, log: str) -> bool:
    """Some update waits for this log of its own batch."""
    return any(log in _waited_for(system, name) for name, stage in system.active.items() if stage.does == "update")


def _waited_for(system: System, name: str) -> set[str]:
    """All stages of its own batch that come before a stage."""
    found: set[str] = set()
    left = [name]
    while left:
        for other in system.waits(left.pop()):
            if not other.startswith(PREVIOUS) and other not in found:
                found.add(other)
                left.append(other)
    return found


def _complete(span: Span, name: str, thread: int) -> dict[str, Any]:
    return {
        "name": name,
        "cat": "stage",
        "ph": "X",
        "ts": span.begin_s * 1e6,
        "dur": (span.end_s - span.begin_s) * 1e6,
        "pid": _PROCESS,
        "tid": thread,
        "args": {"step": span.batch + 1, "stage": span.stage},
    }


def _metadata(name: str, value: str, thread: int | None = None) -> dict[str, Any]:
    place = {"pid": _PROCESS} if thread is None else {"pid": _PROCESS, "tid": thread}
    return {"name": name, "ph": "M", **place, "args": {"name": value}}
