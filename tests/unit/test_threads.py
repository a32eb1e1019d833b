"""Threads: the kernels', which are PyTorch's OpenMP team where it fits and workers of their own where it does not; and
what a command says where it may start none."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cli_runs import Commands

SCRIPT = """
import os, sys, threading
import torch
from holdfast import _core

torch_threads, core_threads, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(torch_threads)
_core.set_num_threads(core_threads)
values = torch.rand(1000, 1000)
values.sin().numpy()  # PyTorch's team, if it has one, is there now

def count():
    return len(os.listdir("/proc/self/task"))

def work():
    before = count()
    for _ in range(3):
        assert _core.all_finite(values.numpy())
    values[777, 777] = float("nan")
    assert not _core.all_finite(values.numpy())
    print(count() - before)

if where == "fork":
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    work()
elif where == "thread":
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
else:
    work()
"""


@pytest.mark.dear
@pytest.mark.parametrize(
    ("torch_threads", "core_threads", "where", "new_threads"),
    [
        (3, 3, "main", 0),
        (1, 1, "main", 0),
        (2, 3, "main", 2),  # another number than PyTorch's: a team is never resized
        (3, 3, "thread", 2),  # another thread's team would be new threads, too
        (3, 3, "fork", 2),  # the child has none of the parent's
    ],
)
def test_the_kernels_take_pytorchs_threads_where_they_fit(torch_threads, core_threads, where, new_threads):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(torch_threads), str(core_threads), where],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) == new_threads


@pytest.mark.parametrize("thread", ["hf-signals", "holdfast-loader"])
def test_a_command_that_may_start_no_more_threads_says_what_to_allow(
    thread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name.startswith(thread):
            raise RuntimeError("can't start new thread")
        start(self)

    holdfast = Commands(tmp_path, monkeypatch, capfd)
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        result = holdfast.train()
    assert (result.code, result.err.splitlines()[-1]) == (
        1,
        "holdfast: can't start new thread: allow more of them (ulimit -u, a container's limit of processes) or memory",
    )
    assert signal.set_wakeup_fd(-1) == -1, "a descriptor is left to Python that another file gets"
    assert holdfast.train().code == 0
