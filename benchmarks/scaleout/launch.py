"""Starts ranks as processes of their own, one to a core, and collects what rank 0 measured."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scaleout.wire import alone

_FOLDER = Path(__file__).parents[1]


class RanksFailed(RuntimeError):
    """A rank of a measurement ended with an error."""


def run_ranks(
    num_ranks: int, options: Sequence[str], *, medium: str = "memory", pinned: bool = True, apart: bool = False
) -> dict[str, Any]:
    """What rank 0 measured. pinned: rank r to core r. apart: in a network namespace of its own, whose `lo` carries
    nothing else; wants root. Raises RanksFailed."""
    with pool_directory(medium) as directory:
        out = directory / "result.json"
        cores = sorted(os.sched_getaffinity(0))
        port = str(random.randrange(20_000, 40_000))
        script = []
        for rank in range(num_ranks):
            environment = [f"RANK={rank}", f"LOCAL_RANK={rank}", f"WORLD_SIZE={num_ranks}"]
            environment += [
                "MASTER_ADDR=127.0.0.1",
                f"MASTER_PORT={port}",
                "OMP_NUM_THREADS=1",
                "GLOO_SOCKET_IFNAME=lo",
            ]
            command = [sys.executable, "-m", "scaleout.rank", "--pool", str(directory / "pool"), "--out", str(out)]
            command += options
            if pinned:
                command += ["--core", str(cores[rank % len(cores)])]
            script.append(" ".join(["env", *environment, *command]))
        # One shell, so that all of them share its network namespace; it ends with the first that fails.
        text = "\n".join(f'{line} & pids="$pids $!"' for line in script)
        shell = ["bash", "-c", f"{text}\nfor pid in $pids; do wait -n || {{ kill $pids 2>/dev/null; exit 1; }}; done"]
        done = subprocess.run(
            alone(shell) if apart else shell, cwd=_FOLDER, capture_output=True, text=True, check=False
        )
        if done.returncode != 0 or not out.exists():
            raise RanksFailed(done.stderr[-4000:])
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def run_plain(options: Sequence[str], *, medium: str = "memory") -> dict[str, Any]:
    """One process that trains without a group, on one core."""
    with pool_directory(medium) as directory:
        out = directory / "result.json"
        core = min(os.sched_getaffinity(0))
        command = [sys.executable, "-m", "scaleout.rank", "--plain", "--pool", str(directory / "pool")]
        command += ["--out", str(out), "--core", str(core), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=_FOLDER, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RanksFailed(done.stderr[-4000:])
        result: dict[str, Any] = json.loads(out.read_text())
        return result


@contextmanager
def pool_directory(medium: str) -> Iterator[Path]:
    """Memory, where there is some, for rows in place; else a disk."""
    parent = "/dev/shm" if medium == "memory" and os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="scaleout-", dir=parent) as directory:
        yield Path(directory)


def until(deadline_s: float) -> Iterator[None]:
    """Turns of a loop that waits, for so long at most."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        yield
        time.sleep(0.02)
