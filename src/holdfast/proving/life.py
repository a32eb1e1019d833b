"""One process of the user's command: started with its orders, followed, killed where it was ordered from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.errors import HoldfastError
from holdfast.pools.proving_hook import VARIABLE
from holdfast.proving.record import (
    STACKS_FILE,
    STACKS_SIGNAL,
    Follower,
    Kill,
    LifeRecord,
    Orders,
    events_file,
    output_file,
)

_POLL_SECONDS = 0.01
_STACKS_SECONDS = 1.0
_MOST_OUTPUT_BYTES = 16 << 20
_SHOWN_LINES = 15
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the second: told by a shell around it

Ending = Literal["done", "killed", "failed"]


class CannotProve(HoldfastError):
    """The script gives nothing that can be compared; says why and what to do."""


@dataclass(frozen=True, slots=True)
class LifeEnd:
    """How a process ended. why: of a failure, in words, with the last lines that it printed."""

    ending: Ending
    record: LifeRecord
    why: str = ""


def live(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    orders: Orders,
    *,
    timeout: float,
    stopping: Callable[[], bool],
    on_step: Callable[[int], None],
) -> LifeEnd:
    """Starts `command` with its orders, and waits for its end. folder: the run's.

    timeout: seconds without a new step after which it counts as hanging. stopping: asked all the time; the process is
    killed where it says so. Raises CannotProve where the command cannot be started.
    """
    orders.write(folder)
    follower, record = Follower(events_file(folder, orders.life)), LifeRecord(orders.life)
    arguments = [argument.replace("{run}", str(folder)) for argument in command]
    with output_file(folder, orders.life).open("ab") as output:
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, VARIABLE: str(folder)},
                start_new_session=True,
            )
        except OSError as error:
            raise CannotProve(f"{arguments[0]} cannot be started: {error.strerror}") from None
    watch = _Watch(process, folder, orders, record, timeout)
    try:
        while True:
            is_over = process.poll() is not None
            for line in follower.lines():
                record.take(line)
                watch.heard(line)
                if line["event"] == "step":
                    on_step(line["step"])
            if is_over:
                return watch.over()
            if stopping() or record.refusal is not None:
                return LifeEnd("failed", record, record.refusal or "stopped")
            if watch.strikes() or watch.hangs():
                watch.kill()
            time.sleep(_POLL_SECONDS)
    finally:
        watch.kill()


class _Watch:
    def __init__(
        self, process: subprocess.Popen[bytes], folder: Path, orders: Orders, record: LifeRecord, timeout: float
    ) -> None:
        self._process = process
        self._folder = folder
        self._orders = orders
        self._record = record
        self._timeout = timeout
        self._heard = self._began = time.monotonic()
        self._strike_at: float | None = None
        self._struck = False
        self._hung = ""

    def heard(self, line: Mapping[str, object]) -> None:
        """A line came; one may be what an order to kill waits for."""
        now = time.monotonic()
        kill = self._orders.kill
        if line["event"] in ("step", "resumed"):
            took, self._heard = now - self._heard, now
            if kill is not None and kill.kind == "outside" and self._strike_at is None and self._is_due(kill):
                self._strike_at = now + kill.delay * min(took, 1.0 if line["event"] == "step" else 0.1)

    def _is_due(self, kill: Kill) -> bool:
        return self._record.step is not None and self._record.step >= kill.after

    def strikes(self) -> bool:
        """Whether it is time for the kill from outside."""
        self._struck |= self._strike_at is not None and time.monotonic() >= self._strike_at
        return self._struck

    def hangs(self) -> bool:
        self._cut_output()
        if time.monotonic() - self._heard < self._timeout:
            return False
        where = "before its first step" if not self._record.step else f"after step {self._record.step}"
        self._hung = f"it took no step for {self._timeout:g} s, {where} (--timeout)" + self._stacks()
        return True

    def _stacks(self) -> str:
        """Where the process is, if its witness can still say."""
        if not self._record.openings:
            return ""
        os.killpg(self._process.pid, STACKS_SIGNAL)
        time.sleep(_STACKS_SECONDS)
        lines = (self._folder / STACKS_FILE).read_text(errors="replace").splitlines()
        return "; it is at:\n" + "\n".join(f"  {line}" for line in lines[-_SHOWN_LINES:])

    def _cut_output(self) -> None:
        path = output_file(self._folder, self._orders.life)
        if path.stat().st_size > _MOST_OUTPUT_BYTES:
            os.truncate(path, 0)  # it is written by appending

    def kill(self) -> None:
        """The process and everything that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def over(self) -> LifeEnd:
        """What its end means."""
        status = self._process.returncode
        record = self._record
        if record.refusal is not None or self._hung:
            return LifeEnd("failed", record, record.refusal or self._hung)
        was_ordered = self._struck or (self._orders.kill is not None and self._orders.kill.is_own)
        if status in _KILLED and was_ordered:
            return LifeEnd("killed", record)
        if status == 0 and record.ended is not None:
            return LifeEnd("done", record)
        return LifeEnd("failed", record, self._failure(status) + self._last_lines())

    def _failure(self, status: int) -> str:
        if status != 0:
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
            return f"it {how} {self._where()}"
        if not self._record.openings:
            return (
                "it ended without opening a holdfast.Pool; is it the right script, and does it train with holdfast in "
                "its own process?"
            )
        if not self._record.facts:
            return "it ended without making a holdfast.Checkpoint: without one there is nothing to go on from"
        return "it ended without an orderly exit (os._exit?), and its pool cannot be compared"

    def _where(self) -> str:
        if not self._record.openings:
            return "before it opened a pool"
        return "before its first step" if not self._record.step else f"after step {self._record.step}"

    def _last_lines(self) -> str:
        path = output_file(self._folder, self._orders.life)
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").splitlines()[-_SHOWN_LINES:]
        return "".join(["\nits last lines:", *(f"\n  {line}" for line in lines)]) if lines else "; it printed nothing"
