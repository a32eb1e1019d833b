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


def ranks_command(num_ranks: int, options: Sequence[str], directory: Path) -> tuple[list[str], Path]:
    """What starts a group over a pool in `directory`, rank r on core r, and where rank 0 leaves what it measured. One
    shell, so that a network namespace or a signal takes all; it ends with the first that fails."""
    out = directory / "result.json"
    cores = sorted(os.sched_getaffinity(0))
    port = str(random.randrange(20_000, 40_000))
    script = []
    for rank in range(num_ranks):
        environment = [f"RANK={rank}", f"LOCAL_RANK={rank}", f"WORLD_SIZE={num_ranks}", "MASTER_ADDR=127.0.0.1"]
        environment += [f"MASTER_PORT={port}", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo"]
        command = [sys.executable, "-m", "scaleout.rank", "--pool", str(directory / "pool"), "--out", str(out)]
        command += [*options, "--core", str(cores[rank % len(cores)])]
        script.append(" ".join(["env", *environment, *command]))
    # `wait -n` for each of them would miss one that ends while another is waited for.
    end = "trap 'kill $(jobs -p) 2>/dev/null; exit 1' TERM"
    ranks = "\n".join(f"({line} || kill $$) &" for line in script)
    return ["bash", "-c", f"{end}\n{ranks}\nwait"], out


def plain_command(options: Sequence[str], directory: Path) -> tuple[list[str], Path]:
    """The same for one process that trains without a group, on one core."""
    out = directory / "result.json"
    command = [sys.executable, "-m", "scaleout.rank", "--plain", "--pool", str(directory / "pool"), "--out", str(out)]
    return [*command, "--core", str(min(os.sched_getaffinity(0))), *options], out


def run_ranks(num_ranks: int, options: Sequence[str], *, medium: str = "memory", apart: bool = False) -> dict[str, Any]:
    """What rank 0 measured. apart: in a network namespace of its own, whose `lo` carries nothing else; wants root.
    Raises RanksFailed."""
    with pool_directory(medium) as directory:
        command, out = ranks_command(num_ranks, options, directory)
        done = subprocess.run(
            alone(command) if apart else command, cwd=_FOLDER, capture_output=True, text=True, check=False
        )
        if done.returncode != 0 or not out.exists():
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
