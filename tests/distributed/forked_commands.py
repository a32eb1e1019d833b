"""`holdfast` commands in processes of their own that start at once: forks of one that has imported torch."""

from __future__ import annotations

import os
import select
import signal
import tempfile
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from fork_server import ForkServer

from group_runs import HERE, SRC


class ForkedCommand:
    """A running command. `log`: what it says, on either stream."""

    def __init__(self, pid: int, log: Path, status: Path) -> None:
        self.pid = pid
        self.log = log
        self._status = status
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Its exit status; None while it runs, minus the signal where it was killed."""
        return self._await(0.0)

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._handle, number)

    def wait(self, timeout: float) -> int:
        """Waits for its exit status, in seconds. Raises TimeoutError."""
        ended = self._await(timeout)
        if ended is None:
            raise TimeoutError(f"process {self.pid} runs after {timeout} s: {self.log.read_text()}")
        return ended

    def close(self) -> None:
        """Kills it, if it runs."""
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)
            self.wait(60.0)
        os.close(self._handle)

    def _await(self, seconds: float) -> int | None:
        ended, _, _ = select.select([self._handle], [], [], seconds)
        if not ended:
            return None
        return int(self._status.read_text()) if self._status.exists() else -signal.SIGKILL


class Commands:
    """The process that forks commands; see command_forks.py. Context manager."""

    def __init__(self) -> None:
        self._numbers = count()
        self._scratch = tempfile.TemporaryDirectory(prefix="holdfast-commands-")
        kept = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        environment = {**kept, "JE_ARROW_MALLOC_CONF": "background_thread:false", "PYTHONPATH": str(SRC)}
        self._server = ForkServer(HERE / "command_forks.py", environment)

    def start(self, *arguments: object) -> ForkedCommand:
        number = next(self._numbers)
        log, status = (Path(self._scratch.name) / f"{number}.{what}" for what in ("log", "status"))
        log.touch()
        request = {"arguments": [str(argument) for argument in arguments], "log": str(log), "status": str(status)}
        return ForkedCommand(self._server.ask(request), log, status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self._scratch.cleanup()
