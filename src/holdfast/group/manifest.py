"""`group.json`: what a pool of several writers is. It is replaced as a whole, durably, or not at all; whatever its
generation's writers have is in their own directories. docs/FORMAT.md has its fields.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast import _core
from holdfast.errors import Corrupted, FormatMismatch
from holdfast.files.durable import sync_path
from holdfast.files.manifests import TableFields, checksum_of
from holdfast.group.layout import MAX_SHARDS, stride_bits
from holdfast.pools.directory import GROUP_MANIFEST, is_of_group, pool_error

MANIFEST = GROUP_MANIFEST
exists = is_of_group
_FORMAT = "holdfast group"
_PART_VERSIONS = {1: 3, 2: 4, 3: 5}  # of the pool format; 3: or older, the parts do not say whose they are
VERSION = max(_PART_VERSIONS)
_IDENTITY_VERSION = 4  # of the pool format


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry(TableFields):
    """A table of the pool, and the shards that it lies in."""

    first_shard: int
    table_shards: int

    @property
    def end(self) -> int:
        """Of the numbers that writers know its rows by: rows, or places where it is split."""
        if self.table_shards == 1:
            return self.num_embeddings
        return self.table_shards << stride_bits(self.num_embeddings, self.table_shards)

    def moved(self, places: NDArray[np.uint64], to: TableEntry) -> NDArray[np.uint64]:
        """Where rows lie whose table becomes `to`, with another number of rows: in their shards, where they were."""
        if self.table_shards == 1:
            return places
        before, after = (np.uint64(stride_bits(of.num_embeddings, of.table_shards)) for of in (self, to))
        in_shard = places & ((np.uint64(1) << before) - np.uint64(1))
        return (places >> before << after) | in_shard

    def places_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of a split table."""
        return _core.places_of(self.num_embeddings, self.table_shards, self.first_shard, np.ascontiguousarray(rows))

    def rows_of_places(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of a split table."""
        return _core.rows_of_places(self.num_embeddings, self.table_shards, self.first_shard, places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """version: of the manifest, which says of which version of the pool format the parts are. uuid: of the pool,
    hexadecimal. store: ``in_place`` or ``log``. owner_of: the writer of each shard. load: lookups of each shard when
    they were dealt out. generation: how often they were."""

    version: int = VERSION
    uuid: str
    seed: int
    store: str
    log_bytes: int
    row_checksums: bool
    tables: tuple[TableEntry, ...]
    generation: int
    owner_of: tuple[int, ...]
    load: tuple[int, ...]

    @property
    def num_shards(self) -> int:
        return len(self.owner_of)

    @property
    def num_writers(self) -> int:
        return max(self.owner_of) + 1

    def split_table(self, number: int) -> TableEntry | None:
        """A table whose rows its writers know by place; None for one that lies whole."""
        entry = self.tables[number]
        return entry if entry.table_shards > 1 else None

    def owned(self, writer: int) -> list[int]:
        return [shard for shard, owner in enumerate(self.owner_of) if owner == writer]

    def locate(self, table: int, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The places of a table's rows, and their writers."""
        entry, owner_of = self.tables[table], np.array(self.owner_of, np.int64)
        if entry.table_shards == 1:
            return rows, np.full(len(rows), owner_of[entry.first_shard])
        places: NDArray[np.int64] = entry.places_of(rows)
        return places, owner_of[places >> stride_bits(entry.num_embeddings, entry.table_shards)]

    def most_rows(self, writer: int, table: int) -> int:
        """A bound on how many of the table's rows are the writer's; shards differ by one row."""
        entry = self.tables[table]
        if entry.table_shards == 1:
            return entry.num_embeddings if self.owner_of[entry.first_shard] == writer else 0
        num_owned = len(self.owned(writer))
        return min(entry.num_embeddings, -(-entry.num_embeddings * num_owned // self.num_shards) + num_owned)

    def router(
        self, tables: Sequence[int], features: Sequence[tuple[str, int]], *, numbers_ids: bool = False
    ) -> _core.Router:
        """Of batches with these features (name, index into `tables`, which are numbers). numbers_ids: ids are sorted
        for the owners, who plan the same without."""
        described = [
            (
                entry.num_embeddings,
                entry.embedding_dim,
                entry.pooling,
                entry.first_shard,
                entry.table_shards > 1,
                (self.seed, number) if entry.keys else None,
            )
            for number, entry in ((number, self.tables[number]) for number in tables)
        ]
        return _core.Router(described, features, self.owner_of, self.num_writers, numbers_ids)

    @property
    def part_version(self) -> int:
        """Of the pool format."""
        return _PART_VERSIONS[self.version]

    @property
    def parts_are_identified(self) -> bool:
        return self.part_version >= _IDENTITY_VERSION

    def next_generation(self, owner_of: list[int], load: list[int]) -> Manifest:
        return replace(self, generation=self.generation + 1, owner_of=tuple(owner_of), load=tuple(load))

    def writer_directory(self, directory: Path, writer: int) -> Path:
        return generation_directory(directory, self.generation) / f"{writer:04}"

    def check_part(self, directory: Path, writer: int) -> None:
        """Raises Corrupted where a writer's directory has another part than this says, or one of another pool; and what
        is wrong with it."""
        path = self.writer_directory(directory, writer)
        part = _core.part_in(str(path))
        if part is None or part[0] != bytes.fromhex(self.uuid):
            raise Corrupted(f"{path}: this is no part of the pool in {directory}, but of another one: put its own back")
        self._check_version(path, _core.header_in(str(path)))
        if part[1] != self.owned(writer):
            raise Corrupted(
                f"{path}: it has shards {_some(part[1])}, but {MANIFEST} gives it {_some(self.owned(writer))}"
                ": put the directories back under the names that they had"
            )

    def check_dense(self, path: Path) -> None:
        """Raises Corrupted where the directory has the dense states of another pool; and what is wrong with it."""
        header = _core.header_in(str(path))
        self._check_version(path, header)
        if self.parts_are_identified and header["group_uuid"] != bytes.fromhex(self.uuid):
            raise Corrupted(f"{path}: these are the dense states of another pool: put this pool's own back")
        if header["num_tables"]:
            raise Corrupted(f"{path}: this is no part with dense states: put this pool's own back")

    def _check_version(self, path: Path, header: dict[str, Any]) -> None:
        found = max(header["format_version"], _PART_VERSIONS[1])
        if found != self.part_version:
            raise Corrupted(
                f"{path}: a part of format {header['format_version']}, {MANIFEST} is of version {self.version}: this "
                "part is another pool's, put its own back"
            )

    def to_json(self) -> str:
        said = {"format": _FORMAT, **asdict(self), "tables": [table.said() for table in self.tables]}
        return json.dumps({**said, "crc32c": checksum_of(said)})

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Raises FormatMismatch, Corrupted; nothing of it is believed before its checksum."""
        try:
            said = json.loads(text)
            if said.get("format") != _FORMAT:
                raise FormatMismatch(f"{where}: not the manifest of a pool of several writers")
            if said.get("version") not in _PART_VERSIONS:
                raise FormatMismatch(
                    f"{where}: version {said.get('version')}, this build knows versions up to {VERSION}; "
                    "use the holdfast that wrote it"
                )
            crc = said.pop("crc32c")
            if crc != checksum_of(said):
                raise Corrupted(f"{where}: the manifest's checksum does not hold")
            del said["format"]
            said["tables"] = tuple(TableEntry(**table) for table in said["tables"])
            said["owner_of"], said["load"] = tuple(said["owner_of"]), tuple(said["load"])
            manifest = cls(**said)
            manifest._check()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Corrupted(f"{where}: no manifest of a pool of several writers: {error!r}") from None
        return manifest

    def _check(self) -> None:
        if not 1 <= self.num_shards <= MAX_SHARDS or self.num_shards & (self.num_shards - 1):
            raise ValueError(f"{self.num_shards} shards")
        if len(self.load) != self.num_shards or set(self.owner_of) != set(range(self.num_writers)):
            raise ValueError("owners of shards that do not fit")
        if len(bytes.fromhex(self.uuid)) != 16 or self.store not in ("in_place", "log") or self.generation < 1:
            raise ValueError("a uuid, store or generation that cannot be")
        if not all(0 <= number < 1 << 64 for number in (self.seed, self.log_bytes, self.generation, *self.load)):
            raise ValueError("a number that is none")
        for table in self.tables:
            table.check()
            if table.table_shards not in (1, self.num_shards) or not 0 <= table.first_shard < self.num_shards:
                raise ValueError(f"table {table.name!r} in shards that are not there")


def generation_directory(directory: Path, generation: int) -> Path:
    return directory / f"writers-{generation}"


def read(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        text = path.read_text()
    except OSError as error:
        raise Corrupted(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise Corrupted(f"{path}: no manifest of a pool of several writers: it is no text") from None
    return Manifest.from_json(text, str(path))


def write(directory: Path, manifest: Manifest) -> None:
    """Durable when it returns. Raises PoolFull, PoolReadOnly, PoolError; the old one is there then."""
    path, fresh = directory / MANIFEST, directory / f"{MANIFEST}.new"
    try:
        fresh.write_text(manifest.to_json())
        sync_path(fresh)
        fresh.rename(path)
        sync_path(directory)
    except OSError as error:
        raise pool_error(error, f"writing {path}") from error


def _some(shards: Sequence[int]) -> str:
    return ", ".join(map(str, shards[:4])) + (", ..." if len(shards) > 4 else "")


def new_uuid() -> str:
    return os.urandom(16).hex()
