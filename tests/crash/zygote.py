"""Forks training runs from a process that has imported torch and started no threads.

Importing torch takes a second, a tiny run milliseconds; so one process imports it and each run is a fork of that. Reads
one JSON request a line: {"directory", "options", "kill_at" | "kill_after_s" | "fault" | "progress" | null}; answers one
JSON a line: {"signal", "exit", "result", "error"}.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy.random  # noqa: F401  (imported by the first run otherwise, each time)
import torch._dynamo  # noqa: F401  (likewise, by the first optimizer: two seconds)

from faults import meet
from holdfast import _core
from holdfast.pools.pool import Pool
from tiny_run import Options, Watch, train


class Progress(Watch):
    """Keeps in a file which step is durable and which process trains: two numbers of 64 bits."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    def stepped(self, pool: Pool) -> None:
        os.pwrite(self._fd, struct.pack("<QQ", pool.durable_step, os.getpid()), 0)


def run_child(request: dict[str, Any], answer_fd: int) -> None:
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in request["options"].items()}
    counted = 1 << 40
    _core.kill_at_persist_point(request["kill_at"] or counted)
    answer: dict[str, Any]
    try:
        if request.get("fault"):
            answer = {"result": meet(request["fault"], request["directory"], Options(**options))}
        else:
            watch = Progress(request["progress"]) if request.get("progress") else None
            answer = {"result": train(request["directory"], Options(**options), watch)}
            answer["result"]["persist_points"] = counted - _core.persist_points_left()
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    os.write(answer_fd, json.dumps(answer).encode())
    os._exit(0)


def serve() -> None:
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork of a process with threads may hang"
    for line in sys.stdin:
        request = json.loads(line)
        read_fd, write_fd = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_fd)
            run_child(request, write_fd)
        os.close(write_fd)
        if request.get("kill_after_s") is not None:
            time.sleep(request["kill_after_s"])
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        text = b""
        while part := os.read(read_fd, 1 << 16):
            text += part
        os.close(read_fd)
        answer = json.loads(text) if text else {}
        answer["signal"] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
