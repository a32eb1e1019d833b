"""Cuts the power of recorded verbs: `recorded_cuts.py VERB SEED [--cuts N]`, or `--number N` for one cut of a seed.

A cut is a function of the recording, a seed and a number: the number says after which event the power goes, and both
say what of the unsynced is left.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from crash_disk import CrashDisk, read_events
from holdfast.state.reproducibility import prepare_environment
from verbs import VERBS

HERE = Path(__file__).parent


def record(directory: Path, verbs: Sequence[str]) -> None:
    """See record_verbs.py."""
    recorder = directory / "recorder.so"
    source = HERE / "recorder_shim.cpp"
    subprocess.run(["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-o", recorder, source, "-ldl"], check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(recorder),
        "OMP_NUM_THREADS": "1",
        "MKL_CBWR": "AUTO,STRICT",
        "ARROW_DEFAULT_MEMORY_POOL": "system",
    }
    subprocess.run([sys.executable, HERE / "record_verbs.py", directory, *verbs], check=True, env=environment)


@dataclass(frozen=True, slots=True)
class Cut:
    """What a cut left: in `root`, for as long as the next is not made. after: events that had taken effect; event: the
    last of them, in words."""

    number: int
    after: int
    event: str
    root: Path
    has_returned: bool


def cuts(recording: Path, scratch: Path, *, seed: int, count: int, syncs: bool = True) -> Iterator[Cut]:
    """`count` cuts of a recorded verb, spread evenly over its events; the last comes after its end. syncs: whether the
    file system does what it is asked for."""
    events = [event for event in read_events(recording / "log") if syncs or event.kind != "S"]
    disk = CrashDisk(recording / "before", as_path=recording / "root")
    applied = 0
    for number in range(count):
        after = round(number * len(events) / max(1, count - 1))
        while applied < after:
            disk.apply(events[applied])
            applied += 1
        root = scratch / "root"
        shutil.rmtree(root, ignore_errors=True)
        disk.cut(random.Random(f"{seed} {number}"), root)
        last = events[after - 1] if after else None
        words = "nothing" if last is None else f"{last.kind} {Path(last.path).name} {Path(last.other).name}".strip()
        yield Cut(number, after, words, root, after == len(events))


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """In memory, where there is some: what is judged need not be synced."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="holdfast-power-", dir=parent) as directory:
        yield Path(directory)


@contextmanager
def recording_directory() -> Iterator[Path]:
    """On a disk: pools in memory promise nothing for a power cut, and keep nothing for one."""
    build = HERE.parents[1] / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="power-", dir=build) as directory:
        yield Path(directory)


@contextmanager
def threads_of_recordings() -> Iterator[None]:
    """One: what a cut left goes on as the run that was recorded."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def judge_cuts(
    recording: Path, name: str, *, seed: int, count: int, only: int | None = None, syncs: bool = True
) -> list[str]:
    """What was not as promised, a line for each cut."""
    verb = VERBS[name]
    failures = []
    with scratch_directory() as scratch, threads_of_recordings():
        before, end = scratch / "before", scratch / "end"
        shutil.copytree(recording / "before", before)
        shutil.copytree(recording / "root", end)
        sources, expected = verb.sources(before), verb.value(end)
        assert expected is not None
        for cut in cuts(recording, scratch, seed=seed, count=count, syncs=syncs):
            if only not in (None, cut.number):
                continue
            try:
                verb.judge(cut.root, sources, expected, has_returned=cut.has_returned)
            except Exception as error:
                failures.append(
                    f"{name}, seed {seed}, cut {cut.number} of {count}, after event {cut.after} ({cut.event}): "
                    f"{type(error).__name__}: {error}"
                )
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("seed", type=int)
    parser.add_argument("--cuts", type=int, default=200)
    parser.add_argument("--number", type=int, help="this cut alone")
    options = parser.parse_args()
    prepare_environment()
    with recording_directory() as directory:
        record(directory, [options.verb])
        failures = judge_cuts(
            directory / options.verb, options.verb, seed=options.seed, count=options.cuts, only=options.number
        )
    print("\n".join(failures) or f"{options.cuts} cuts of {options.verb}: all as promised")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
