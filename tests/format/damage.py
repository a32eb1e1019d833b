"""Damage to a pool's files, and where it can strike: every structure and every field that docs/FORMAT.md lists.

A pool is a dictionary from file names to bytes; damage is a function of such pools and a random number generator.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from format_doc import CONSTANTS, ENUMS, LAYOUTS, MAGICS, TEXT, Layout
from pool_image import COMMIT_OFFSETS, EPOCH_OFFSETS, LABEL, PAYLOAD_OFFSET, TABLES_OFFSET, seed_of, up

SECTOR, LINE, BLOCK = CONSTANTS["sector_bytes"], CONSTANTS["line_bytes"], CONSTANTS["block_bytes"]
CHECKPOINT_OFFSETS = (CONSTANTS["row_log_checkpoint_offset[0]"], CONSTANTS["row_log_checkpoint_offset[1]"])
RING_OFFSET = CONSTANTS["row_log_ring_offset"]
SUPERBLOCK, LOG, ROW_LOG, HOME_BITS = "pool.holdfast", "log-0000", "row-log-0000", "home-bits-0000"
ROW_BYTES, SECTOR_ROWS = 5, 101  # of a home's addresses
ELEMENT_BYTES = {ENUMS["RowDtype"][name]: size for name, size in (("f32", 4), ("f16", 2), ("bf16", 2))}

Files = dict[str, bytes]


def files_of_format() -> set[str]:
    """The files that docs/FORMAT.md lists for pools, but for those that it calls no part of the format."""
    names: set[str] = set()
    for table in re.finditer(r"^\| file \| bytes \| holds \|\n\|---.*?\n((?:\|.*\n)+)", TEXT, re.MULTILINE):
        for row in table[1].splitlines():
            names |= set(re.findall(r"`([^`]+)`", row.split("|")[1]))
    return names - {"lock", "pool.holdfast.new", "unpublished"}


def kind_of_file(name: str) -> str:
    """A file's name as FORMAT.md has it."""
    return re.sub(r"table-\d{4}", "table-NNNN", name)


@dataclass(frozen=True)
class Place:
    """Bytes that mean one thing. structure: what they belong to; whole: where that begins and ends."""

    structure: str
    field: str
    file: str
    begin: int
    end: int
    whole: tuple[int, int]

    @property
    def target(self) -> tuple[str, str]:
        return self.structure, self.field

    def __str__(self) -> str:
        return f"{self.structure}.{self.field} in {self.file} [{self.begin}, {self.end})"


def _fields(layout: Layout, file: str, offset: int, *, part_of: tuple[int, int] | None = None) -> Iterator[Place]:
    whole = part_of or (offset, offset + layout.size)
    for each in layout.fields:
        begin = offset + each.offset
        yield Place(layout.name, each.name, file, begin, begin + each.size, whole)


def places_of(files: Files) -> list[Place]:
    """Of a whole pool."""
    superblock = files[SUPERBLOCK]
    header = LAYOUTS["PoolHeader"].unpack(superblock)
    tables = [
        LAYOUTS["TableRecord"].unpack(superblock, TABLES_OFFSET + LAYOUTS["TableRecord"].size * i)
        for i in range(int(header["num_tables"]))
    ]
    seed = seed_of(superblock)
    places = [*_places_of_superblock(len(tables)), *_places_of_slots(files), *_places_of_labels(files)]
    if header["store"] == ENUMS["Store"]["in_place"]:
        return [*places, *_places_of_log(files[LOG], tables, seed), *_places_of_row_files(files)]
    return [
        *places,
        *_places_of_row_log(files[ROW_LOG], tables, seed),
        *_places_of_homes(files, tables),
    ]


def _places_of_superblock(num_tables: int) -> Iterator[Place]:
    yield from _fields(LAYOUTS["PoolHeader"], SUPERBLOCK, 0)
    for name, offsets in (("EpochRecord", EPOCH_OFFSETS), ("CommitRecord", COMMIT_OFFSETS)):
        for offset in offsets:
            yield from _fields(LAYOUTS[name], SUPERBLOCK, offset)
    for i in range(num_tables):
        yield from _fields(LAYOUTS["TableRecord"], SUPERBLOCK, TABLES_OFFSET + LAYOUTS["TableRecord"].size * i)


def _places_of_slots(files: Files) -> Iterator[Place]:
    for name in ("dense-0", "dense-1"):
        yield from _fields(LAYOUTS["DenseHeader"], name, 0)
        header = LAYOUTS["DenseHeader"].unpack(files[name])
        tensors = PAYLOAD_OFFSET + up(header["structure_bytes"], LINE)
        end = tensors + header["tensors_bytes"]
        if header["magic"] == MAGICS["dense_magic"] and end <= len(files[name]):
            whole = (PAYLOAD_OFFSET, end)
            yield Place(
                "dense payload", "structure", name, PAYLOAD_OFFSET, PAYLOAD_OFFSET + header["structure_bytes"], whole
            )
            yield Place("dense payload", "tensors", name, tensors, end, whole)


def _places_of_labels(files: Files) -> Iterator[Place]:
    for name, data in files.items():
        if name == LOG:
            yield from _fields(LAYOUTS["FileLabel"], name, 0)
        elif name == ROW_LOG or name.startswith("shard-"):
            yield from _fields(LAYOUTS["FileLabel"], name, len(data) - LABEL)


def _places_of_log(log: bytes, tables: list[dict], seed: int) -> Iterator[Place]:
    record, section = LAYOUTS["RecordHeader"], LAYOUTS["RecordSection"]
    for at in range(LABEL, len(log) - record.size + 1, LINE):
        header = record.unpack(log, at)
        if header["magic"] != MAGICS["record_magic"] or not record.holds(log, at, seed=seed):
            continue
        end = min(at + header["bytes"], len(log))
        yield from _fields(record, LOG, at, part_of=(at, end))
        for i in range(header["num_sections"]):
            first = at + record.size + section.size * i
            yield from _fields(section, LOG, first, part_of=(at, end))
            found = section.unpack(log, first)
            if found["num_rows"] == 0 or found["table"] >= len(tables):
                continue  # what a later record wrote over
            table = tables[found["table"]]
            sizes = {
                "rows": 8,
                "weights": table["embedding_dim"] * ELEMENT_BYTES[table["dtype"]],
                "state": table["state_floats"] * 4,
            }
            for name, size in sizes.items():
                begin = at + found[f"{name}_offset"]
                stop = begin + found["num_rows"] * size
                if begin < stop <= end:
                    yield Place("undo record", name, LOG, begin, stop, (at, end))


def _places_of_row_files(files: Files) -> Iterator[Place]:
    for name, data in files.items():
        if name.startswith("shard-") and data:
            end = len(data) - LABEL
            yield Place("file of rows", name.rsplit(".", 1)[1], name, 0, end, (0, end))


def _places_of_row_log(log: bytes, tables: list[dict], seed: int) -> Iterator[Place]:
    record, section = LAYOUTS["RowLogHeader"], LAYOUTS["RowLogSection"]
    for offset in CHECKPOINT_OFFSETS:
        yield from _fields(LAYOUTS["RowLogCheckpoint"], ROW_LOG, offset)
    for at in range(RING_OFFSET, len(log), BLOCK):
        header = record.unpack(log, at)
        if header["magic"] != MAGICS["row_log_record_magic"] or not record.holds(log, at, seed=seed):
            continue
        whole = (at, min(at + header["bytes"], len(log)))
        yield from _fields(record, ROW_LOG, at, part_of=whole)
        for i in range(header["num_sections"]):
            first = at + record.size + section.size * i
            yield from _fields(section, ROW_LOG, first, part_of=whole)
            found = section.unpack(log, first)
            rows = at + found["rows_offset"]
            yield Place("row log record", "rows", ROW_LOG, rows, rows + 8 * found["num_rows"], whole)
            images = at + found["images_offset"]
            stop = images + _image_bytes(tables[found["table"]])
            yield Place("row log record", "image", ROW_LOG, images, stop, whole)
        yield Place("row log record", "zeros behind it", ROW_LOG, whole[1] - 8, whole[1], whole)


def _image_bytes(table: dict) -> int:
    return table["embedding_dim"] * ELEMENT_BYTES[table["dtype"]] + table["state_floats"] * 4 + 4


def _places_of_homes(files: Files, tables: list[dict]) -> Iterator[Place]:
    for i, table in enumerate(tables):
        name = f"shard-0000/table-{i:04}"
        count = LAYOUTS["HomeAddressesHeader"].unpack(files[f"{name}.addresses"], 0)["count"]
        yield from _places_of_images(files, table, f"{name}.home", count)
        if count != 0:
            yield from _fields(LAYOUTS["HomeAddressesHeader"], f"{name}.addresses", 0)
            yield from _places_of_addresses(f"{name}.addresses", count)


def _places_of_images(files: Files, table: dict, name: str, count: int) -> Iterator[Place]:
    weights = table["embedding_dim"] * ELEMENT_BYTES[table["dtype"]]
    size = _image_bytes(table)
    for at in range(0, count * size, size):
        parts = {"weights": (0, weights), "state": (weights, size - 4), "tag": (size - 4, size)}
        for part, (begin, end) in parts.items():
            if any(files[name][at : at + size]):
                yield Place("row image", part, name, at + begin, at + end, (at, at + size))


def _places_of_addresses(name: str, count: int) -> Iterator[Place]:
    for first in range(0, count, SECTOR_ROWS):
        begin = BLOCK + first // SECTOR_ROWS * SECTOR
        whole = (begin, begin + SECTOR)
        rows = min(count - first, SECTOR_ROWS)
        yield Place("sector of addresses", "rows", name, begin, begin + rows * ROW_BYTES, whole)
        yield Place("sector of addresses", "zeros", name, begin + SECTOR_ROWS * ROW_BYTES, begin + SECTOR - 4, whole)
        yield Place("sector of addresses", "checksum", name, begin + SECTOR - 4, begin + SECTOR, whole)


@dataclass
class Damage:
    """One corruption: what was done where, and the files after it. struck: files and ranges that were changed."""

    kind: str
    target: tuple[str, str]
    words: str
    files: Files
    struck: list[tuple[str, int, int]]

    def is_stale(self, older: list[Files]) -> bool:
        """Whether all that was struck is as it was at earlier times: what writes that the medium lost would leave."""
        return all(
            any(self.files.get(file, b"")[begin:end] == files[file][begin:end] for files in older)
            for file, begin, end in self.struck
        )


IN_PLACE_KINDS = ("flip", "zero", "garbage", "zero structure", "stale", "swap", "duplicate", "stale sector")
FILE_KINDS = ("truncate", "extend", "remove", "empty", "stale file", "swap files", "duplicate file")


def strike(rng: random.Random, files: Files, older: list[Files], place: Place, places: list[Place]) -> Damage | None:
    """Damages the pool at a place, in a random way; None where that way means nothing there, or changes nothing."""
    kind = rng.choice(IN_PLACE_KINDS)
    data = bytearray(files[place.file])
    begin, end = place.begin, place.end
    if kind == "flip":
        begin = rng.randrange(begin, end)
        end = begin + 1
        data[begin] ^= 1 << rng.randrange(8)
    elif kind == "zero":
        data[begin:end] = bytes(end - begin)
    elif kind == "garbage":
        data[begin:end] = rng.randbytes(end - begin)
    elif kind == "zero structure":
        begin, end = place.whole
        data[begin:end] = bytes(end - begin)
    elif kind in ("stale", "stale sector"):
        begin, end = place.whole
        if kind == "stale sector":
            begin = place.begin // SECTOR * SECTOR
            end = begin + SECTOR
        source = rng.choice(older)[place.file] if older else b""
        if len(source) < end:
            return None
        data[begin:end] = source[begin:end]
    else:  # another structure of the same kind and size
        begin, end = place.whole
        others = sorted(
            {(p.file, p.whole) for p in places if p.structure == place.structure} - {(place.file, place.whole)}
        )
        others = [(file, whole) for file, whole in others if whole[1] - whole[0] == end - begin]
        if not others:
            return None
        file, other = rng.choice(others)
        source = files[file][other[0] : other[1]]
        if kind == "swap":
            counterpart = data if file == place.file else bytearray(files[file])
            counterpart[other[0] : other[1]] = files[place.file][begin:end]
            if file != place.file:
                files = {**files, file: bytes(counterpart)}
        data[begin:end] = source
        words = f"{kind}: {place} with {file} [{other[0]}, {other[1]})"
        struck = [(place.file, begin, end)] + ([(file, *other)] if kind == "swap" else [])
        return Damage(kind, place.target, words, {**files, place.file: bytes(data)}, struck)
    after = {**files, place.file: bytes(data)}
    return Damage(kind, place.target, f"{kind}: {place}", after, [(place.file, begin, end)])


def strike_file(rng: random.Random, files: Files, older: list[Files], name: str) -> Damage | None:
    """Damages one file as a whole."""
    kind = rng.choice(FILE_KINDS)
    data = files[name]
    after = dict(files)
    words = f"{kind}: {name}"
    if kind == "truncate":
        size = rng.choice([rng.randrange(len(data)), rng.randrange(len(data)) // BLOCK * BLOCK, len(data) - 1])
        after[name] = data[:size]
        words += f" to {size} bytes"
    elif kind == "extend":
        by = rng.choice([1, 8, SECTOR, BLOCK, 16 * BLOCK])
        after[name] = data + (rng.randbytes(by) if rng.random() < 0.5 else bytes(by))
        words += f" by {by} bytes"
    elif kind == "remove":
        del after[name]
    elif kind == "empty":
        after[name] = b""
    elif kind == "stale file":
        if not older:
            return None
        after[name] = rng.choice(older)[name]
    else:
        same = [other for other in sorted(files) if other != name and len(files[other]) == len(data)]
        if not same:
            return None
        other = rng.choice(same)
        after[name] = files[other]
        if kind == "swap files":
            after[other] = data
        words += f" with {other}"
    struck = [
        (each, 0, max(len(files[each]), len(after.get(each, b"")))) for each in files if files[each] != after.get(each)
    ]
    return Damage(kind, ("file", kind_of_file(name)), words, after, struck)
