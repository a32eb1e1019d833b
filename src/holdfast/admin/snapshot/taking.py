"""Taking a snapshot of a pool that a run may be changing meanwhile. docs/MOVING.md says why it is of one step."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.admin.ahead import ahead
from holdfast.admin.snapshot.chain import Snapshot, merged_rows, open_chain, shards_of
from holdfast.admin.snapshot.copying import copy_of
from holdfast.admin.snapshot.form import (
    ASCENDING_VERSION,
    DENSE_FILES,
    FORMAT,
    MANIFEST,
    VERSION,
    FileInfo,
    layer_name,
)
from holdfast.admin.snapshot.layer_file import put_in_order
from holdfast.admin.snapshot.merged import Merged
from holdfast.admin.snapshot.output import Output, new_directory
from holdfast.admin.snapshot.rows import Rows
from holdfast.admin.snapshot.runs import run_memory
from holdfast.data.output import check_output
from holdfast.errors import ConfigError, Corrupted, Overtaken, PoolNotFound, StepError
from holdfast.files.durable import is_taken
from holdfast.files.manifests import checksum_of
from holdfast.pools.directory import exists, is_of_group
from holdfast.pools.read_only import is_in_use

_ATTEMPTS = 4
_POLL_S = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSummary:
    """What was written. corrections: rows that the run changed while they were copied, and that count instead."""

    step: int
    rows: int
    corrections: int
    num_bytes: int


def take_snapshot(
    pool: Path,
    dest: Path,
    *,
    step: int | None = None,
    since: Path | None = None,
    on_rows: Callable[[int], None] | None = None,
    on_bytes: Callable[[int, int | None], None] | None = None,
) -> SnapshotSummary:
    """Copies the pool as it is at the end of its newest step that has a dense state; a run may go on meanwhile.

    step: this step, for whose dense state it waits. since: an earlier snapshot; only rows that differ from it are
    written, and a restore needs both. on_rows: told how many rows were just read; on_bytes: how
    many bytes that were, and of how many in all where that is known.

    A pool of several writers is copied as one where all of their parts can be reached.

    Raises PoolNotFound, ConfigError (`dest` is there, or `since` is of other tables), StepError (`step` is
    past, or no run will come to it), Overtaken, PoolFull, Corrupted, UntrustedPool, BrokenChain.
    """
    if is_taken(dest):
        raise ConfigError(f"{dest} is there already; a snapshot makes a new directory, name another one")
    check_output(dest, overwrite=False)
    if not exists(pool) and not is_of_group(pool):
        raise PoolNotFound(f"{pool} holds no pool")
    parents = [] if since is None else open_chain(since)
    was_at_rest = False
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with new_directory(dest, "partial") as partial:
                return _Taking(pool, partial, dest, parents, on_rows, on_bytes).take(step)
        except (Overtaken, Corrupted) as error:
            # Beside a run, what does not hold may have been written over; in a pool at rest it is damaged.
            at_rest = not is_in_use(pool)
            if at_rest and (was_at_rest or attempt == _ATTEMPTS):
                raise Corrupted(str(error)) from error
            if attempt == _ATTEMPTS:
                raise Overtaken(
                    f"the run wrote over what the snapshot had still to read, {_ATTEMPTS} times ({error}): make the "
                    "pool with a larger log_bytes, or stop the run for a moment"
                ) from error
            was_at_rest = at_rest
    raise AssertionError("unreachable")


class _Taking:
    """One attempt at a snapshot, in the directory `partial`."""

    def __init__(
        self,
        pool: Path,
        partial: Path,
        dest: Path,
        parents: Sequence[Snapshot],
        on_rows: Callable[[int], None] | None,
        on_bytes: Callable[[int, int | None], None] | None,
    ) -> None:
        self._pool = pool
        self._partial = partial
        self._dest = dest
        self._parents = parents
        self._on_rows = on_rows
        self._on_bytes = on_bytes
        self._copy = copy_of(pool)
        self._tables = self._copy.tables
        self._run_memory = run_memory()
        self._files: dict[str, FileInfo] = {}
        self._version = ASCENDING_VERSION
        none = [Rows(np.empty(0, np.uint64), np.empty((0, table.row_bytes), np.uint8)) for table in self._tables]
        self._unseen = {number: [rows] for number, rows in enumerate(none)}  # of the parents, and not copied
        mine = (self._copy.header["seed"], self._tables, shards_of(self._copy.group))
        if parents and parents[0].kind != mine:
            raise ConfigError(
                f"--since: {parents[0].path} is of a pool with other tables, shards or another seed than {pool}"
            )
        record = None
        if parents and parents[0].pool == self._copy.header["uuid"].hex():
            record = parents[0].record
        self._goes_on = record is not None and self._copy.log_goes_on_from(record)
        self._total_bytes = None
        if (home_rows := self._copy.home_rows) is not None and not self._goes_on:
            sizes = zip(home_rows, self._tables, strict=True)
            self._total_bytes = sum(rows * (8 + table.row_bytes) for rows, table in sizes)

    def take(self, step: int | None) -> SnapshotSummary:
        copy = self._copy
        if step is not None:
            self._refuse_past(step, copy.newest_dense_step)
        fixed = self._fix(step) if copy.fixes_first else None
        rows = sum(self._write_layer(number, "rows") for number in range(len(self._tables)))
        at, cursor, row_updates, dense = fixed or self._fix(step)
        copy.settle()
        corrections = sum(self._write_layer(number, "corrections") for number in range(len(self._tables)))
        for name, data in zip(DENSE_FILES, dense or (), strict=False):
            with Output(self._partial / name) as out:
                out.write(data)
            self._files[name] = out.info
        self._write_manifest(step=at, cursor=cursor, row_updates=row_updates)
        num_bytes = sum(info.bytes for info in self._files.values())
        return SnapshotSummary(step=at, rows=rows, corrections=corrections, num_bytes=num_bytes)

    def _fix(self, step: int | None) -> tuple[int, int, int, tuple[bytes, bytes] | None]:
        if step is not None:
            self._wait_for(step)
        fixed = self._copy.fix()
        if step is not None:
            self._refuse_past(step, fixed[0])
        return fixed

    def _wait_for(self, step: int) -> None:
        looked_at_s = time.monotonic()
        while (newest := self._copy.newest_dense_step) is None or newest < step:
            if time.monotonic() - looked_at_s > 1:
                looked_at_s = time.monotonic()
                if not is_in_use(self._pool):
                    raise StepError(f"{self._pool} is at step {newest or 0}, and no run takes it to step {step}")
            time.sleep(_POLL_S)

    def _refuse_past(self, step: int, newest: int | None) -> None:
        if newest is not None and newest > step:
            raise StepError(f"step {step} is past: {self._pool} has a dense state of step {newest}, and none of it")

    def _write_layer(self, number: int, layer: str) -> int:
        """Returns how many rows were written."""
        name = layer_name(number, layer)
        row_bytes = self._tables[number].row_bytes
        if layer == "corrections":
            found = self._copy.corrections(number)
        else:
            found = iter(()) if self._goes_on else self._copy.rows(number)
        with ExitStack() as stack:
            found = self._counted(stack.enter_context(ahead(found)))
            if layer == "rows" and not self._copy.rows_ascend:
                if not self._parents:
                    with Output(self._partial / name) as out:
                        written = out.write_runs(found, row_bytes, self._run_memory)
                    return self._note_layer(name, out, written)
                scratch = self._partial / f"{name}.runs"
                found = stack.enter_context(put_in_order(found, row_bytes, scratch, self._run_memory))
            if self._parents:
                found = self._differing(number, layer, found)
            written = 0
            with Output(self._partial / name) as out:
                for rows in found:
                    out.write_chunk(rows)
                    written += len(rows)
        return self._note_layer(name, out, written)

    def _note_layer(self, name: str, out: Output, written: int) -> int:
        self._files[name] = out.info
        if out.num_runs > 1:
            self._version = VERSION
        return written

    def _counted(self, found: Iterator[Rows]) -> Iterator[Rows]:
        for rows in found:
            yield rows
            if self._on_rows is not None:
                self._on_rows(len(rows))
            if self._on_bytes is not None:
                self._on_bytes(rows.num_bytes, self._total_bytes)

    def _differing(self, number: int, layer: str, found: Iterator[Rows]) -> Iterator[Rows]:
        if self._goes_on:
            return self._logged_since(number, found) if layer == "corrections" else found
        return self._changed(number, found) if layer == "rows" else self._corrected(number, found)

    def _logged_since(self, number: int, corrections: Iterator[Rows]) -> Iterator[Rows]:
        """Those that are not as the parent's log had them: what was there stands, and nothing is lost."""
        parents = Merged([self._parents[0].layer(number, "corrections")])
        for rows in corrections:
            known = parents.take(int(rows.rows[-1]))
            changed = rows if known is None else rows[~rows.same_as(known)]
            if len(changed):
                yield changed

    def _changed(self, number: int, found: Iterator[Rows]) -> Iterator[Rows]:
        """Those that are not as the parents have them. What the parents alone have waits for the corrections: it is in
        the pool's log, or the pool was rolled back behind it."""
        parents = merged_rows(self._parents, number)
        for rows in found:
            known = parents.take(int(rows.rows[-1]))
            if known is None:
                yield rows
                continue
            self._unseen[number].append(known.without(rows))
            changed = rows[~rows.same_as(known)]
            if len(changed):
                yield changed
        self._unseen[number] += parents

    def _corrected(self, number: int, found: Iterator[Rows]) -> Iterator[Rows]:
        """All but those that the parents alone have, and have alike; and initial values of rows that only they have."""
        unseen = Rows.joined(self._unseen.pop(number))
        for rows in found:
            end = int(np.searchsorted(unseen.rows, rows.rows[-1], side="right"))
            known, unseen = unseen[:end], unseen[end:]
            changed = Rows.joined([rows[~rows.same_as(known)], self._lost(number, known.without(rows))])
            if len(changed):
                yield changed
        if len(lost := self._lost(number, unseen)):
            yield lost

    def _lost(self, number: int, known: Rows) -> Rows:
        """The initial values of rows, where they are others than these."""
        data = np.zeros_like(known.data)
        data[:, : self._tables[number].layout.weight_bytes] = self._copy.initial_weights(number, known.rows)
        return Rows(known.rows, data)[(data != known.data).any(axis=1)]

    def _write_manifest(self, *, step: int, cursor: int, row_updates: int) -> None:
        header = self._copy.header
        parent = None
        if self._parents:
            path = os.path.relpath(self._parents[0].path.resolve(), self._dest.parent.resolve() / self._dest.name)
            parent = {"id": self._parents[0].id, "path": path}
        record = self._copy.fixed_record
        said: dict[str, Any] = {
            "format": FORMAT,
            "version": self._version,
            "id": uuid.uuid4().hex,
            "parent": parent,
            "pool": header["uuid"].hex(),
            "seed": header["seed"],
            "store": header["store"],
            "log_bytes": header["log_bytes"],
            "row_checksums": header["row_checksums"],
            "step": step,
            "cursor": cursor,
            "row_updates": row_updates,
            "tables": [table.said() for table in self._tables],
            **({} if record is None else {"record": {"position": record[0], "crc32c": record[1]}}),
            **({} if self._copy.group is None else {"group": json.loads(self._copy.group.to_json())}),
            "files": {name: asdict(info) for name, info in self._files.items()},
        }
        said["crc32c"] = checksum_of(said)
        with Output(self._partial / MANIFEST) as out:
            out.write(json.dumps(said, indent=1).encode() + b"\n")
