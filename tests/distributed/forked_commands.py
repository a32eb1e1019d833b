"""`holdfast` commands in processes of their own that start at once: forks of one that has imported torch."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

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
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        kept = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        environment = {
            **kept,
            **one,
            "MKL_CBWR": "AUTO,STRICT",
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
            "PYTHONPATH": str(SRC),
        }
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "command_forks.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def start(self, *arguments: object) -> ForkedCommand:
        number = next(self._numbers)
        log, status = (Path(self._scratch.name) / f"{number}.{what}" for what in ("log", "status"))
        log.touch()
        request = {"arguments": [str(argument) for argument in arguments], "log": str(log), "status": str(status)}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return ForkedCommand(int(self._process.stdout.readline()), log, status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()
        self._scratch.cleanup()
