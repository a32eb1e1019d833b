"""A snapshot that is there, what it is based on, and the rows that they have together.

Files are data: every byte is under a checksum, every number is checked before it is used, nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from holdfast.admin.snapshot.form import (
    CHUNK,
    CHUNK_MAGIC,
    DENSE_FILES,
    FORMAT,
    LAYERS,
    MANIFEST,
    VERSION,
    FileInfo,
    TableInfo,
    crc_of,
    layer_name,
)
from holdfast.admin.snapshot.rows import Rows
from holdfast.errors import BrokenChain, Corrupted, FormatMismatch
from holdfast.files.manifests import checksum_of
from holdfast.group.manifest import Manifest

_READ_BYTES = 8 << 20
_MAX_MANIFEST_BYTES = 64 << 20
_PLAIN_FIELDS = ("pool", "seed", "store", "log_bytes", "step", "cursor", "row_updates")


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
    group: Manifest | None  # of a pool of several writers: a split table's rows are numbered by place then
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
            if said.pop("crc32c") != checksum_of(said):
                raise Corrupted(f"{file}: the manifest's checksum does not hold")
            tables = tuple(TableInfo(**table) for table in said["tables"])
            files = {name: FileInfo(**info) for name, info in said["files"].items()}
            numbers = [said["seed"], said["log_bytes"], said["step"], said["cursor"], said["row_updates"]]
            numbers += [number for info in files.values() for number in (info.bytes, info.crc32c)]
            if not all(isinstance(number, int) and 0 <= number < 1 << 64 for number in numbers):
                raise ValueError("a number that is none")
            for table in tables:
                _ = table.layout  # raises where a number means nothing
            group = None if "group" not in said else Manifest.from_json(json.dumps(said["group"]), str(file))
            if group is not None and tuple(TableInfo.of(entry.spec) for entry in group.tables) != tables:
                raise ValueError("a group's tables that are others")
            return cls(
                path=path,
                id=said["id"],
                parent=None if said["parent"] is None else (said["parent"]["id"], said["parent"]["path"]),
                row_checksums=bool(said.get("row_checksums", False)),  # not in the manifests of older builds
                tables=tables,
                group=group,
                files=files,
                **{name: said[name] for name in _PLAIN_FIELDS},
            )
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise Corrupted(f"{file}: no manifest of a snapshot: {error!r}") from None

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a snapshot and the one that it is based on have in common."""
        return self.seed, self.tables, shards_of(self.group)

    @property
    def mark(self) -> tuple[int, int, int]:
        return self.step, self.cursor, self.row_updates

    @property
    def num_bytes(self) -> int:
        return sum(info.bytes for info in self.files.values())

    def read(self, name: str) -> bytes:
        """A whole file. Raises Corrupted."""
        data = bytearray()
        for part in self._checked(name):
            data += part
        return bytes(data)

    def verify(self, on_bytes: Callable[[int], None] | None = None) -> None:
        """Reads every file. Raises Corrupted, which names the first that does not hold."""
        expected = {layer_name(number, layer) for number in range(len(self.tables)) for layer in LAYERS}
        if set(self.files) not in (expected, expected | set(DENSE_FILES)):
            raise Corrupted(f"{self.path / MANIFEST}: these are not the files of {len(self.tables)} tables")
        for name in self.files:
            for part in self._checked(name):
                if on_bytes is not None:
                    on_bytes(len(part))
        for number in range(len(self.tables)):
            for layer in LAYERS:
                for _ in self.layer(number, layer):
                    pass

    def _checked(self, name: str) -> Iterator[bytes]:
        info = self.files[name]
        path = self.path / name
        crc = length = 0
        with _opened(path) as file:
            while part := file.read(_READ_BYTES):
                crc, length = crc_of(part, crc), length + len(part)
                yield part
        if length != info.bytes:
            raise Corrupted(f"{path}: {length} bytes, the manifest says {info.bytes}")
        if crc != info.crc32c:
            raise Corrupted(f"{path}: the file's checksum does not hold")

    def layer(self, number: int, layer: str) -> Iterator[Rows]:
        """The rows of one file of a table, a chunk at a time. Raises Corrupted."""
        row_bytes = self.tables[number].row_bytes
        end = self.tables[number].num_embeddings if self.group is None else self.group.tables[number].end
        path = self.path / layer_name(number, layer)
        left = self.files[path.name].bytes
        next_row = offset = 0
        with _opened(path) as file:
            while left > 0:
                bad = f"{path} at offset {offset}: "
                head = file.read(CHUNK.size)
                if len(head) < CHUNK.size or crc_of(head[:-4]) != int.from_bytes(head[-4:], "little"):
                    raise Corrupted(bad + "the checksum of a chunk's head does not hold")
                magic, num_rows, first_row, last_row, payload_bytes, payload_crc, _, _ = CHUNK.unpack(head)
                if magic != CHUNK_MAGIC or num_rows == 0 or payload_bytes != num_rows * (8 + row_bytes):
                    raise Corrupted(bad + "a chunk's head says what cannot be")
                if payload_bytes > left - CHUNK.size:
                    raise Corrupted(bad + "a chunk ends beyond the file")
                payload = file.read(payload_bytes)
                if len(payload) < payload_bytes or crc_of(payload) != payload_crc:
                    raise Corrupted(bad + "a chunk's checksum does not hold")
                found = Rows(
                    np.frombuffer(payload, "<u8", num_rows),
                    np.frombuffer(payload, np.uint8, offset=8 * num_rows).reshape(num_rows, row_bytes),
                )
                rows = found.rows
                if (
                    not (next_row <= first_row == rows[0] and rows[-1] == last_row < end)
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
        if found.kind != chain[0].kind:
            raise BrokenChain(f"{place} is of a pool with other tables, shards or another seed than {path}")
        chain.append(found)
    return chain


def shards_of(group: Manifest | None) -> list[tuple[int, int]]:
    """Where a group's tables lie, whoever owns the shards; nothing of a pool of one writer."""
    return [] if group is None else [(entry.first_shard, entry.table_shards) for entry in group.tables]


class Merged:
    """The rows of a table as a stack of layers has them, ascending. Iterates over `Rows`."""

    def __init__(self, layers: Sequence[Iterator[Rows]]) -> None:
        """layers: the one that counts first, first."""
        self._layers = list(layers)
        self._heads = [next(layer, None) for layer in self._layers]

    @classmethod
    def of(cls, chain: Sequence[Snapshot], number: int) -> Merged:
        return cls([snapshot.layer(number, layer) for snapshot in chain for layer in LAYERS])

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


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise Corrupted(f"{path} is missing; the snapshot has lost a file") from None
    with file:
        yield file
