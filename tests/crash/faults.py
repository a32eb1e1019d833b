"""Faults that a tiny run meets, and what it says of them: in the process that trains."""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.admin.snapshot import take_snapshot
from holdfast.errors import PoolError
from holdfast.pools.pool import Pool
from holdfast_lab.placement.thread_time import thread_seconds
from tiny_run import Options, Watch, train

FOR_GOOD = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens when a run has reached a stage (see Watch), or at stage snapshot: when one is taken of its pool.

    call: a system call that fails on files with `file` in their path (`file$`: at its end), from the `nth` on, so many
    `times`, with `error` (an errno), or that does `most_bytes` at most, or all of it after `delay_ms`. below: only at
    offsets below. rings: so many io_urings the kernel has; None: as many as are asked for. Or act: what somebody else
    does to the pool's files: remove, move, truncate, take_permissions.
    """

    stage: str
    call: str = ""
    file: str = ""
    nth: int = 1
    times: int = 1
    error: int = 0
    most_bytes: int = 0
    delay_ms: int = 0
    below: int = -1
    rings: int | None = None
    act: str = ""


class _Meeting(Watch):
    def __init__(self, fault: Fault, directory: Path) -> None:
        self.fault = fault
        self._directory = directory
        self.report: dict[str, Any] = {}

    def reached(self, stage: str, pool: Pool | None) -> None:
        fault = self.fault
        if stage == "opening":
            _limit_rings(fault)
        if pool is not None:
            self.report["level"] = pool.level
        if stage != fault.stage:
            return
        if pool is not None:
            pool.flush()
            self.report["durable_before"] = pool.durable_step
        if fault.act:
            _ACTS[fault.act](self._directory, fault)
        else:
            _arm(fault)

    def failed(self, error: PoolError, pool: Pool, step: Callable[[], None]) -> None:
        self.report |= _words(error)
        self.report["durable_step"] = pool.durable_step
        self.report["then"] = _outcome(step)
        self.report["close"] = _outcome(pool.close)
        self.report["threads"] = _writers_left()


_WRITERS = ("hf-commit", "hf-merge")


def _writers_left() -> list[str]:
    """A thread that was joined may be listed for a moment yet: the kernel lets its joiner go on first."""
    patience_s = 2.0
    end = time.monotonic() + patience_s
    while True:
        left = sorted({name for _, name in thread_seconds() if name in _WRITERS})
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.001)


def meet(fault: Mapping[str, Any], directory: str, options: Options) -> dict[str, Any]:
    """Trains, and lets a Fault happen. Returns which error was raised, with which words ("error", "message"), what the
    next step and the close ended in, which threads were left, the level that the pool had last, and how often a system
    call was faulty."""
    meeting = _Meeting(Fault(**fault), Path(directory))
    result: dict[str, int] = {}
    try:
        if meeting.fault.stage == "snapshot":
            _arm(meeting.fault)
            take_snapshot(Path(directory), Path(f"{directory}-snapshot"))
        else:
            result = train(directory, options, meeting)
    except PoolError as error:
        meeting.report |= _words(error)
    struck = 0 if meeting.fault.act else _shim().holdfast_faults_struck()
    refused = 0 if meeting.fault.rings is None else _shim().holdfast_rings_refused()
    return {**result, **meeting.report, "struck": struck, "rings_refused": refused}


def _limit_rings(fault: Fault) -> None:
    if fault.rings is not None:
        _shim().holdfast_limit_rings(ctypes.c_long(fault.rings))


def _arm(fault: Fault) -> None:
    _limit_rings(fault)
    _shim().holdfast_fault(
        fault.call.encode(),
        fault.file.encode(),
        *map(ctypes.c_long, (fault.nth, fault.times)),
        fault.error,
        *map(ctypes.c_long, (fault.most_bytes, fault.delay_ms, fault.below)),
    )


def _shim() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _words(error: Exception) -> dict[str, str]:
    return {"error": type(error).__name__, "message": str(error)}


def _outcome(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return type(error).__name__
    return "done"


def _remove(pool: Path, fault: Fault) -> None:
    if fault.file:
        (pool / fault.file).unlink()
    else:
        shutil.rmtree(pool)


def _truncate(pool: Path, fault: Fault) -> None:
    os.truncate(pool / fault.file, fault.most_bytes)


def _take_permissions(pool: Path, fault: Fault) -> None:
    pool.chmod(0)
    os.setuid(65534)  # root needs none


_ACTS: dict[str, Callable[[Path, Fault], object]] = {
    "remove": _remove,
    "move": lambda pool, fault: pool.rename(pool.with_name(pool.name + "-moved")),
    "truncate": _truncate,
    "take_permissions": _take_permissions,
}
