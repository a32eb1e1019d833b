"""Systems that are measured in turns: one is awake, with all its processes, the others are stopped. So what else a
machine does falls on all of them alike, and their ratio is theirs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scaleout.launch import RanksFailed

_SETTLING_S = 15.0  # from the start of a system until it trains; the first steps are left out of what it measures
_TURN_S = 1.5


class Contender:
    """A measurement of several processes, in a session of its own. out: where its result will be, or None: it prints
    it."""

    def __init__(self, command: list[str], folder: Path, out: Path | None) -> None:
        self._out = out
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def halt(self) -> None:
        self._signal(signal.SIGSTOP)

    def result(self) -> dict[str, Any]:
        """Waits for its end. Raises RanksFailed."""
        self.wake()
        said, errors = self._process.communicate()
        if self._process.returncode != 0:
            raise RanksFailed(errors[-4000:])
        text = said.splitlines()[-1] if self._out is None else self._out.read_text()
        found: dict[str, Any] = json.loads(text)
        return found

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.communicate()

    def _signal(self, number: signal.Signals) -> None:
        if not self.has_ended:
            os.killpg(self._process.pid, number)


def in_turns(commands: dict[str, tuple[list[str], Path | None]], folder: Path) -> dict[str, dict[str, Any]]:
    """The result of each command, by name; each makes enough steps for a few dozen turns."""
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {}
        for name, (command, out) in commands.items():
            contenders[name] = Contender(command, folder, out)
            stack.callback(contenders[name].end)
            time.sleep(_SETTLING_S)
            contenders[name].halt()
        while not any(contender.has_ended for contender in contenders.values()):
            for contender in contenders.values():
                contender.wake()
                time.sleep(_TURN_S)
                contender.halt()
        return {name: contender.result() for name, contender in contenders.items()}
