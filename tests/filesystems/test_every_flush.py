"""The power goes at any flush that a file system sends to its disk, while holdfast's verbs write: what is left of the
disk is mounted, and judged as verbs.py says. Runs that are cut find every durable step."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from crash_runs import Zygote, digest
from holdfast import _core
from loop_disks import CELLS, LoopDisk
from recorded_cuts import threads_of_recordings
from recorded_disk import RecordedDisk
from test_filesystems import STORES, References, on_every_file_system
from test_filesystems import references as references
from verbs import VERBS

SEED = 20261125
CUTS = 6  # of those at flushes, in make test

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(shutil.which("nbdfuse") is None, reason="no nbdfuse (package nbdfuse of Debian)"),
]


def run_in_child(function: Callable[[Path], None], root: Path) -> None:
    """In a fork of a process that has imported what verbs do: whoever waits for a disk must not serve it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["verbs"])
    child = context.Process(target=_run, args=(function, root))
    child.start()
    child.join()
    assert child.exitcode == 0


def _run(function: Callable[[Path], None], root: Path) -> None:
    torch.set_num_threads(1)
    function(root)


def judge(
    name: str, disk: LoopDisk, scratch: Path, *, seed: int, count: int | None, forgetful: bool = False
) -> list[str]:
    """What was not as promised after `count` of the cuts at flushes (None: all), a line for each. scratch: in memory,
    since what is judged need not be synced."""
    verb = VERBS[name]
    root = disk.path / "root"
    root.mkdir()
    run_in_child(verb.prepare, root)
    disk.unmount()
    recorded = RecordedDisk(disk)
    failures = []
    try:
        recorded.mount()
        before, end = scratch / "before", scratch / "end"
        shutil.copytree(recorded.path / "root", before)
        run_in_child(verb.run, recorded.path / "root")
        mark = recorded.mark()
        shutil.copytree(recorded.path / "root", end)
        recorded.unmount()
        with threads_of_recordings():
            sources, expected = verb.sources(before), verb.value(end)
            assert expected is not None
            for cut in recorded.cuts(mark, seed, count, forgetful=forgetful):
                left = scratch / str(cut.number) / "root"
                try:
                    with cut.disk.mounted() as path:
                        shutil.copytree(path / "root", left)
                    verb.judge(left, sources, expected, has_returned=cut.is_end)
                except Exception as error:
                    failures.append(f"{name}, seed {seed}, {cut}: {type(error).__name__}: {error}")
                shutil.rmtree(left.parent, ignore_errors=True)
    finally:
        recorded.close()
    return failures


@pytest.mark.parametrize(
    ("name", "cell"), [(name, CELLS[number % len(CELLS)]) for number, name in enumerate(VERBS)], ids=str
)
def test_a_verb_that_is_cut_at_a_flush_leaves_nothing_half(name: str, disk: LoopDisk, pool_root: Path) -> None:
    assert judge(name, disk, pool_root, seed=SEED, count=CUTS) == []


@pytest.mark.soak
@on_every_file_system
@pytest.mark.parametrize("name", VERBS)
def test_a_verb_that_is_cut_at_every_flush_leaves_nothing_half(name: str, disk: LoopDisk, pool_root: Path) -> None:
    failures = judge(name, disk, pool_root, seed=random.SystemRandom().randrange(1 << 32), count=None)
    assert failures == [], "\n".join(failures)


@pytest.mark.parametrize("cell", CELLS[:1], ids=str)
def test_a_disk_that_does_nothing_at_a_flush_is_noticed(disk: LoopDisk, pool_root: Path) -> None:
    """What shows that the cuts can find something."""
    assert judge("export", disk, pool_root, seed=SEED, count=None, forgetful=True) != []


def lose_power_at_flushes(
    disk: LoopDisk, zygote: Zygote, references: References, note: Path, *, seed: int, count: int | None
) -> None:
    options, (expected, _) = STORES["row_log"], references.of("row_log")
    disk.unmount()
    recorded = RecordedDisk(disk, note)
    try:
        recorded.mount()
        zygote.run(recorded.path / "pool", options, progress=note)
        assert _core.Reader(str(recorded.path / "pool")).header["level"] == "power"
        mark = recorded.mark()
        recorded.unmount()
        for cut in recorded.cuts(mark, seed, count):
            durable, _ = struct.unpack("<QQ", cut.note) if cut.note else (0, 0)
            with cut.disk.mounted() as path:
                result = zygote.run(path / "pool", options)["result"]
                assert result["resumed_at"] >= durable, f"seed {seed}, {cut}: step {durable} was durable"
                assert digest(path / "pool") == expected, f"seed {seed}, {cut}, after step {durable}"
    finally:
        recorded.close()


@on_every_file_system
def test_a_run_that_is_cut_at_a_flush_finds_every_durable_step(
    disk: LoopDisk, zygote: Zygote, references: References, tmp_path: Path
) -> None:
    lose_power_at_flushes(disk, zygote, references, tmp_path / "note", seed=SEED, count=CUTS)


@pytest.mark.soak
@on_every_file_system
def test_a_run_that_is_cut_at_every_flush_finds_every_durable_step(
    disk: LoopDisk, zygote: Zygote, references: References, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    lose_power_at_flushes(disk, zygote, references, tmp_path / "note", seed=seed, count=None)
