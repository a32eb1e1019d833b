"""A snapshot that is there, what it is based on, and the rows that they have together.

Files are data: every byte is under a checksum, every number is checked before it is used, nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.admin.snapshot.form import (
    ASCENDING_VERSION,
    CHUNK,
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
from holdfast.admin.snapshot.layer_file import LayerFile, opened
from holdfast.admin.snapshot.merged import Merged
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
    version: int
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
    record: tuple[int, int] | None  # of the pool's row log, the newest of a step up to this one: position and checksum
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
            if said["version"] not in (ASCENDING_VERSION, VERSION):
                raise FormatMismatch(
                    f"{file}: format version {said['version']}, this build knows versions {ASCENDING_VERSION} to "
                    f"{VERSION}; use the holdfast that wrote it"
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
                table.check()
            record = said.get("record")
            if record is not None:
                record = (int(record["position"]), int(record["crc32c"]))
            group = None if "group" not in said else Manifest.from_json(json.dumps(said["group"]), str(file))
            if group is not None and tuple(TableInfo.of(entry.spec) for entry in group.tables) != tables:
                raise ValueError("a group's tables that are others")
            return cls(
                path=path,
                version=said["version"],
                id=said["id"],
                parent=None if said["parent"] is None else (said["parent"]["id"], said["parent"]["path"]),
                row_checksums=bool(said.get("row_checksums", False)),  # not in the manifests of older builds
                tables=tables,
                record=record,
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

    def dense(self) -> tuple[bytes, bytes] | None:
        """The dense state's structure and tensors. Raises Corrupted."""
        if DENSE_FILES[0] not in self.files:
            return None
        structure, tensors = (self.read(name) for name in DENSE_FILES)
        return structure, tensors

    def verify(self, on_bytes: Callable[[int], None] | None = None) -> None:
        """Reads every file. Raises Corrupted, which names the first that does not hold."""
        self.check_files()
        for name in self.files:
            if name in DENSE_FILES:
                data = self.read(name)
                if on_bytes is not None:
                    on_bytes(len(data))
        for number in range(len(self.tables)):
            for layer in LAYERS:
                for rows in self.chunks(number, layer):
                    if on_bytes is not None:
                        on_bytes(CHUNK.size + rows.num_bytes)

    def check_files(self) -> None:
        """That the manifest has what a snapshot of these tables has. Raises Corrupted."""
        expected = {layer_name(number, layer) for number in range(len(self.tables)) for layer in LAYERS}
        if set(self.files) not in (expected, expected | set(DENSE_FILES)):
            raise Corrupted(f"{self.path / MANIFEST}: these are not the files of {len(self.tables)} tables")

    def _checked(self, name: str) -> Iterator[bytes]:
        path = self.path / name
        crc = length = 0
        with opened(path) as file:
            while part := file.read(_READ_BYTES):
                crc, length = crc_of(part, crc), length + len(part)
                yield part
        self._check_whole(path, length, crc)

    def _check_whole(self, path: Path, length: int, crc: int) -> None:
        info = self.files[path.name]
        if length != info.bytes:
            raise Corrupted(f"{path}: {length} bytes, the manifest says {info.bytes}")
        if crc != info.crc32c:
            raise Corrupted(f"{path}: the file's checksum does not hold")

    def chunks(self, number: int, layer: str) -> Iterator[Rows]:
        """The rows of one file of a table as they lie there: each chunk ascends. Raises Corrupted, at the end where the
        file as a whole is not what the manifest says."""
        file = self._file(number, layer)
        yield from file.chunks()
        self._check_whole(file.path, file.length, file.crc)

    def layer(self, number: int, layer: str) -> Iterator[Rows]:
        """The rows of one file of a table, ascending, some at a time. Raises Corrupted."""
        return self._file(number, layer).ascending()

    def numbers(self, number: int, layer: str) -> NDArray[np.uint64]:
        """The numbers of the rows of one file of a table, ascending. Raises Corrupted."""
        found = [rows.rows for rows in self.chunks(number, layer)]
        return np.sort(np.concatenate(found)) if found else np.empty(0, np.uint64)

    def _file(self, number: int, layer: str) -> LayerFile:
        name = layer_name(number, layer)
        table = self.tables[number]
        end = table.num_embeddings if self.group is None else self.group.tables[number].end
        return LayerFile(
            self.path / name,
            row_bytes=table.row_bytes,
            end=end,
            num_bytes=self.files[name].bytes,
            ascends=self.version == ASCENDING_VERSION,
        )


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


def merged_rows(chain: Sequence[Snapshot], number: int) -> Merged:
    """The rows of a table as a chain has them, ascending."""
    return Merged([snapshot.layer(number, layer) for snapshot in chain for layer in LAYERS])
