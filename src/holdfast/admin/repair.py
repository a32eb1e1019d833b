"""Putting right what of a damaged pool can be put right without a guess, and saying what was done.

What may be done is the core's (core/readers/repair.h). Here it is carried out:

- under the lock of a writer: nobody opens the pool meanwhile;
- what a change is going to replace is durable in a file beside the pool before the change begins;
- each change is made durable before the next is looked for, and each by itself leaves the pool no worse: a repair that
  dies on the way is begun again by the next one.
"""

from __future__ import annotations

import datetime as dt
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import _core
from holdfast.errors import Corrupted, FormatMismatch, PoolOfGroup
from holdfast.files.durable import sync_path
from holdfast.files.names import named
from holdfast.pools.directory import SUPERBLOCK, SUPERBLOCK_COPY, is_of_group
from holdfast.pools.read_only import check_exists, locked

_ROUNDS = 16  # what was put right may show what else is damaged
_WHOLE = (SUPERBLOCK, SUPERBLOCK_COPY)  # may be replaced as a whole


@dataclass
class RepairReport:
    """done: each change, with file, offset and reason. left: problems that remain; refusals: why they are left alone.
    backup: what the changes replaced, one JSON object a line: file, file_bytes (its size; null: there was none),
    offset, before and after in hexadecimal. To take a repair back, write each `before` to its offset, the last line
    first, and cut the file to `file_bytes`, or remove it."""

    done: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    backup: Path | None = None


def problems_of(directory: Path) -> list[str]:
    """Everything that verify finds."""
    if is_of_group(directory):
        from holdfast.admin.group_inspection import problems_of_group

        return problems_of_group(directory)
    try:
        check_exists(directory)
        return _core.Reader(str(directory)).verify()
    except (Corrupted, FormatMismatch, PoolOfGroup) as error:
        return [str(error)]


def may_be_repaired(directory: Path) -> bool:
    """Whether a repair puts anything right: of a group's pool nothing without its manifest and all of its parts."""
    if is_of_group(directory):
        from holdfast.admin.group_inspection import all_parts

        return bool(all_parts(directory))
    return True


def repair_pool(directory: Path) -> RepairReport:
    """Raises PoolNotFound, PoolBusy, and OSError where a file cannot be written; then it may be called again."""
    report = RepairReport()
    with locked(directory, alone=True):
        parts = [directory]
        if is_of_group(directory):
            from holdfast.admin.group_inspection import all_parts, parts_to_repair

            for part in all_parts(directory):
                _make_readable(part, directory, report)
            parts, refusals = parts_to_repair(directory)
            report.refusals += refusals
        for part in parts:
            report.left = _repair(part, directory, report)
        if is_of_group(directory):
            report.left = problems_of(directory)
    return report


def _repair(part: Path, pool: Path, report: RepairReport) -> list[str]:
    """Returns the problems that are left in the part."""
    problems: list[str] = []
    refusals: list[str] = []
    for _ in range(_ROUNDS):
        problems = problems_of(part)
        if not problems:
            break
        try:
            if _put_superblock_back(part, pool, report):
                continue
            are_made, refusals = _write_labels_anew(part, pool, report)
            if are_made:
                continue
            if refusals:
                break
            edits, refusals = _core.plan_repair(str(part))
        except (Corrupted, FormatMismatch) as error:
            edits, refusals = [], [f"{error}; it is left as it is"]
        if not edits:
            break
        _make(edits, pool, report)
    report.refusals += refusals
    return problems


def _make_readable(part: Path, pool: Path, report: RepairReport) -> None:
    """What tells that a part is one, and that its files are its own: before that nothing of a group can be judged."""
    try:
        _put_superblock_back(part, pool, report)
    except (Corrupted, FormatMismatch) as error:
        report.refusals.append(str(error))
    else:
        _write_labels_anew(part, pool, report)


def _write_labels_anew(part: Path, pool: Path, report: RepairReport) -> tuple[bool, list[str]]:
    """Returns whether some were, and why others are left alone."""
    try:
        edits, refusals = _core.plan_label_repair(str(part))
    except (Corrupted, FormatMismatch):  # its superblock does not say which files it has
        return False, []
    _make(edits, pool, report)
    return bool(edits), refusals


def _make(edits: Sequence[tuple[str, int, bytes, str]], pool: Path, report: RepairReport) -> None:
    for file, offset, after, why in edits:
        _keep(report, pool, Path(file), offset, after, why)
        _write(Path(file), offset, after)
        report.done.append(f"{file} at offset {offset}: {why}")


def _put_superblock_back(part: Path, pool: Path, report: RepairReport) -> bool:
    """Whether the part's superblock, or the copy of it, was damaged and is whole now. Raises Corrupted, FormatMismatch
    where what it was cannot be told."""
    found = _core.plan_superblock_repair(str(part))
    if found is None:
        return False
    name, data, why = found
    file, fresh = part / name, part / f"{name}.new"
    _keep(report, pool, file, 0, data, why)
    with named(fresh):
        fresh.write_bytes(data)
    sync_path(fresh)
    fresh.replace(file)
    sync_path(part)
    report.done.append(f"{file}: {why}")
    return True


def _new_backup(directory: Path) -> Path:
    now = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    path = directory.resolve().with_name(f"{directory.resolve().name}.repair-{now}.jsonl")
    path.touch(exist_ok=False)
    sync_path(path.parent)
    return path


def _keep(report: RepairReport, pool: Path, file: Path, offset: int, after: bytes, why: str) -> None:
    """Makes durable what a change is going to replace. A backup without a change does not stay."""
    before, file_bytes = b"", None
    if file.exists():
        file_bytes = file.stat().st_size
        with file.open("rb") as source:
            source.seek(offset)
            before = source.read(max(len(after), file_bytes) if offset == 0 and file.name in _WHOLE else len(after))
    line = {
        "file": str(file),
        "file_bytes": file_bytes,
        "offset": offset,
        "before": before.hex(),
        "after": after.hex(),
        "why": why,
    }
    backup = report.backup or _new_backup(pool)
    try:
        with named(backup), backup.open("a") as kept:
            kept.write(json.dumps(line) + "\n")
        sync_path(backup)
    except OSError:
        if report.backup is None:
            backup.unlink()
        raise
    report.backup = backup


def _write(file: Path, offset: int, data: bytes) -> None:
    with named(file), file.open("r+b", buffering=0) as target:
        target.seek(offset)
        target.write(data)
        os.fsync(target.fileno())
