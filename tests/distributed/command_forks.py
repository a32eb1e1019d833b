"""Forks `holdfast` commands from a process that has imported torch and started no threads.

Reads one JSON request a line (see forked_commands.py), answers the fork's process number. A command's exit status goes
to a file, last; one that was killed leaves none.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  (imported by the first optimizer otherwise: two seconds)

from holdfast.cli import main


def fork_command(request: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        said = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.argv = ["holdfast", *request["arguments"]]
        try:
            main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
    finally:
        sys.stdout.flush()
        Path(request["status"]).write_text(str(status))
        os._exit(status)


def serve() -> None:
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork of a process with threads may hang"
    gc.freeze()
    running: set[int] = set()
    for line in sys.stdin:
        with suppress(ChildProcessError):  # reap those of earlier requests
            while ended := os.waitpid(-1, os.WNOHANG)[0]:
                running.discard(ended)
        child = fork_command(json.loads(line))
        running.add(child)
        print(json.dumps(child), flush=True)
    for child in running:  # whose test was interrupted, or failed before it had them: they would serve for good
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    serve()
