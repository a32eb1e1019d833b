"""Snapshots: a pool as it was at the end of one step, in a directory of its own, taken while a run goes on.

A pool is trained in place: a run that diverges has overwritten the model of yesterday. A snapshot is that model, whole
or as what changed since an earlier snapshot, and `restore_snapshot` makes a pool of it that goes on to the bit.

The core copies rows as they are at that instant and follows the log (core/live_copy.h); what was copied and what
corrects it lie in two layers of files here. docs/FORMAT.md has the bytes.

Invariants
- A snapshot is a directory that was renamed when everything in it was durable; until then it has another name.
- Files are data. Every byte is under a checksum, every number is checked before it is used, nothing is unpickled.
- Of a row that several layers have, the newest layer's counts: corrections before rows, a snapshot before its parent.
- A restore reads every file of the chain once before it makes anything.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from holdfast import _core
from holdfast.data.output import check_output
from holdfast.durable import sync_path
from holdfast.errors import (
    BrokenChain,
    ConfigError,
    Corrupted,
    FormatMismatch,
    Overtaken,
    PoolExists,
    PoolFailed,
    PoolFull,
    PoolNotFound,
    PoolOfGroup,
    StepError,
)
from holdfast.pool import Medium, exists, is_of_group, log_bytes_of, wants_log_store
from holdfast.reading import RowLayout, is_in_use, layout_of, open_untrained

FORMAT = "holdfast snapshot"
VERSION = 1
MANIFEST = "manifest.json"
DENSE_FILES = ("dense.structure", "dense.tensors")
CHUNK = struct.Struct("<8sQQQQI16sI")  # magic, num_rows, first_row, last_row, payload_bytes, payload_crc, reserved, crc
CHUNK_MAGIC = b"HFSNAPCH"
_PLAIN_FIELDS = ("pool", "seed", "store", "log_bytes", "step", "cursor", "row_updates")  # of a manifest
_LAYERS = ("corrections", "rows")  # of one snapshot, the one that counts first
_CHUNK_BYTES = 8 << 20
_READ_BYTES = 8 << 20
_MAX_MANIFEST_BYTES = 64 << 20
_ATTEMPTS = 4
_POLL_S = 0.0005
_PAGE_BYTES = 4096

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a table, ascending, each once. rows: uint64 ``[n]``; data: uint8 ``[n, bytes]``, a row's weights and
    behind them its state."""

    rows: NDArray[np.uint64]
    data: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice | NDArray[Any]) -> Rows:
        return Rows(self.rows[part], self.data[part])

    def same_as(self, other: Rows) -> NDArray[np.bool_]:
        """bool ``[n]``: which of these rows the other has too, with the same data."""
        if len(other) == 0:
            return np.zeros(len(self), np.bool_)
        place = np.minimum(np.searchsorted(other.rows, self.rows), len(other) - 1)
        same: NDArray[np.bool_] = (other.rows[place] == self.rows) & (other.data[place] == self.data).all(axis=1)
        return same

    def without(self, other: Rows) -> Rows:
        """Those that the other does not have."""
        return self[~np.isin(self.rows, other.rows, assume_unique=True)]

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """All of them; of a row that several parts have, the first part's."""
        rows, first = np.unique(np.concatenate([part.rows for part in parts]), return_index=True)
        return cls(rows, np.concatenate([part.data for part in parts])[first])


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table as a snapshot's manifest has it; dtype, optimizer and pooling by number."""

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: int
    optimizer: int
    pooling: int
    init_low: float
    init_high: float

    @classmethod
    def of(cls, spec: _core.TableSpec) -> TableInfo:
        return cls(**{name: getattr(spec, name) for name in cls.__slots__})

    @property
    def spec(self) -> _core.TableSpec:
        return _core.TableSpec(**asdict(self))

    @property
    def layout(self) -> RowLayout:
        return layout_of(self.spec)


# A snapshot that is there ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileInfo:
    """bytes: of the file; crc32c: of all of them."""

    bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a manifest says. Raises FormatMismatch, Corrupted where it does not hold (`open`)."""

    path: Path
    id: str
    parent: tuple[str, str] | None  # its id, and its path from here
    pool: str
    seed: int
    store: str
    log_bytes: int
    row_checksums: bool  # of the rows in place
    step: int
    cursor: int
    row_updates: int
    tables: tuple[TableInfo, ...]
    files: Mapping[str, FileInfo]

    @classmethod
    def open(cls, path: Path) -> Snapshot:
        file = path / MANIFEST
        try:
            with file.open("rb") as opened:
                text = opened.read(_MAX_MANIFEST_BYTES)
        except OSError as error:
            raise FormatMismatch(f"{path} is no snapshot: {MANIFEST}: {error.strerror}") from None
        try:
            said = json.loads(text)
            if said["format"] != FORMAT:
                raise FormatMismatch(f"{file}: not the manifest of a snapshot")
            if said["version"] != VERSION:
                raise FormatMismatch(
                    f"{file}: format version {said['version']}, this build knows version {VERSION}; use the holdfast "
                    "that wrote it"
                )
            if said.pop("crc32c") != _crc(_canonical(said)):
                raise Corrupted(f"{file}: the manifest's checksum does not hold")
            tables = tuple(TableInfo(**table) for table in said["tables"])
            files = {name: FileInfo(**info) for name, info in said["files"].items()}
            numbers = [said["seed"], said["log_bytes"], said["step"], said["cursor"], said["row_updates"]]
            numbers += [number for info in files.values() for number in (info.bytes, info.crc32c)]
            if not all(isinstance(number, int) and 0 <= number < 1 << 64 for number in numbers):
                raise ValueError("a number that is none")
            for table in tables:
                _ = table.layout  # raises where a number means nothing
            return cls(
                path=path,
                id=said["id"],
                parent=None if said["parent"] is None else (said["parent"]["id"], said["parent"]["path"]),
                row_checksums=bool(said.get("row_checksums", False)),  # not in the manifests of older builds
                tables=tables,
                files=files,
                **{
                    name: said[name] for name in ("pool", "seed", "store", "log_bytes", "step", "cursor", "row_updates")
                },
            )
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise Corrupted(f"{file}: no manifest of a snapshot: {error!r}") from None

    @property
    def num_bytes(self) -> int:
        return sum(info.bytes for info in self.files.values())

    def read(self, name: str) -> bytes:
        """A whole file. Raises Corrupted."""
        data = bytearray()
        for part in self._checked(name):
            data += part
        return bytes(data)

    def verify(self, on_bytes: Progress | None = None) -> None:
        """Reads every file. Raises Corrupted, which names the first that does not hold."""
        expected = {_layer_name(number, layer) for number in range(len(self.tables)) for layer in _LAYERS}
        if set(self.files) not in (expected, expected | set(DENSE_FILES)):
            raise Corrupted(f"{self.path / MANIFEST}: these are not the files of {len(self.tables)} tables")
        for name in self.files:
            for part in self._checked(name):
                if on_bytes is not None:
                    on_bytes(len(part))
        for number in range(len(self.tables)):
            for layer in _LAYERS:
                for _ in self.layer(number, layer):
                    pass

    def _checked(self, name: str) -> Iterator[bytes]:
        info = self.files[name]
        path = self.path / name
        crc = length = 0
        with _opened(path) as file:
            while part := file.read(_READ_BYTES):
                crc, length = _crc(part, crc), length + len(part)
                yield part
        if length != info.bytes:
            raise Corrupted(f"{path}: {length} bytes, the manifest says {info.bytes}")
        if crc != info.crc32c:
            raise Corrupted(f"{path}: the file's checksum does not hold")

    def layer(self, number: int, layer: str) -> Iterator[Rows]:
        """The rows of one file of a table, a chunk at a time. Raises Corrupted."""
        table = self.tables[number]
        row_bytes = _row_bytes(table)
        path = self.path / _layer_name(number, layer)
        left = self.files[path.name].bytes
        next_row = offset = 0
        with _opened(path) as file:
            while left > 0:
                bad = f"{path} at offset {offset}: "
                head = file.read(CHUNK.size)
                if len(head) < CHUNK.size or _crc(head[:-4]) != int.from_bytes(head[-4:], "little"):
                    raise Corrupted(bad + "the checksum of a chunk's head does not hold")
                magic, num_rows, first_row, last_row, payload_bytes, payload_crc, _, _ = CHUNK.unpack(head)
                if magic != CHUNK_MAGIC or num_rows == 0 or payload_bytes != num_rows * (8 + row_bytes):
                    raise Corrupted(bad + "a chunk's head says what cannot be")
                if payload_bytes > left - CHUNK.size:
                    raise Corrupted(bad + "a chunk ends beyond the file")
                payload = file.read(payload_bytes)
                if len(payload) < payload_bytes or _crc(payload) != payload_crc:
                    raise Corrupted(bad + "a chunk's checksum does not hold")
                found = Rows(
                    np.frombuffer(payload, "<u8", num_rows),
                    np.frombuffer(payload, np.uint8, offset=8 * num_rows).reshape(num_rows, row_bytes),
                )
                rows = found.rows
                if (
                    not (next_row <= first_row == rows[0] and rows[-1] == last_row < table.num_embeddings)
                    or not (rows[1:] > rows[:-1]).all()
                ):
                    raise Corrupted(bad + "rows that are out of order")
                next_row = last_row + 1
                offset += CHUNK.size + payload_bytes
                left -= CHUNK.size + payload_bytes
                yield found


def open_chain(path: Path) -> list[Snapshot]:
    """The snapshot, what it is based on, and so on; the newest first. Raises BrokenChain, FormatMismatch, Corrupted."""
    chain = [Snapshot.open(path)]
    while (parent := chain[-1].parent) is not None:
        wanted, where = parent
        place = Path(os.path.normpath(chain[-1].path / where))
        if not (place / MANIFEST).exists():
            raise BrokenChain(
                f"{chain[-1].path} holds what changed since snapshot {wanted}, which is not in {place}: put it there"
            )
        found = Snapshot.open(place)
        if found.id != wanted:
            raise BrokenChain(
                f"{chain[-1].path} holds what changed since snapshot {wanted}, but {place} is snapshot {found.id}"
            )
        if any(found.id == other.id for other in chain):
            raise BrokenChain(f"{place} is based on itself")
        if (found.seed, found.tables) != (chain[0].seed, chain[0].tables):
            raise BrokenChain(f"{place} is of a pool with other tables or another seed than {path}")
        chain.append(found)
    return chain


class Merged:
    """The rows of a table as a stack of layers has them, ascending. Iterates over `Rows`."""

    def __init__(self, layers: Sequence[Iterator[Rows]]) -> None:
        """layers: the one that counts first, first."""
        self._layers = list(layers)
        self._heads = [next(layer, None) for layer in self._layers]

    @classmethod
    def of(cls, chain: Sequence[Snapshot], number: int) -> Merged:
        return cls([snapshot.layer(number, layer) for snapshot in chain for layer in _LAYERS])

    def take(self, last: int) -> Rows | None:
        """The rows up to `last` that were not taken before; None where there are none."""
        parts = []
        for i in range(len(self._layers)):
            while (head := self._heads[i]) is not None and head.rows[0] <= last:
                end = int(np.searchsorted(head.rows, np.uint64(last), side="right"))
                parts.append(head[:end])
                self._heads[i] = head[end:] if end < len(head) else next(self._layers[i], None)
        if len(parts) <= 1:
            return parts[0] if parts else None
        return Rows.joined(parts)

    def __iter__(self) -> Iterator[Rows]:
        while ends := [int(head.rows[-1]) for head in self._heads if head is not None]:
            if (rows := self.take(min(ends))) is not None:
                yield rows


# Taking one -----------------------------------------------------------------------------------------------------------


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
    on_rows: Progress | None = None,
) -> SnapshotSummary:
    """Copies the pool as it is at the end of its newest step that has a dense state; a run may go on meanwhile.

    step: this step, for whose dense state it waits. since: an earlier snapshot; only rows that differ from it are
    written, and a restore needs both. on_rows: told how many rows were just read.

    Raises PoolNotFound, PoolOfGroup, ConfigError (`dest` is there, or `since` is of other tables), StepError (`step` is
    past, or no run will come to it), Overtaken, PoolFull, Corrupted, UntrustedPool, BrokenChain.
    """
    check_output(dest, overwrite=False)
    if is_of_group(pool):
        raise PoolOfGroup(
            f"{pool} is a pool of several writers, of which no snapshot can be taken yet: stop the run and copy the "
            "directory, or holdfast export its tables and model"
        )
    if not exists(pool):
        raise PoolNotFound(f"{pool} holds no pool")
    parents = [] if since is None else open_chain(since)
    was_at_rest = False
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with _new_directory(dest, "partial") as partial:
                return _Taking(pool, partial, dest, parents, on_rows).take(step)
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
        self, pool: Path, partial: Path, dest: Path, parents: Sequence[Snapshot], on_rows: Progress | None
    ) -> None:
        self._pool = pool
        self._partial = partial
        self._dest = dest
        self._parents = parents
        self._on_rows = on_rows
        self._copy = _core.LiveCopy(str(pool))
        self._tables = tuple(TableInfo.of(table) for table in self._copy.tables)
        self._files: dict[str, FileInfo] = {}
        none = [Rows(np.empty(0, np.uint64), np.empty((0, _row_bytes(table)), np.uint8)) for table in self._tables]
        self._unseen = {number: [rows] for number, rows in enumerate(none)}  # of the parents, and not copied
        if parents and (parents[0].seed, parents[0].tables) != (self._copy.header["seed"], self._tables):
            raise ConfigError(f"--since: {parents[0].path} is of a pool with other tables or another seed than {pool}")

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
            with _Output(self._partial / name) as out:
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
        name = _layer_name(number, layer)
        written = 0
        with _Output(self._partial / name) as out:
            found = self._read(number, self._copy.copy_rows if layer == "rows" else self._copy.corrections)
            if self._parents:
                found = self._changed(number, found) if layer == "rows" else self._corrected(number, found)
            for rows in found:
                out.write_chunk(rows)
                written += len(rows)
        self._files[name] = out.info
        return written

    def _read(self, number: int, read: Callable[..., tuple[int, int]]) -> Iterator[Rows]:
        """What `read` gives of a table, a chunk at a time."""
        table = self._tables[number]
        layout = table.layout
        chunk_rows = max(1, _CHUNK_BYTES // (8 + _row_bytes(table)))
        rows = np.empty(chunk_rows, np.uint64)
        weights = np.empty((chunk_rows, layout.weight_bytes), np.uint8)
        state = np.empty((chunk_rows, layout.state_bytes), np.uint8)
        first = 0
        while first < table.num_embeddings:
            count, first = read(number, first, rows, weights.reshape(-1), state.reshape(-1))
            if count > 0:
                yield Rows(rows[:count].copy(), np.concatenate((weights[:count], state[:count]), axis=1))
            if self._on_rows is not None:
                self._on_rows(count)

    def _changed(self, number: int, found: Iterator[Rows]) -> Iterator[Rows]:
        """Those that are not as the parents have them. What the parents alone have waits for the corrections: it is in
        the pool's log, or the pool was rolled back behind it."""
        parents = Merged.of(self._parents, number)
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
        layout = self._tables[number].layout
        data = np.zeros_like(known.data)
        weights = np.empty((len(known), layout.weight_bytes), np.uint8)
        self._copy.initial_rows(number, np.ascontiguousarray(known.rows), weights.reshape(-1))
        data[:, : layout.weight_bytes] = weights
        return Rows(known.rows, data)[(data != known.data).any(axis=1)]

    def _write_manifest(self, *, step: int, cursor: int, row_updates: int) -> None:
        header = self._copy.header
        parent = None
        if self._parents:
            path = os.path.relpath(self._parents[0].path.resolve(), self._dest.parent.resolve() / self._dest.name)
            parent = {"id": self._parents[0].id, "path": path}
        said: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
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
            "tables": [asdict(table) for table in self._tables],
            "files": {name: asdict(info) for name, info in self._files.items()},
        }
        said["crc32c"] = _crc(_canonical(said))
        with _Output(self._partial / MANIFEST) as out:
            out.write(json.dumps(said, indent=1).encode() + b"\n")


# Restoring one --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreSummary:
    """What was restored. snapshots: how many the chain has."""

    step: int
    rows: int
    snapshots: int


def restore_snapshot(
    snapshot: Path,
    pool: Path,
    *,
    medium: Medium = "auto",
    on_bytes: Progress | None = None,
    on_rows: Progress | None = None,
) -> RestoreSummary:
    """Makes a pool of a snapshot and those that it is based on; it is there when it is complete, and training goes on
    from it as it would have from the pool of that step.

    medium: as in `holdfast.Pool`. on_bytes: told how much was just verified, on_rows: how many rows were just written.

    Raises PoolExists, BrokenChain, Corrupted, FormatMismatch, PoolFull, PoolFailed; then there is no pool.
    """
    if pool.exists():
        raise PoolExists(f"{pool} is there already; a restore makes a new pool, name another directory")
    chain = open_chain(snapshot)
    for part in chain:
        part.verify(on_bytes)
    newest = chain[0]
    pool.parent.mkdir(parents=True, exist_ok=True)
    rows = 0
    with _new_directory(pool, "restoring") as partial:
        log_store = wants_log_store(partial, medium)
        log_bytes = newest.log_bytes if (newest.store == "log") == log_store else log_bytes_of(log_store)
        begin = (newest.step, newest.cursor, newest.row_updates)
        specs = [table.spec for table in newest.tables]
        _core.Pool.create(
            str(partial),
            newest.seed,
            log_bytes,
            specs,
            log_store=log_store,
            row_checksums=newest.row_checksums and not log_store,
            begin=begin,
        )
        core = open_untrained(partial)
        try:
            for number in range(len(specs)):
                rows += _restore_table(chain, number, core, _core.Reader(str(partial)), on_rows)
            if DENSE_FILES[0] in newest.files:
                structure, tensors = (newest.read(name) for name in DENSE_FILES)
                data = np.frombuffer(tensors, np.uint8)
                parts = [(data.ctypes.data, len(data), 0)] if len(data) else []
                core.write_dense(structure, parts, len(data))
        finally:
            core.close()
    return RestoreSummary(step=newest.step, rows=rows, snapshots=len(chain))


def _restore_table(
    chain: Sequence[Snapshot], number: int, core: _core.Pool, reader: _core.Reader, on_rows: Progress | None
) -> int:
    layout = chain[0].tables[number].layout
    max_gap = max(1, _PAGE_BYTES // layout.weight_bytes)
    total = 0
    for found in Merged.of(chain, number):
        breaks = np.flatnonzero(np.diff(found.rows) > max_gap + 1) + 1
        for begin, end in zip((0, *breaks), (*breaks, len(found)), strict=True):
            part = found[begin:end]
            first = int(part.rows[0])
            count = int(part.rows[-1]) - first + 1
            weights = np.empty((count, layout.weight_bytes), np.uint8)
            state = np.empty((count, layout.state_bytes), np.uint8)
            if count > len(part):  # what lies between has its initial value
                reader.read_rows(number, first, count, weights.reshape(-1), state.reshape(-1))
            place = (part.rows - np.uint64(first)).astype(np.int64)
            weights[place] = part.data[:, : layout.weight_bytes]
            state[place] = part.data[:, layout.weight_bytes :]
            floats = state.reshape(-1).view(np.float32) if layout.state else None
            core.import_rows(number, first, weights.reshape(-1), floats)
        total += len(found)
        if on_rows is not None:
            on_rows(len(found))
    return total


# Files ----------------------------------------------------------------------------------------------------------------


class _Output:
    """A file that is durable when the block ends; `info` says what is in it. Raises PoolFull, PoolFailed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes = self._crc = 0

    def __enter__(self) -> Self:
        with _writing(self._path):
            self._file = self._path.open("xb", buffering=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file, _writing(self._path):
            if error is None:
                os.fsync(self._file.fileno())

    @property
    def info(self) -> FileInfo:
        return FileInfo(self._bytes, self._crc)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._crc = _crc(view, self._crc)
        self._bytes += len(view)
        with _writing(self._path):
            while view:
                view = view[self._file.write(view) :]

    def write_chunk(self, rows: Rows) -> None:
        numbers = np.ascontiguousarray(rows.rows, "<u8").view(np.uint8)
        data = np.ascontiguousarray(rows.data).reshape(-1)
        first, last = int(rows.rows[0]), int(rows.rows[-1])
        payload_crc = _crc(data, _crc(numbers))
        head = CHUNK.pack(CHUNK_MAGIC, len(rows), first, last, len(numbers) + len(data), payload_crc, b"", 0)
        self.write(head[:-4] + _crc(head[:-4]).to_bytes(4, "little"))
        self.write(numbers.data)
        self.write(data.data)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = PoolFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else PoolFailed
        raise kind(f"{path}: {error.strerror}; nothing is left of what was being made") from error


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise Corrupted(f"{path} is missing; the snapshot has lost a file") from None
    with file:
        yield file


@contextmanager
def _new_directory(path: Path, suffix: str) -> Iterator[Path]:
    """An empty directory beside `path`; it becomes `path`, durably, if the block ends well, and is removed if not."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{suffix}")
    with _writing(partial):
        partial.mkdir()
    made = partial  # whatever has the name now
    try:
        yield partial
        with _writing(path):
            sync_path(partial)
            made = partial.rename(path)
            sync_path(path.parent)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _row_bytes(table: TableInfo) -> int:
    return table.layout.weight_bytes + table.layout.state_bytes


def _layer_name(number: int, layer: str) -> str:
    return f"table-{number:04}.{layer}"


def _canonical(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said, sort_keys=True, separators=(",", ":")).encode()


def _crc(data: bytes | memoryview | NDArray[np.uint8], crc: int = 0) -> int:
    return _core.crc32c(crc, np.frombuffer(data, np.uint8))
