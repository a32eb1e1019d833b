"""A part of the benchmark in a process of its own: what fails, hangs or loses the device there ends there.

The process is forked from one that has imported everything and touched neither device nor thread, so it starts at once.
Every result goes to the parent as soon as it is there: what was measured before an end of any kind counts.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_GRACE_S = 5.0  # beyond its time, for a part that is about to find that it is up
_context = multiprocessing.get_context("fork")


class LeftOut(Exception):
    """Something is not measured here, or not any more; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """device: cpu or cuda. smoke: tiny shapes. medium: where pools are made, on memory."""

    device: str
    smoke: bool
    medium: Path


class Telling:
    """A part's way to say what it measured."""

    def __init__(self, pipe: Connection, ends: float) -> None:
        self._pipe = pipe
        self.ends = ends

    def measure(self, key: str, work: Callable[[], dict[str, Any]], *, needs_s: float = 0.0) -> None:
        """Tells what `work` gives, or how it failed; leaves it out where less than `needs_s` seconds are left."""
        began = time.monotonic()
        left = max(0.0, self.ends - began)
        if left < needs_s:
            self._pipe.send((key, {"left_out": f"{left:.0f} s were left, and it may take {needs_s:.0f}"}))
            return
        try:
            result = work()
        except LeftOut as why:
            result = {"left_out": str(why)}
        except Exception as error:
            result = failure_of(error)
        self._pipe.send((key, {**result, "took_s": time.monotonic() - began}))


@dataclass(frozen=True, slots=True)
class Part:
    """keys: of all that it measures. seconds: that are kept for it."""

    name: str
    keys: tuple[str, ...]
    seconds: float
    run: Callable[[Telling, Settings, Path], None]


def failure_of(error: BaseException) -> dict[str, Any]:
    first_line = (str(error).strip() or "no word").split("\n")[0]
    return {"failed": f"{type(error).__name__}: {first_line}", "traceback": traceback.format_exc()[-4000:]}


def run_part(part: Part, settings: Settings, directory: Path, seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the part measures, key by key, all of its keys; for so long at most. directory: an empty one, for it."""
    ends = time.monotonic() + seconds
    ours, theirs = _context.Pipe(duplex=False)
    process = _context.Process(target=_run, args=(part, settings, directory, theirs, ends))
    process.start()
    theirs.close()
    missing = list(part.keys)
    why: dict[str, Any] = {"left_out": f"its part of the run was stopped after {seconds:.0f} s"}
    failure: dict[str, Any] | None = None
    try:
        # Not by the pipe's end alone: a compiler's helper may hold it open.
        while wait([ours, process.sentinel], max(0.0, ends + _GRACE_S - time.monotonic())):
            told = _receive(ours)
            if told is None:
                process.join()
                why = failure or {"failed": f"its process ended without it (exit status {process.exitcode})"}
                break
            key, result = told
            if key is None:
                failure = result
                continue
            missing.remove(key)
            yield key, result
    finally:
        process.kill()
        process.join()
        ours.close()
    for key in missing:
        yield key, why


def _receive(pipe: Connection) -> tuple[str | None, dict[str, Any]] | None:
    """None where nothing comes any more. Key None: of all that was not told."""
    try:
        return pipe.recv() if pipe.poll() else None
    except EOFError:
        return None


def _run(part: Part, settings: Settings, directory: Path, pipe: Connection, ends: float) -> None:
    try:
        part.run(Telling(pipe, ends), settings, directory)
    except Exception as error:
        pipe.send((None, failure_of(error)))
