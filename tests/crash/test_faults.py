"""Faults while a pool is opened, trained and closed: a typed error that names the file, no further step, and an opening
that goes on at or after the last durable step and ends with the digest of a run without faults."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from errno import EACCES, EAGAIN, EFBIG, EIO, EMFILE, ENOMEM, ENOSPC, EROFS
from pathlib import Path
from typing import Any, Literal

import pytest

from crash_runs import HERE, Zygote, digest, disk_root, pool_root
from faults import FOR_GOOD, Fault
from holdfast import _core
from holdfast.admin.snapshot import open_chain
from holdfast.errors import Corrupted, UntrustedPool
from holdfast.pools.pool import Pool
from test_kill import IN_A_SMALL_ROW_LOG

IN_PLACE: dict[str, Any] = {"dense_interval": 2}
ROW_LOG: dict[str, Any] = {**IN_A_SMALL_ROW_LOG, "steps": 30, "dense_interval": 2}

HOME = ".home"
ADDRESSES = ".addresses"
LOG = "row-log-0000"
UNDO_LOG = "log-0000"
ROWS = ".weights"
SUPERBLOCK = "pool.holdfast"
CHECKPOINTS = 8192  # bytes at the head of a row log


@dataclass(frozen=True)
class Case:
    """A fault, and the error that it ends in; none: the run does not notice. says: in its message. leaves: how the pool
    is found afterwards."""

    fault: Fault
    error: str | None
    says: str
    leaves: Literal["open", "closed", "either", "untrusted"] = "open"


def at(stage: str, call: str, file: str, error: int = 0, **details: Any) -> Fault:
    return Fault(stage=stage, call=call, file=file, error=error, **details)


def beside_threads(stage: str, call: str, file: str, error: int = 0, **details: Any) -> Fault:
    """Of what goes through an io_uring, where there is one."""
    return Fault(stage=stage, call=call, file=file, error=error, rings=0, **details)


WHILE_ROWS_ARE_IN_PLACE = {
    "rows_allocate_eio": Case(at("training", "fallocate", ROWS, EIO), "PoolFailed", "table-0000.weights"),
    "touched_allocate_eio": Case(at("training", "fallocate", ".touched", EIO), "PoolFailed", ".touched"),
    "dense_grow_enospc": Case(at("training", "fallocate", "dense-1", ENOSPC), "PoolFull", "dense-1"),
    "dense_grow_eio": Case(at("training", "fallocate", "dense-1", EIO), "PoolFailed", "dense-1"),
    "dense_resize_efbig": Case(at("training", "ftruncate", "dense-1", EFBIG), "PoolFailed", "dense-1"),
    "dense_map_enomem": Case(at("training", "mmap", "dense-1", ENOMEM), "PoolFailed", "dense-1"),
    "close_rows_msync_eio": Case(at("closing", "msync", ROWS, EIO), "PoolFailed", "table-0000.weights", "untrusted"),
    "close_rows_fsync_eio": Case(
        at("closing", "fsync", ".touched", EIO, nth=2), "PoolFailed", "table-0001.touched", "untrusted"
    ),
    "close_undo_log_fsync_eio": Case(at("closing", "fsync", UNDO_LOG, EIO), "PoolFailed", UNDO_LOG, "untrusted"),
    "close_dense_msync_eio": Case(at("closing", "msync", "dense-0", EIO), "PoolFailed", "dense-0", "untrusted"),
    "close_superblock_fsync_eio": Case(at("closing", "fsync", SUPERBLOCK, EIO), "PoolFailed", SUPERBLOCK, "untrusted"),
    "close_clean_record_fsync_eio": Case(
        at("closing", "fsync", SUPERBLOCK, EIO, nth=2), "PoolFailed", SUPERBLOCK, "closed"
    ),
}

WHILE_ROWS_COME_FROM_A_LOG = {
    "append_eio": Case(at("midway", "pwrite", LOG, EIO), "PoolFailed", LOG),
    # A merge whose checkpoint meets it tries again.
    "append_enospc": Case(at("midway", "pwrite", LOG, ENOSPC, times=FOR_GOOD), "PoolFull", LOG),
    "append_erofs": Case(at("midway", "pwrite", LOG, EROFS), "PoolReadOnly", LOG),
    "append_short": Case(at("midway", "pwrite", LOG, most_bytes=512), None, ""),
    "append_of_nothing": Case(at("midway", "pwrite", LOG, most_bytes=0), "PoolFailed", LOG),
    "log_sync_eio": Case(
        at("midway", "fdatasync", LOG, EIO), "PoolFailed", f"{LOG}: Input/output error; the device failed"
    ),
    "checkpoint_eio": Case(at("training", "pwrite", LOG, EIO, below=CHECKPOINTS), "PoolFailed", LOG),
    "checkpoint_short": Case(at("training", "pwrite", LOG, most_bytes=512, below=CHECKPOINTS), None, ""),
    "home_write_eio": Case(beside_threads("training", "pwrite", HOME, EIO), "PoolFailed", HOME),
    "home_write_short": Case(beside_threads("training", "pwrite", HOME, most_bytes=512), None, ""),
    "home_write_enospc": Case(
        beside_threads("training", "pwrite", HOME, ENOSPC, times=FOR_GOOD), "PoolFull", "No space"
    ),
    "home_sync_eio": Case(at("training", "fdatasync", HOME, EIO), "PoolFailed", HOME),
    "merge_home_eio": Case(beside_threads("training", "pread", HOME, EIO), "PoolFailed", HOME),
    "merge_home_short": Case(beside_threads("training", "pread", HOME, most_bytes=512), None, ""),
    "merge_home_ends": Case(beside_threads("training", "pread", HOME, most_bytes=0), "Corrupted", "ends too early"),
    "addresses_write_eio": Case(beside_threads("training", "pwrite", ADDRESSES, EIO), "PoolFailed", ADDRESSES),
    "addresses_write_short": Case(beside_threads("training", "pwrite", ADDRESSES, most_bytes=512), None, ""),
    "addresses_write_enospc": Case(
        beside_threads("training", "pwrite", ADDRESSES, ENOSPC, times=FOR_GOOD), "PoolFull", "No space"
    ),
    "addresses_sync_eio": Case(at("training", "fdatasync", ADDRESSES, EIO), "PoolFailed", ADDRESSES),
    "fetch_log_eio": Case(beside_threads("midway", "pread", LOG, EIO), "PoolFailed", LOG),
    "fetch_log_short": Case(beside_threads("midway", "pread", LOG, most_bytes=512), None, ""),
    "dense_write_eio": Case(at("midway", "pwrite", "dense-", EIO), "PoolFailed", "dense-"),
    "dense_write_enospc": Case(at("midway", "pwrite", "dense-", ENOSPC), "PoolFull", "dense-"),
    "dense_write_short": Case(at("midway", "pwrite", "dense-", most_bytes=700), None, ""),
    "dense_sync_eio": Case(at("midway", "msync", "dense-", EIO), "PoolFailed", ""),
    "dense_grow_enospc": Case(at("training", "fallocate", "dense-1", ENOSPC), "PoolFull", "dense-1"),
    "dense_map_enomem": Case(at("training", "mmap", "dense-1", ENOMEM), "PoolFailed", "dense-1"),
    "no_thread_to_collect": Case(at("training", "pthread_create", "", EAGAIN, nth=2), "PoolFailed", "hf-collect"),
    "no_thread_to_fetch": Case(at("training", "pthread_create", "", EAGAIN, nth=3), "PoolFailed", "hf-exchange"),
    "close_dense_fsync_eio": Case(at("closing", "fsync", "dense-0", EIO), "PoolFailed", "dense-0"),
    "close_commit_msync_eio": Case(at("closing", "msync", SUPERBLOCK, EIO), "PoolFailed", ""),
    "close_clean_record_msync_eio": Case(at("closing", "msync", SUPERBLOCK, EIO, nth=3), "PoolFailed", "", "closed"),
}

# For good: the sweep beside the first steps may come to it first, and leaves it to whoever wants the row.
WHILE_EVERY_MISSED_ROW_IS_READ = {
    "home_eio": Case(beside_threads("training", "pread", HOME, EIO, times=FOR_GOOD), "PoolFailed", HOME),
    "home_short": Case(beside_threads("training", "pread", HOME, most_bytes=512), None, ""),
    # A merge may come to it first, which is a failure of the pool.
    "home_ends": Case(
        beside_threads("training", "pread", HOME, most_bytes=0, times=FOR_GOOD), "Corrupted", "ends too early", "either"
    ),
}

WHILE_IT_OPENS_IN_PLACE = {
    "open_eio": Case(at("opening", "open", ROWS, EIO), "PoolFailed", ROWS),
    "open_emfile": Case(at("opening", "open", "dense-1", EMFILE), "PoolFailed", "dense-1"),
    "map_enomem": Case(at("opening", "mmap", ".state", ENOMEM), "PoolFailed", ".state"),
    "allocate_enospc": Case(at("opening", "fallocate", UNDO_LOG, ENOSPC, times=FOR_GOOD), "PoolFull", UNDO_LOG),
    "epoch_fsync_eio": Case(at("opening", "fsync", SUPERBLOCK, EIO), "PoolFailed", SUPERBLOCK),
    "no_thread_to_commit": Case(at("opening", "pthread_create", "", EAGAIN), "PoolFailed", "hf-commit"),
}

WHILE_IT_OPENS_FROM_A_LOG = {
    "open_eacces": Case(at("opening", "open", LOG, EACCES), "PoolReadOnly", LOG),
    "addresses_eio": Case(beside_threads("opening", "pread", ADDRESSES, EIO), "PoolFailed", ADDRESSES),
    "scan_eio": Case(beside_threads("opening", "pread", LOG, EIO, nth=4), "PoolFailed", LOG),
    "dense_sync_eio": Case(at("opening", "msync", "dense-", EIO), "PoolFailed", ""),
    "epoch_msync_eio": Case(at("opening", "msync", SUPERBLOCK, EIO), "PoolFailed", ""),
    "epoch_fsync_eio": Case(at("opening", "fsync", SUPERBLOCK, EIO), "PoolFailed", SUPERBLOCK),
    "log_sync_eio": Case(at("opening", "fdatasync", LOG, EIO), "PoolFailed", LOG),
    "checkpoint_eio": Case(at("opening", "pwrite", LOG, EIO), "PoolFailed", LOG),
    "checkpoint_sync_eio": Case(at("opening", "fdatasync", LOG, EIO, nth=2), "PoolFailed", LOG),
    "no_thread_to_merge": Case(at("opening", "pthread_create", "", EAGAIN), "PoolFailed", "hf-merge"),
}

WHILE_IT_IS_MADE_IN_PLACE = {
    "create_enospc": Case(at("opening", "open", "table-0001.state", ENOSPC), "PoolFull", "table-0001.state"),
    "resize_eio": Case(at("opening", "ftruncate", ROWS, EIO), "PoolFailed", ROWS),
    "undo_log_allocate_enospc": Case(
        at("opening", "fallocate", UNDO_LOG, ENOSPC, times=FOR_GOOD), "PoolFull", UNDO_LOG
    ),
    "superblock_sync_eio": Case(at("opening", "fsync", SUPERBLOCK, EIO), "PoolFailed", SUPERBLOCK),
    "superblock_rename_eio": Case(at("opening", "rename", SUPERBLOCK, EIO), "PoolFailed", SUPERBLOCK),
    "name_sync_eio": Case(at("opening", "fsync", "/pool$", EIO), "PoolFailed", "/pool"),
}

WHILE_IT_IS_MADE_WITH_A_LOG = {
    "no_thread_to_write": Case(beside_threads("opening", "pthread_create", "", EAGAIN), None, ""),
    "create_enospc": Case(at("opening", "open", "table-0001.home", ENOSPC), "PoolFull", "table-0001.home"),
    "home_sync_eio": Case(at("opening", "fsync", HOME, EIO), "PoolFailed", HOME),
    "addresses_create_enospc": Case(at("opening", "open", ADDRESSES, ENOSPC), "PoolFull", ADDRESSES),
    "log_allocate_enospc": Case(at("opening", "fallocate", LOG, ENOSPC), "PoolFull", LOG),
    "checkpoint_eio": Case(at("opening", "pwrite", LOG, EIO), "PoolFailed", LOG),
    "superblock_rename_eio": Case(at("opening", "rename", SUPERBLOCK, EIO), "PoolFailed", SUPERBLOCK),
}

WHILE_THE_UNDO_LOG_GROWS = {
    "allocate_eio": Case(at("opening", "fallocate", UNDO_LOG, EIO, nth=2), "PoolFailed", UNDO_LOG),
    "resize_eio": Case(at("opening", "ftruncate", UNDO_LOG, EIO), "PoolFailed", UNDO_LOG),
    "map_enomem": Case(at("opening", "mmap", UNDO_LOG, ENOMEM, nth=2), "PoolFailed", UNDO_LOG),
}

WHILE_A_SNAPSHOT_IS_TAKEN = {
    "write_eio": Case(at("snapshot", "pwrite", "table-0000.rows", EIO), "PoolFailed", "table-0000.rows"),
    "write_enospc": Case(at("snapshot", "pwrite", "table-0001.rows", ENOSPC), "PoolFull", "table-0001.rows"),
    "write_short": Case(at("snapshot", "pwrite", ".rows", most_bytes=100, times=FOR_GOOD), None, ""),
    "sync_eio": Case(at("snapshot", "fsync", "manifest.json", EIO), "PoolFailed", "manifest.json"),
    "directory_sync_eio": Case(at("snapshot", "fsync", ".partial$", EIO), "PoolFailed", "-snapshot"),
    "name_sync_eio": Case(at("snapshot", "fsync", "", EIO, nth=11), "PoolFailed", "-snapshot"),
    "rename_eacces": Case(at("snapshot", "rename", "-snapshot$", EACCES), "PoolFailed", "-snapshot"),
}
WHILE_A_SNAPSHOT_IS_TAKEN_OF_A_ROW_LOG = {
    "read_home_eio": Case(beside_threads("snapshot", "pread", HOME, EIO), "PoolFailed", HOME),
    "read_log_eio": Case(beside_threads("snapshot", "pread", LOG, EIO, nth=3), "PoolFailed", LOG),
}

MEDIA = {"in_place_on_tmpfs": IN_PLACE, "in_place_on_disk": IN_PLACE, "row_log_on_disk": ROW_LOG}
ROW_LOG_ON_TMPFS = {"row_log_on_tmpfs": ROW_LOG}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Forks runs whose system calls may fail."""
    shim = tmp_path_factory.mktemp("shim") / "fault_shim.so"
    source = str(HERE / "fault_shim.cpp")
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", "-O1", source, "-o", str(shim), "-ldl"], check=True)
    with Zygote(preload=shim) as process:
        yield process


class Medium:
    """Where pools of one kind lie, the digest that they end with, and how many persist points they have until then."""

    def __init__(self, zygote: Zygote, root: Path, options: dict[str, Any]) -> None:
        self.root = root
        self.options = options
        self.persist_points: int = zygote.run(root / "reference", options)["result"]["persist_points"]
        self.digest = digest(root / "reference")


class Media(dict[str, Medium]):
    """By name, made when it is asked for first."""

    def __init__(self, zygote: Zygote, stack: ExitStack) -> None:
        self._zygote = zygote
        self._stack = stack

    def __missing__(self, name: str) -> Medium:
        where = pool_root() if name.endswith("tmpfs") else disk_root()
        root = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-faults-", dir=where))
        self[name] = Medium(self._zygote, Path(root), (MEDIA | ROW_LOG_ON_TMPFS)[name])
        return self[name]


@pytest.fixture(scope="module")
def media(faulty: Zygote) -> Iterator[Media]:
    with ExitStack() as stack:
        yield Media(faulty, stack)


@pytest.fixture
def pool(media: Media, medium: str) -> Iterator[Path]:
    path = media[medium].root / "pool"
    yield path
    shutil.rmtree(path, ignore_errors=True)


def of(**cases: dict[str, Case]) -> Any:
    """Every case on every medium that it is for: in_place, row_log."""
    return pytest.mark.parametrize(
        ("medium", "case"),
        [
            pytest.param(medium, case, id=f"{medium}-{name}")
            for medium in MEDIA
            for kind, named in cases.items()
            if medium.startswith(kind)
            for name, case in named.items()
        ],
    )


def check_error(report: dict[str, Any], case: Case) -> None:
    assert report["struck"] > 0, "nothing was faulty"
    assert report.get("error") == case.error, report
    assert case.says in report.get("message", ""), report


def check_goes_on(faulty: Zygote, medium: Medium, pool: Path, after: int, **options: bool) -> None:
    """Opened again, the pool trains on from step `after` or a later one, and ends as if nothing had happened."""
    result = faulty.run(pool, {**medium.options, **options})["result"]
    assert result["resumed_at"] >= after
    assert digest(pool) == medium.digest
    assert _core.Reader(str(pool)).verify() == []


@of(in_place=WHILE_ROWS_ARE_IN_PLACE, row_log=WHILE_ROWS_COME_FROM_A_LOG)
def test_a_fault_in_a_run_ends_it_with_a_typed_error_and_costs_no_durable_step(
    medium: str, case: Case, faulty: Zygote, media: Media, pool: Path
) -> None:
    report = faulty.run(pool, media[medium].options, fault=case.fault)["result"]
    check_ended(report, case, pool)
    if case.leaves == "untrusted":
        with pytest.raises(UntrustedPool, match=r"could not be synced when it was closed.*trust_after_reboot"):
            Pool(pool)
        check_goes_on(faulty, media[medium], pool, report["durable_step"], trust_after_reboot=True)
    else:
        check_goes_on(faulty, media[medium], pool, report.get("durable_step", 0))


@of(row_log=WHILE_EVERY_MISSED_ROW_IS_READ)
def test_a_row_that_cannot_be_read_at_home_ends_a_run_with_a_typed_error_and_costs_no_durable_step(
    medium: str, case: Case, faulty: Zygote, media: Media, pool: Path
) -> None:
    options = media[medium].options
    faulty.run(pool, {**options, "steps": 12})  # merges were, so rows are home
    report = faulty.run(pool, options, fault=case.fault)["result"]
    check_ended(report, case, pool)
    check_goes_on(faulty, media[medium], pool, report.get("durable_step", 12))


def _is_written(path: Path) -> bool:
    return any(path.read_bytes()[:4096])


def check_ended(report: dict[str, Any], case: Case, pool: Path) -> None:
    check_error(report, case)
    if case.error is not None:
        assert report["then"] == ("StepError" if case.fault.stage == "closing" else case.error), report
        assert report["threads"] == []
        if case.leaves != "either":
            assert _core.Reader(str(pool)).clean == (case.leaves == "closed")


@of(in_place=WHILE_IT_OPENS_IN_PLACE, row_log=WHILE_IT_OPENS_FROM_A_LOG)
def test_a_fault_while_a_pool_recovers_is_a_typed_error_and_the_next_opening_recovers(
    medium: str, case: Case, faulty: Zygote, media: Media, pool: Path
) -> None:
    options = media[medium].options
    for _ in range(20):
        assert faulty.run(pool, options, kill_at=media[medium].persist_points * 2 // 3)["signal"] == signal.SIGKILL
        if case.fault.file != ADDRESSES or any(_is_written(path) for path in pool.rglob(f"*{ADDRESSES}")):
            break
        shutil.rmtree(pool)  # no merge had come so far, beside a machine's other work: there is nothing to read
    check_error(faulty.run(pool, options, fault=case.fault)["result"], case)
    check_goes_on(faulty, media[medium], pool, 1)


@of(in_place=WHILE_IT_IS_MADE_IN_PLACE, row_log=WHILE_IT_IS_MADE_WITH_A_LOG)
def test_a_fault_while_a_pool_is_made_is_a_typed_error_and_the_next_start_makes_it(
    medium: str, case: Case, faulty: Zygote, media: Media, pool: Path
) -> None:
    check_error(faulty.run(pool, media[medium].options, fault=case.fault)["result"], case)
    check_goes_on(faulty, media[medium], pool, 0)


@of(in_place=WHILE_THE_UNDO_LOG_GROWS)
def test_an_undo_log_that_cannot_grow_ends_a_run_with_a_typed_error(
    medium: str, case: Case, faulty: Zygote, media: Media, pool: Path
) -> None:
    options = media[medium].options
    faulty.run(pool, {**options, "steps": 2, "log_bytes": 1 << 14})
    size = (pool / UNDO_LOG).stat().st_size
    report = faulty.run(pool, options, fault=case.fault)["result"]
    check_error(report, case)
    assert (report["then"], report["threads"]) == ("PoolFailed", [])
    assert (pool / UNDO_LOG).stat().st_size == size
    check_goes_on(faulty, media[medium], pool, 2)
    assert (pool / UNDO_LOG).stat().st_size > size


@of(in_place=WHILE_A_SNAPSHOT_IS_TAKEN, row_log=WHILE_A_SNAPSHOT_IS_TAKEN | WHILE_A_SNAPSHOT_IS_TAKEN_OF_A_ROW_LOG)
def test_a_fault_while_a_snapshot_is_taken_is_a_typed_error_that_leaves_none(
    medium: str, case: Case, faulty: Zygote, media: Media
) -> None:
    reference = media[medium].root / "reference"
    beside = set(media[medium].root.iterdir())
    check_error(faulty.run(reference, media[medium].options, fault=case.fault)["result"], case)
    new = set(media[medium].root.iterdir()) - beside
    if case.error is None:
        snapshot = new.pop()
        open_chain(snapshot)[0].verify()
        shutil.rmtree(snapshot)
    assert new == set()
    assert digest(reference) == media[medium].digest


@pytest.mark.parametrize("medium", ["row_log_on_disk"])
def test_a_thread_for_which_the_kernel_has_no_further_io_uring_does_without(
    medium: str, faulty: Zygote, media: Media, pool: Path
) -> None:
    only_the_opener = Fault(stage="opening", rings=1)
    report = faulty.run(pool, media[medium].options, fault=only_the_opener)["result"]
    assert "error" not in report, report
    assert report["rings_refused"] > 0, "none was asked for"
    assert report["merged_bytes"] > 0, "nothing was merged, which another thread does"
    assert digest(pool) == media[medium].digest


SLOW = {
    "every_sync": at("opening", "fdatasync", "", delay_ms=20, times=FOR_GOOD),
    "every_page_write": at("opening", "msync", "", delay_ms=20, times=FOR_GOOD),
    "every_append": at("training", "pwrite", LOG, delay_ms=20, times=FOR_GOOD),
    "one_sync_of_a_step": at("midway", "fdatasync", LOG, delay_ms=3000),
    "one_sync_of_a_merge": at("training", "fdatasync", HOME, delay_ms=3000),
    "one_fetch": beside_threads("midway", "pread", LOG, delay_ms=3000),
}


@pytest.mark.dear
@pytest.mark.parametrize("medium", ["row_log_on_disk"])
@pytest.mark.parametrize("slow", SLOW.values(), ids=SLOW)
def test_a_slow_disk_costs_a_run_time_and_nothing_else(
    slow: Fault, medium: str, faulty: Zygote, media: Media, pool: Path
) -> None:
    report = faulty.run(pool, media[medium].options, fault=slow)["result"]
    assert report["struck"] > 0, "nothing was slow"
    assert "error" not in report, report
    assert digest(pool) == media[medium].digest
    assert _core.Reader(str(pool)).clean


# Somebody else's doings.


@pytest.mark.parametrize("file", ["", "lock"], ids=["pool", "lock"])
@pytest.mark.parametrize("medium", MEDIA)
def test_no_step_is_called_durable_once_the_pool_or_its_lock_was_removed(
    medium: str, file: str, faulty: Zygote, media: Media, pool: Path
) -> None:
    fault = Fault(stage="midway", act="remove", file=file)
    report = faulty.run(pool, media[medium].options, fault=fault)["result"]
    assert report["error"] == "PoolFailed"
    assert "lock was removed while the pool was open" in report["message"]
    assert report["durable_step"] == report["durable_before"] > 0
    assert (report["then"], report["close"], report["threads"]) == ("PoolFailed", "PoolFailed", [])
    if file:
        check_goes_on(faulty, media[medium], pool, report["durable_step"])
    else:
        assert not pool.exists()
        faulty.run(pool, media[medium].options)  # a new pool
        assert digest(pool) == media[medium].digest


@pytest.mark.parametrize("medium", MEDIA)
def test_a_pool_that_is_removed_at_the_end_of_its_run_is_not_closed_quietly(
    medium: str, faulty: Zygote, media: Media, pool: Path
) -> None:
    report = faulty.run(pool, media[medium].options, fault=Fault(stage="closing", act="remove"))["result"]
    assert report["error"] == "PoolFailed"
    assert "removed" in report["message"]


@pytest.mark.parametrize("medium", [*MEDIA, *ROW_LOG_ON_TMPFS])
def test_a_pool_that_is_moved_while_it_trains_is_whole_where_it_is_now(
    medium: str, faulty: Zygote, media: Media, pool: Path
) -> None:
    report = faulty.run(pool, media[medium].options, fault=Fault(stage="midway", act="move"))["result"]
    assert "error" not in report, report
    assert report["level"] == ("power" if medium == "row_log_on_disk" else "process")
    assert not pool.exists()
    moved = pool.with_name("pool-moved")
    assert digest(moved) == media[medium].digest
    assert _core.Reader(str(moved)).clean
    shutil.rmtree(moved)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("medium", MEDIA)
def test_a_run_that_loses_its_rights_to_the_pool_ends_as_if_it_had_them(
    medium: str, faulty: Zygote, media: Media, pool: Path
) -> None:
    report = faulty.run(pool, media[medium].options, fault=Fault(stage="midway", act="take_permissions"))["result"]
    assert "error" not in report, report
    pool.chmod(0o700)
    assert digest(pool) == media[medium].digest
    assert _core.Reader(str(pool)).clean


@pytest.mark.parametrize(
    ("medium", "file"),
    [("in_place_on_tmpfs", ROWS), ("in_place_on_disk", ROWS), ("in_place_on_disk", UNDO_LOG)],
)
def test_a_run_dies_where_a_file_is_cut_under_it_and_the_next_opening_names_the_file_and_its_size(
    medium: str, file: str, faulty: Zygote, media: Media, pool: Path
) -> None:
    cut = "shard-0000/table-0000.weights" if file == ROWS else file
    fault = Fault(stage="midway", act="truncate", file=cut, most_bytes=0)
    assert faulty.run(pool, media[medium].options, fault=fault)["signal"] == signal.SIGBUS
    with pytest.raises(Corrupted, match=rf"{Path(cut).name}: 0 bytes, "):
        Pool(pool)


@pytest.mark.parametrize(
    ("medium", "cut"), [("row_log_on_disk", "shard-0000/table-0000.home"), ("row_log_on_disk", LOG)]
)
def test_a_file_of_a_row_log_that_is_cut_under_a_run_is_named_and_so_it_is_by_the_next_opening(
    medium: str, cut: str, faulty: Zygote, media: Media, pool: Path
) -> None:
    fault = Fault(stage="midway", act="truncate", file=cut, most_bytes=CHECKPOINTS if cut == LOG else 0)
    options = {**media[medium].options, "steps": 60}
    report = faulty.run(pool, options, fault=fault)["result"]
    if cut != LOG or "error" in report:  # else it was merged, or superseded, before anybody read it
        assert (report["error"], report["then"], report["threads"]) == ("Corrupted", "Corrupted", [])
        assert Path(cut).name in report["message"]
    with pytest.raises(Corrupted, match=Path(cut).name):
        Pool(pool)
