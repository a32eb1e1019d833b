"""How soon trainers train again that were killed: where memory ranks outlive them, and where all ranks start anew.

    python -m scaleout.attaching DIR [--rounds 3]

A pool of 530 MB in a log store, one trainer and one memory rank. In each round the trainer is killed at the same step,
once beside `holdfast serve`, and once with a memory rank that was started with it, which ends with it. The clock runs
from the death to the first step of the next life, and to the thirtieth.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

STEPS_BEFORE, STEPS_TIMED = 150, 30
CONFIG = """
[data.synthetic]
num_samples = 4_000_000
rows = [1000000, 1000000, 1000000, 1000000]
lookups = [4, 4, 4, 4]
[embedding]
dim = 32
[model]
bottom = [64, 32]
top = [64, 1]
[train]
batch_size = 4096
[pool]
medium = "block"
scratchpad_bytes = 268435456
dense_interval = 4
"""


def start(arguments: list[str], **environment: str) -> subprocess.Popen[bytes]:
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast", *arguments],
        env={**os.environ, **one, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def steps_in(metrics: Path) -> int:
    return sum('"step"' in line for line in metrics.read_text().splitlines()) if metrics.exists() else 0


def await_steps(metrics: Path, count: int, process: subprocess.Popen[bytes]) -> float:
    """When there were so many."""
    while steps_in(metrics) < count:
        assert process.poll() is None, "the trainer ended"
        time.sleep(0.01)
    return time.monotonic()


class Together:
    """Both ranks are started at once, and end together."""

    def __init__(self, config: Path, pool: Path) -> None:
        self._arguments = ["train", str(config), "--pool", str(pool), "--memory-ranks", "1"]

    def start(self, metrics: Path) -> subprocess.Popen[bytes]:
        where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self._memory_rank = start(self._arguments, RANK="1", **where)
        return start([*self._arguments, "--metrics", str(metrics)], RANK="0", **where)

    def await_end(self) -> None:
        self._memory_rank.wait()

    def stop(self) -> None:
        pass


class Apart:
    """The memory rank outlives the trainer."""

    def __init__(self, config: Path, pool: Path) -> None:
        address = f"127.0.0.1:{free_port()}"
        self._server = start(["serve", str(pool), "--listen", address])
        self._arguments = ["train", str(config), "--pool", str(pool), "--memory-ranks-at", address]

    def start(self, metrics: Path) -> subprocess.Popen[bytes]:
        return start([*self._arguments, "--metrics", str(metrics)])

    def await_end(self) -> None:
        pass  # a trainer may come at once

    def stop(self) -> None:
        self._server.send_signal(signal.SIGTERM)
        self._server.wait()


def round_of(way: type[Together | Apart], directory: Path) -> tuple[float, float]:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    config = directory / "run.toml"
    config.write_text(CONFIG)
    ranks = way(config, directory / "pool")
    trainer = ranks.start(directory / "before.jsonl")
    await_steps(directory / "before.jsonl", STEPS_BEFORE, trainer)
    trainer.kill()
    trainer.wait()
    began = time.monotonic()
    ranks.await_end()  # whoever restarts it can only then
    trainer = ranks.start(directory / "after.jsonl")
    first = await_steps(directory / "after.jsonl", 1, trainer) - began
    later = await_steps(directory / "after.jsonl", STEPS_TIMED, trainer) - began
    trainer.send_signal(signal.SIGTERM)
    trainer.wait()
    ranks.await_end()
    ranks.stop()
    return first, later


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    took: dict[str, list[tuple[float, float]]] = {"Together": [], "Apart": []}
    for _ in range(arguments.rounds):
        for way in (Together, Apart):
            took[way.__name__].append(round_of(way, arguments.directory / way.__name__))
    for name, rounds in took.items():
        first, later = (statistics.median(times) for times in zip(*rounds, strict=True))
        print(json.dumps({"way": name, "first_step_s": round(first, 2), f"step_{STEPS_TIMED}_s": round(later, 2)}))
        print(rounds)


if __name__ == "__main__":
    main()
