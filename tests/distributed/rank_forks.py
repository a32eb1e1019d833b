"""Forks the ranks of a group from a process that has imported torch and started no threads.

Importing torch takes seconds, a small group tenths of one. Reads one JSON request a line (see group_runs.py), answers
one JSON a line: what became of every rank. What a rank says on its way goes to a file of its own, which outlives it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.random  # noqa: F401  (imported by the first run otherwise, each time)
import torch._dynamo  # noqa: F401  (likewise, by the first optimizer: two seconds)

from holdfast.errors import HoldfastError
from rank_run import Sayings, run_rank

_POLL_SECONDS = 0.001


@dataclass(kw_only=True)
class Fate:
    """Of one rank. Times in seconds since the first was forked. struck: when something was done to it from outside, or
    by itself on purpose."""

    rank: int
    exit: int | None = None
    signal: int | None = None
    ended: float | None = None
    stopped: float | None = None
    struck: float | None = None


def fork_rank(request: dict[str, Any], rank: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    os.dup2(2, 1)  # what comes of a request goes there, and gloo of PyTorch 2.8 prints
    try:
        with Sayings(Path(request["sayings"]), rank) as say:
            try:
                run_rank(request, rank, say)
                status = 0
            except HoldfastError as error:
                say(error=type(error).__name__, message=str(error))
            except SystemExit as error:
                status = int(error.code or 0)
            except BaseException as error:
                say(error=type(error).__name__, message=str(error), trace=traceback.format_exc())
    finally:
        os._exit(status)


def supervise(request: dict[str, Any]) -> dict[str, Any]:
    """Runs a group until all its ranks have ended. Those that were stopped are killed when nobody else is left."""
    began = time.monotonic()
    fates = {fork_rank(request, rank): Fate(rank=rank) for rank in range(request["num_ranks"])}
    kill_after = {int(rank): seconds for rank, seconds in request["kill_after"].items()}
    sayings = [Path(request["sayings"]) / f"rank-{fate.rank}.jsonl" for fate in fates.values()]
    joined: float | None = None
    hung = False
    while any(fate.ended is None for fate in fates.values()):
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        now = time.monotonic() - began
        if pid:
            fate = fates[pid]
            if os.WIFSTOPPED(status):
                fate.stopped = fate.struck = now
                continue
            fate.ended = now
            if os.WIFSIGNALED(status):
                fate.signal = os.WTERMSIG(status)
                fate.struck = now if fate.struck is None else fate.struck
            else:
                fate.exit = os.WEXITSTATUS(status)
            continue
        running = {child: fate for child, fate in fates.items() if fate.ended is None}
        if joined is None and all(_has_spoken(file) for file in sayings):
            joined = now
        for child, fate in running.items():
            if joined is not None and now - joined >= kill_after.get(fate.rank, now + 1):
                os.kill(child, signal.SIGKILL)
                del kill_after[fate.rank]
        if now > request["hung_after"]:
            hung = True
        if hung or all(fate.stopped is not None for fate in running.values()):
            for child in running:
                os.kill(child, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return {"hung": hung, "fates": [vars(fate) for fate in fates.values()]}


def _has_spoken(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def serve() -> None:
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork of a process with threads may hang"
    gc.freeze()  # or each rank's collector goes through all of torch, and copies its pages
    for line in sys.stdin:
        print(json.dumps(supervise(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve()
