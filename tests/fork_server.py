"""A process that has imported torch and forks what it is asked for: what tests say to it, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ForkServer:
    """Runs a script that answers each JSON line of its input with one. environment: beside one thread and MKL's strict
    branch, all that it has."""

    def __init__(self, script: Path, environment: Mapping[str, str], errors: IO[str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**environment, **ONE_THREAD, "MKL_CBWR": "AUTO,STRICT"},
        )

    def ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Tells it that nothing comes any more, and waits for its end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()
