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
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast_lab.placement.thread_time import thread_seconds
from larger.systems import Holdfast, Step, System

_TURNOVERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup:
    """What comes before. fill_bytes: what must have been read (0: nothing); log_bytes: what must have been appended
    three times (0: nothing)."""

    min_steps: int
    max_seconds: float
    fill_bytes: int = 0
    log_bytes: int = 0


def device_bytes() -> dict[str, int]:
    """Bytes that this process has had read and written by block devices, as the kernel counts them."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read": int(fields["read_bytes"]), "written": int(fields["write_bytes"])}


def own_threads_cpu_s() -> dict[str, float]:
    """CPU seconds by name of the core's background threads (hf-...), the kernel's part included."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for (_, name), spent in thread_seconds().items():
        if name.startswith("hf-"):
            seconds[name] += spent
    return dict(seconds)


def _is_steady(system: System, warmup: Warmup, row_bytes: int, begin_bytes: dict[str, int]) -> bool:
    traffic = system.traffic()
    if not traffic:
        return device_bytes()["read"] - begin_bytes["read"] >= warmup.fill_bytes
    turned_over = traffic["appended_bytes"] >= _TURNOVERS * warmup.log_bytes
    # The store says how many rows there is room for in memory; what it keeps beside a row's own bytes is its affair.
    room = traffic.get("scratchpad_rows", warmup.fill_bytes / row_bytes) + traffic.get("victim_rows", 0)
    rows_to_fill = room if warmup.fill_bytes else 0
    return turned_over and traffic["rows_fetched"] + traffic["rows_initial"] >= rows_to_fill


def _steps_per_merge(traffic: Mapping[str, float], num_steps: int) -> float | None:
    """How many steps append what a merge gives up; None where nothing has been merged."""
    if not traffic or not traffic["merges"]:
        return None
    return traffic["merged_bytes"] / traffic["merges"] / (traffic["appended_bytes"] / num_steps)


def warm_up(system: System, warmup: Warmup, row_bytes: int) -> dict[str, Any]:
    """Trains until the system is steady."""
    begin, begin_bytes = time.perf_counter(), device_bytes()
    first_loss, num_steps, steady = 0.0, 0, False
    while num_steps < warmup.min_steps or not steady:
        step = system.step()
        first_loss = step.loss if num_steps == 0 else first_loss
        num_steps += 1
        # the counters are cheap, but not free
        if num_steps % 10 == 0 or num_steps == warmup.min_steps:
            steady = _is_steady(system, warmup, row_bytes, begin_bytes)
        if time.perf_counter() - begin > warmup.max_seconds and num_steps >= warmup.min_steps:
            break
    return {
        "warmup_steps": num_steps,
        "warmup_s": time.perf_counter() - begin,
        "steady": steady,
        "steps_per_merge": _steps_per_merge(system.traffic(), num_steps),
        "first_loss": first_loss,
    }


class Measurement:
    """A window of steps in steady state, taken in turns with other systems': ``turn`` after ``turn``, then ``result``.

    Between turns the process may be stopped, threads and all; nothing that happens there is counted.
    """

    def __init__(self, system: System) -> None:
        self._system = system
        self._steps: list[Step] = []
        self._step_ms: list[float] = []
        self._sums: defaultdict[str, float] = defaultdict(float)

    def turn(self, num_steps: int, num_settling: int) -> float:
        """Takes ``num_steps`` steps after ``num_settling`` that do not count: they bring the processor's caches back.
        Returns how many milliseconds a step took."""
        for _ in range(num_settling):
            self._system.step()
        before, begin = self._counters(), time.perf_counter()
        for _ in range(num_steps):
            step_begin = time.perf_counter()
            self._steps.append(self._system.step())
            self._step_ms.append((time.perf_counter() - step_begin) * 1e3)
        seconds = time.perf_counter() - begin
        after = self._counters()
        self._sums["seconds"] += seconds
        for name, value in after.items():
            self._sums[name] += value - before.get(name, 0.0)
        return seconds / num_steps * 1e3

    def _counters(self) -> dict[str, float]:
        """Everything that only grows; names say whose it is: ``traffic/rows_hit``."""
        kinds: dict[str, Mapping[str, float]] = {
            "traffic": self._system.traffic(),
            "device_bytes": device_bytes(),
            "thread_cpu_s": own_threads_cpu_s(),
        }
        named = {f"{kind}/{name}": value for kind, values in kinds.items() for name, value in values.items()}
        return named | {"cpu_s": time.process_time()}

    def _sums_of(self, kind: str) -> dict[str, float]:
        return {name.split("/")[1]: value for name, value in self._sums.items() if name.startswith(f"{kind}/")}

    def result(self) -> dict[str, Any]:
        """CPU seconds are of all threads of the process, the kernel's part included."""
        steps, num_steps = self._steps, len(self._steps)
        lags = [step.lag for step in steps if step.lag is not None]
        stages = {stage for step in steps for stage in step.stage_ms}
        return {
            "steps": num_steps,
            "step_ms": self._step_ms,
            # Of the whole window, not of the median step: merges and dense states have their share in it.
            "ms_per_step": self._sums["seconds"] / num_steps * 1e3,
            "cpu_s_per_step": self._sums["cpu_s"] / num_steps,
            "thread_cpu_s": self._sums_of("thread_cpu_s"),
            "stage_ms": {s: statistics.median(step.stage_ms.get(s, 0.0) for step in steps) for s in sorted(stages)},
            # These add up to a step's.
            "mean_stage_ms": {s: statistics.mean(step.stage_ms.get(s, 0.0) for step in steps) for s in sorted(stages)},
            "lag_median": statistics.median(lags) if lags else None,
            "lag_max": max(lags, default=None),
            "last_loss": steps[-1].loss,
            "traffic": self._sums_of("traffic"),
            "traffic_since_opening": self._system.traffic(),
            "device_bytes": self._sums_of("device_bytes"),
            "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "durable": self._system.durable,
            "facts": self._system.facts(),
        }


def fill_log_and_die(system: Holdfast, log_bytes: int, say: Callable[[dict[str, Any]], None]) -> None:
    """Trains until as many bytes as the log has were appended, says what is in it, and kills this process."""
    core = system.trainer.pool.core
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
