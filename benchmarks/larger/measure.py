"""Steady state, and what a window of steps in it costs.

Steady is a log store whose log has turned over three times and whose scratchpad has been filled: until then every miss
is a first touch, and no miss is for want of room. Outsiders are steady when they have read their memory from the disk
twice. Where that takes too long, the window is measured all the same, and the result says so (``steady`` is false).
"""

from __future__ import annotations

import os
import resource
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from larger.systems import Step, System

_TURNOVERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is measured. fill_bytes: what must have been read before (0: nothing); log_bytes: what must have been
    appended three times (0: nothing)."""

    num_steps: int
    min_warmup_steps: int
    max_warmup_s: float
    fill_bytes: int = 0
    log_bytes: int = 0


def device_bytes() -> dict[str, int]:
    """Bytes that this process has had read and written by block devices, as the kernel counts them."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read": int(fields["read_bytes"]), "written": int(fields["write_bytes"])}


def _is_steady(system: System, window: Window, row_bytes: int, begin_bytes: dict[str, int]) -> bool:
    traffic = system.traffic()
    if not traffic:
        return device_bytes()["read"] - begin_bytes["read"] >= window.fill_bytes
    turned_over = traffic["appended_bytes"] >= _TURNOVERS * window.log_bytes
    # The store says how many rows its scratchpad has room for; what it keeps beside a row's own bytes is its affair.
    rows_to_fill = traffic.get("scratchpad_rows", window.fill_bytes / row_bytes) if window.fill_bytes else 0
    return turned_over and traffic["rows_fetched"] >= rows_to_fill


def warm_up(system: System, window: Window, row_bytes: int) -> dict[str, Any]:
    """Trains until the system is steady."""
    begin, begin_bytes = time.perf_counter(), device_bytes()
    first_loss, num_steps, steady = 0.0, 0, False
    while num_steps < window.min_warmup_steps or not steady:
        step = system.step()
        first_loss = step.loss if num_steps == 0 else first_loss
        num_steps += 1
        # the counters are cheap, but not free
        if num_steps % 10 == 0 or num_steps == window.min_warmup_steps:
            steady = _is_steady(system, window, row_bytes, begin_bytes)
        if time.perf_counter() - begin > window.max_warmup_s and num_steps >= window.min_warmup_steps:
            break
    return {
        "warmup_steps": num_steps,
        "warmup_s": time.perf_counter() - begin,
        "steady": steady,
        "first_loss": first_loss,
    }


def measure(system: System, window: Window, row_bytes: int) -> dict[str, Any]:
    """A window of steps in steady state. CPU seconds are of all threads of the process, the kernel's part included."""
    warm = warm_up(system, window, row_bytes)
    traffic, moved = system.traffic(), device_bytes()
    cpu_begin, begin = time.process_time(), time.perf_counter()
    step_ms: list[float] = []
    steps: list[Step] = []
    for _ in range(window.num_steps):
        step_begin = time.perf_counter()
        steps.append(system.step())
        step_ms.append((time.perf_counter() - step_begin) * 1e3)
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
    after, moved_after = system.traffic(), device_bytes()
    lags = [step.lag for step in steps if step.lag is not None]
    stages = {stage for step in steps for stage in step.stage_ms}
    return warm | {
        "steps": window.num_steps,
        "step_ms": step_ms,
        # Of the whole window, not of the median step: merges and dense states have their share in it.
        "ms_per_step": seconds / window.num_steps * 1e3,
        "cpu_s_per_step": cpu_s / window.num_steps,
        "stage_ms": {s: statistics.median(step.stage_ms.get(s, 0.0) for step in steps) for s in sorted(stages)},
        "lag_median": statistics.median(lags) if lags else None,
        "lag_max": max(lags, default=None),
        "last_loss": steps[-1].loss,
        "traffic": {name: after[name] - traffic[name] for name in after},
        "traffic_since_opening": after,
        "device_bytes": {name: moved_after[name] - moved[name] for name in moved},
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "durable": system.durable,
        "facts": system.facts(),
    }


def fill_log_and_die(system: System, log_bytes: int, say: Callable[[dict[str, Any]], None]) -> None:
    """Trains until as many bytes as the log has were appended, says what is in it, and kills this process."""
    core: Any = system.trainer.pool.core  # type: ignore[attr-defined]
    while system.traffic()["appended_bytes"] < log_bytes:
        system.step()
    say(
        {
            "step": core.step,
            "durable_step": core.durable_step,
            "log_bytes": core.log_bytes,
            "used_log_bytes": core.log_bytes - core.log_bytes_free,
        }
    )
    os.kill(os.getpid(), signal.SIGKILL)


def time_opening(open_pool: Callable[[], Any]) -> dict[str, Any]:
    """Opening a pool that was killed: all up to the state that the next step needs."""
    begin, cpu_begin = time.perf_counter(), time.process_time()
    pool = open_pool()
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
    report = pool.recovered
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "core_seconds": report.seconds,
        "clean": report.clean,
        "rows_step": report.rows_step,
        "step": report.step,
    }
