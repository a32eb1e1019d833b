"""Systems that are measured in turns, so that what a machine's other tenants do falls on all of them alike.

Invariants
- One system runs at a time; the others are stopped, with all their threads (SIGSTOP).
- Every round gives each system one turn, and begins with another one.
- Turns add up to whole cycles of a system's merges: a window of less would leave to chance what share of its merging
  falls into it.
- A system that fails has an error for a result; the others go on.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from larger.memory_limit import remove_group_of

_TIMEOUT_S = 3600
_FEWEST_CYCLES = 2
FAILURES = (OSError, ValueError, RuntimeError, subprocess.SubprocessError)
"""Of one measurement; the others go on."""


def error_result(error: BaseException) -> dict[str, Any]:
    """What stands for its result then."""
    return {"error": f"{type(error).__name__}: {error}"}


class Child:
    """A process of ``larger.one``; with ``--turns`` it takes them.

    Its standard error goes to a file, and is kept for the error.
    """

    def __init__(self, command: list[str], directory: Path) -> None:
        self._errors: TextIO = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def warm_up(self) -> dict[str, Any]:
        """Waits until it is steady, and stops it. Returns how that went, see measure.warm_up. Raises RuntimeError where
        it ends instead."""
        answer = self._listen()
        self._signal(signal.SIGSTOP)
        return answer

    def turn(self, num_steps: int) -> float:
        """Milliseconds a step, of that many."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(f"{num_steps}\n")
            self._process.stdin.flush()
        answer = self._listen()
        self._signal(signal.SIGSTOP)
        return float(answer["ms"])

    def finish(self, *, expected_status: int = 0) -> dict[str, Any]:
        """Its result. Raises RuntimeError where it ends otherwise than expected."""
        self._signal(signal.SIGCONT)
        try:
            out, _ = self._process.communicate(timeout=_TIMEOUT_S)
        finally:
            self.end()
        if self._process.returncode != expected_status:
            raise RuntimeError(self._what_happened())
        result: dict[str, Any] = json.loads(out)
        return result

    def end(self) -> None:
        """Whatever it is doing."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        remove_group_of(self._process.pid)

    def _listen(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(timeout=_TIMEOUT_S)
            raise RuntimeError(self._what_happened())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.kill(self._process.pid, number)

    def _what_happened(self) -> str:
        self._errors.seek(0)
        status = self._process.returncode
        killed = " (killed: more memory than it is allowed?)" if status == -signal.SIGKILL else ""
        return f"exit status {status}{killed}: {self._errors.read().strip()[-2000:]}"


class Turns:
    """What takes turns. num_steps: of each, over all rounds, at least."""

    def __init__(self, num_steps: dict[str, int], on_progress: Callable[[str], None]) -> None:
        self._num_steps = num_steps
        self._on_progress = on_progress
        self._alive: dict[str, Child] = {}
        self._turn_ms: dict[str, list[float]] = {key: [] for key in num_steps}
        self._results: dict[str, dict[str, Any]] = {}

    def take(self, start: Callable[[str], Child], num_rounds: int) -> dict[str, dict[str, Any]]:
        """Warms up one after the other what ``start`` makes of each key; then come the rounds. Returns the results by
        key, with all turns' milliseconds a step as ``turn_ms``; {"error": ...} for one that failed."""
        keys = list(self._num_steps)
        try:
            for key in keys:
                self._on_progress(f"{key}: warming up")
                self._attempt(key, partial(self._warm_up, key, start))
            for number in range(num_rounds):
                first = number % len(keys)
                for key in [key for key in keys[first:] + keys[:first] if key in self._alive]:
                    self._attempt(key, partial(self._turn, key, num_rounds))
                self._on_progress(f"round {number + 1} of {num_rounds}")
            for key in list(self._alive):
                self._attempt(key, partial(self._finish, key))
        finally:
            for child in self._alive.values():
                child.end()
        return self._results

    def _attempt(self, key: str, what: Callable[[], None]) -> None:
        try:
            what()
        except FAILURES as error:
            self._results[key] = error_result(error)
            if key in self._alive:
                self._alive.pop(key).end()

    def _warm_up(self, key: str, start: Callable[[str], Child]) -> None:
        self._alive[key] = start(key)
        steps_per_merge = self._alive[key].warm_up()["steps_per_merge"]
        if steps_per_merge is not None:
            cycles = max(_FEWEST_CYCLES, math.ceil(self._num_steps[key] / steps_per_merge))
            self._num_steps[key] = round(cycles * steps_per_merge)

    def _turn(self, key: str, num_rounds: int) -> None:
        self._turn_ms[key].append(self._alive[key].turn(-(-self._num_steps[key] // num_rounds)))

    def _finish(self, key: str) -> None:
        self._results[key] = self._alive[key].finish() | {"turn_ms": self._turn_ms[key]}
        del self._alive[key]
