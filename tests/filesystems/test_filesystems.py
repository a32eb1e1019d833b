"""Pools on the file systems that people have, on disks with sectors of 512 and of 4096 bytes: killed, cut from power,
out of space, and on a disk that fails."""

from __future__ import annotations

import os
import random
import signal
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from crash_runs import Zygote, digest
from holdfast import _core
from holdfast.errors import PoolError, PoolFull
from loop_disks import CELLS, MIB, Cell, Host, LoopDisk, reserve, run
from test_kill import IN_A_SMALL_ROW_LOG
from test_row_log_faults import Rows, trained
from test_row_log_faults import digest as digest_of_rows

pytestmark = pytest.mark.thorough

SEED = 20261125
STEPS = 48
STORES: dict[str, dict[str, Any]] = {
    "in_place": {"steps": STEPS, "dense_interval": 2},
    "row_log": {**IN_A_SMALL_ROW_LOG, "steps": STEPS, "dense_interval": 2},
}

on_every_file_system = pytest.mark.parametrize("cell", CELLS, ids=str)


@dataclass
class References:
    """What uninterrupted runs end with, by store."""

    zygote: Zygote
    root: Path
    found: dict[str, tuple[str, int]] = field(default_factory=dict)

    def of(self, store: str) -> tuple[str, int]:
        """The digest, and how many persist points such a run has."""
        if store not in self.found:
            result = self.zygote.run(self.root / store, STORES[store])["result"]
            self.found[store] = digest(self.root / store), result["persist_points"]
        return self.found[store]


@pytest.fixture(scope="module")
def references(zygote: Zygote, new_root: Any) -> References:
    return References(zygote, new_root())


@on_every_file_system
def test_a_run_that_is_killed_ends_as_one_that_was_not(disk: LoopDisk, zygote: Zygote, references: References) -> None:
    for store, options in STORES.items():
        expected, persist_points = references.of(store)
        pool = disk.path / store
        draw = random.Random(f"{SEED} {disk.cell} {store}")
        for _ in range(2):
            kill_at = draw.randrange(1, persist_points // 2)
            assert zygote.run(pool, options, kill_at=kill_at)["signal"] == signal.SIGKILL
        zygote.run(pool, options)
        assert digest(pool) == expected, store
        disk.remount()
        assert digest(pool) == expected, f"{store}, read from the disk"


@dataclass
class Running:
    """A run that goes on until it is killed, and says how far it is."""

    zygote: Zygote
    pool: Path
    progress: Path

    def __post_init__(self) -> None:
        self.progress.unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.answer = self.zygote.run(self.pool, STORES["row_log"], progress=self.progress)

    def durable(self) -> int:
        return self._numbers()[0]

    def wait_for(self, step: int) -> None:
        while self._thread.is_alive() and self.durable() < step:
            time.sleep(0.0005)

    def kill(self) -> None:
        if self._thread.is_alive() and (process := self._numbers()[1]) != 0:
            os.kill(process, signal.SIGKILL)
        self._thread.join()

    def _numbers(self) -> tuple[int, int]:
        data = self.progress.read_bytes() if self.progress.exists() else b""
        return struct.unpack("<QQ", data) if len(data) == 16 else (0, 0)


def lose_power(disk: LoopDisk, zygote: Zygote, references: References, root: Path, cuts: int, seed: int) -> None:
    """Cuts the power of runs, some of which go on from a kill, and opens what each cut leaves."""
    expected, _ = references.of("row_log")
    draw = random.Random(f"{seed} {disk.cell}")
    for first in range(0, cuts, 5):
        left = []
        running = Running(zygote, disk.path / "pool", root / "progress")
        for number, step in enumerate(sorted(draw.randrange(1, STEPS - 1) for _ in range(min(5, cuts - first)))):
            running.wait_for(step)
            time.sleep(draw.random() * 0.01)  # anywhere in a step
            durable = running.durable()
            left.append((disk.cut(number), durable))
        running.kill()
        disk.unmount()
        for cut, durable in left:
            with cut.mounted() as path:
                result = zygote.run(path / "pool", STORES["row_log"])["result"]
                assert result["resumed_at"] >= durable, f"seed {seed}: step {durable} was durable"
                assert digest(path / "pool") == expected, f"seed {seed}: a cut after step {durable}"
        disk.mount()
        for path in disk.path.rglob("*"):
            if path.is_file():
                path.unlink()


@on_every_file_system
def test_no_cut_of_the_power_loses_a_durable_step(
    disk: LoopDisk, zygote: Zygote, references: References, tmp_path: Path
) -> None:
    lose_power(disk, zygote, references, tmp_path, 2, SEED)


@pytest.mark.soak
@on_every_file_system
def test_none_of_many_cuts_of_the_power_loses_a_durable_step(
    disk: LoopDisk, zygote: Zygote, references: References, tmp_path: Path
) -> None:
    lose_power(disk, zygote, references, tmp_path, 30, random.SystemRandom().randrange(1 << 32))


MANY_ROWS = 200_000  # × more bytes than there is space for


@on_every_file_system
def test_a_full_file_system_ends_a_run_which_goes_on_when_there_is_space(
    disk: LoopDisk, pool_root: Path, tmp_path: Path
) -> None:
    pool = disk.path / "pool"
    trained(pool, 3, rows=MANY_ROWS)
    rows = Rows(pool, rows=MANY_ROWS)
    reserve(disk.path / "ballast", 3 * MIB)
    with pytest.raises(PoolFull, match=r"space.*opened again"):
        rows.steps(3000)
    durable, reached = rows.pool.durable_step, rows.pool.step
    with pytest.raises(PoolFull):
        rows.pool.close()
    (disk.path / "ballast").unlink()
    with Rows(pool, rows=MANY_ROWS) as rows:
        assert durable <= rows.pool.step <= reached
        rows.steps(reached + 3 - rows.pool.step)
    disk.remount()
    assert digest_of_rows(pool) == digest_of_rows(
        trained(pool_root / "whole", reached + 3, rows=MANY_ROWS, medium="memory")
    )


@on_every_file_system
def test_rows_in_place_are_opened_and_end_with_a_typed_error_on_a_file_system_with_less_room_than_their_log(
    disk: LoopDisk,
) -> None:
    """XFS asks for as much room as a range has blocks already, btrfs for more wherever something is overwritten."""
    how: dict[str, Any] = {"rows": MANY_ROWS, "medium": "memory", "log_bytes": 32 * MIB}
    trained(disk.path / "pool", 3, **how)
    reserve(disk.path / "ballast", 4 * MIB)
    rows = Rows(disk.path / "pool", **how)
    assert rows.pool.step == 3
    with pytest.raises(PoolFull, match="free space there"):
        rows.steps(3000)
    reached = rows.pool.step
    (disk.path / "ballast").unlink()
    rows.pool.close()
    with Rows(disk.path / "pool", **how) as rows:
        assert rows.pool.step == reached > 3
        rows.step()


def open_again(disk: LoopDisk, pool: Path) -> Rows:
    """On the disk as the kernel has it, or, where the file system has given up with the disk, mounted anew."""
    try:
        return Rows(pool, rows=MANY_ROWS)
    except (PoolError, OSError):
        pass
    disk.remount()
    return Rows(pool, rows=MANY_ROWS)


def train_without_space(rows: Rows, host: Host) -> None:
    for _ in range(50):
        host.fill()
        rows.steps(100)


@on_every_file_system
def test_what_a_disk_that_failed_did_not_take_is_not_believed_by_the_next_run(
    disk: LoopDisk, host: Host, pool_root: Path
) -> None:
    pool = disk.path / "pool"
    rows = Rows(pool, rows=MANY_ROWS)  # new ones come on and on, and want space
    rows.steps(3)
    try:
        with pytest.raises(PoolError):
            train_without_space(rows, host)
        durable = rows.pool.durable_step
        with pytest.raises(PoolError):
            rows.pool.close()
    finally:
        host.free()
    rows = open_again(disk, pool)
    assert rows.pool.step >= durable
    rows.steps(4)
    rows.pool.flush()
    durable = rows.pool.durable_step
    left = disk.cut(0)
    rows.pool.close()
    disk.unmount()
    with left.mounted() as path, Rows(path / "pool", rows=MANY_ROWS) as rows:
        assert rows.pool.step >= durable
        rows.steps(durable + 20 - rows.pool.step)
        rows.pool.close()
        assert _core.Reader(str(path / "pool")).verify() == []
        assert digest_of_rows(path / "pool") == digest_of_rows(
            trained(pool_root / "whole", durable + 20, rows=MANY_ROWS, medium="memory")
        )


def test_a_pool_is_moved_between_disks_of_different_sectors(host: Host, pool_root: Path) -> None:
    disks = [LoopDisk.make(Cell("ext4", size, 128 * MIB, CELLS[0].mkfs), host, f"of-{size}") for size in (512, 4096)]
    try:
        steps = 0
        for turn in range(4):
            here, there = (disks[(turn + i) % 2].path / "pool" for i in (0, 1))
            steps += 25
            with Rows(here) as rows:
                rows.steps(25)
            there.parent.mkdir(exist_ok=True)
            run("rm", "-rf", there)
            run("cp", "-a", "--sparse=always", here, there)
        assert digest_of_rows(disks[0].path / "pool") == digest_of_rows(
            trained(pool_root / "whole", steps, medium="memory")
        )
    finally:
        for disk in disks:
            disk.close()
