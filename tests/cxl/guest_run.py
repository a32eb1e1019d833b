"""The training run inside the guest, and what it says on the console.

It imports everything, trains a few steps in memory, runs every verb once, and says ``guest: waiting``: that is when the
snapshot is taken. Then it reads one job, a line of JSON {"time", "medium", "boot_id", "format", "steps"}; attaches the
medium, and trains to the last step on it as ``holdfast train`` does. A step is said to be durable after the pool said
so: whatever was read of these lines before a cut binds recovery. A job that has "verbs" is guest_verbs.py's.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import guest_verbs
from holdfast import _core
from holdfast.admin.digest import digest_pool
from holdfast.cli.options import read_run
from holdfast.cli.training import describe_start
from holdfast.errors import PoolError
from holdfast.pools.directory import exists
from holdfast.run.assembly import open_trainer
from holdfast.run.sections import RunConfig
from holdfast.train.trainer import Trainer

CONFIG = Path(__file__).parent / "run.toml"
MOUNT = Path("/mnt")
LOGS = Path("/log")  # where the medium of a log of its own is mounted
WARM_UP_STEPS = 4


def say(kind: str, what: object = "") -> None:
    text = what if isinstance(what, str) else json.dumps(what)
    print(f"guest: {kind} {text}".rstrip(), flush=True)


def config_of(steps: int, *, log_apart: bool = False) -> RunConfig:
    overrides = ["pool.medium=block", f"pool.log.directory={LOGS}"] if log_apart else None
    config = read_run([CONFIG], overrides)
    return replace(config, train=replace(config.train, steps=steps))


def warm_up() -> None:
    """Whatever a run imports or computes only once."""
    with tempfile.TemporaryDirectory() as directory:
        pool = Path(directory) / "pool"
        with open_trainer(config_of(WARM_UP_STEPS), pool) as trainer:
            for _ in trainer.steps():
                pass
        digest_pool(_core.Reader(str(pool)))
    guest_verbs.warm_up()


def mapped_files(pool: Path) -> Iterator[tuple[str, bool]]:
    """Every mapping of a file of the pool, and whether it is synchronous: `sf` is how the kernel shows MAP_SYNC."""
    name = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if header := re.match(r"[0-9a-f]+-[0-9a-f]+ .{4} \S+ \S+ \d+ *(.*)", line):
            name = header[1]
        elif line.startswith("VmFlags:") and name.startswith(f"{pool}/"):
            yield name.removeprefix(f"{pool}/"), "sf" in line.split()


def open_files(pool: Path) -> Iterator[tuple[str, bool]]:
    """Every file descriptor of a file of the pool, and whether it goes past the page cache."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            name = str(link.readlink())
            flags = re.search(r"flags:\s*(\d+)", Path(f"/proc/self/fdinfo/{link.name}").read_text())
        except FileNotFoundError:  # of the directory that is being listed
            continue
        if flags is not None and name.startswith((f"{pool}/", f"{LOGS}/")):
            yield name.removeprefix(f"{pool}/"), bool(int(flags[1], 8) & os.O_DIRECT)


def evidence(trainer: Trainer, pool: Path) -> dict[str, Any]:
    """How the pool's files are really used, as the kernel tells it."""
    mount = next(line for line in Path("/proc/mounts").read_text().splitlines() if line.split()[1] == str(MOUNT))
    found: dict[str, Any] = {
        "medium": trainer.pool.core.medium,
        "store": trainer.pool.core.header["store"],
        "level": trainer.pool.level,
        "mount": mount,
        "kernels": _core.instruction_set(),
        "mapped with MAP_SYNC": sorted(name for name, synced in mapped_files(pool) if synced),
        "mapped without": sorted(name for name, synced in mapped_files(pool) if not synced),
        "open with O_DIRECT": sorted(name for name, direct in open_files(pool) if direct),
    }
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    found["io_uring instances"] = links.count("anon_inode:[io_uring]")
    if (cache := Path("/sys/block/vda/queue/write_cache")).exists():
        found["disk's write cache"] = cache.read_text().strip()
    return found


def attach(job: dict[str, Any]) -> None:
    time.clock_settime(time.CLOCK_REALTIME, job["time"])  # it would go on from that of the snapshot, in every life
    command = ["/attach.sh", job["medium"], job["boot_id"], *(["format"] if job["format"] else [])]
    subprocess.run(command, check=True)


def live(job: dict[str, Any]) -> None:
    """One life of the machine with its medium."""
    attach(job)
    if "verbs" in job:
        guest_verbs.live(job, MOUNT, say)
        return
    try:
        train(job)
    except PoolError as error:  # of the log's device, where that may lose its power alone
        home = os.open(MOUNT, os.O_RDONLY)
        if job["medium"] != "apart" or ctypes.CDLL(None).syncfs(home) != 0:
            raise
        say("lost", f"{type(error).__name__}: {error}")


def train(job: dict[str, Any]) -> None:
    pool = MOUNT / "pool"
    say("opening")
    if exists(pool) and (problems := _core.Reader(str(pool)).verify()):
        raise AssertionError(f"the pool is damaged: {problems}")
    with open_trainer(config_of(job["steps"], log_apart=job["medium"] == "apart"), pool) as trainer:
        say("opened", {"step": trainer.pool.step, "words": describe_start(trainer)})
        say("evidence", evidence(trainer, pool))
        for report in trainer.steps():
            say("step", f"{report.step} durable {trainer.pool.durable_step}")
        trainer.checkpoint.flush()
        say("step", f"{trainer.pool.step} durable {trainer.pool.durable_step}")
        traffic = trainer.pool.core.traffic() or {}
    reader = _core.Reader(str(pool))
    problems = reader.verify()
    if problems:
        raise AssertionError(f"the closed pool is damaged: {problems}")
    say("end", {"digest": digest_pool(reader).whole, "merged_bytes": traffic.get("merged_bytes", 0)})


def serve() -> None:
    warm_up()
    line = ""
    while not line:  # what wakes the console up may lose characters; an empty line asks again
        say("waiting")
        line = sys.stdin.readline().strip()
    try:
        live(json.loads(line))
    except BaseException as error:
        say("failed", f"{type(error).__name__}: {error}")
        traceback.print_exc()


if __name__ == "__main__":
    serve()
