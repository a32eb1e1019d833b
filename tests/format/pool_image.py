"""A pool's files, read as docs/FORMAT.md describes them and in no other way."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from format_doc import CONSTANTS, ENUMS, LAYOUTS, MAGICS, crc32c

HEADER, TABLE, EPOCH, COMMIT = (LAYOUTS[n] for n in ("PoolHeader", "TableRecord", "EpochRecord", "CommitRecord"))
RECORD, SECTION, DENSE = (LAYOUTS[name] for name in ("RecordHeader", "RecordSection", "DenseHeader"))
BLOCK, LINE = CONSTANTS["block_bytes"], CONSTANTS["line_bytes"]
EPOCH_OFFSETS = (CONSTANTS["epoch_offset[0]"], CONSTANTS["epoch_offset[1]"])
COMMIT_OFFSETS = (CONSTANTS["commit_offset[0]"], CONSTANTS["commit_offset[1]"])
TABLES_OFFSET, PAYLOAD_OFFSET = CONSTANTS["tables_offset"], CONSTANTS["dense_payload_offset"]
UNTOUCHED = 1 << 63
LABEL = CONSTANTS["label_bytes"]

Values = dict[str, Any]


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def seed_of(superblock: bytes) -> int:
    """What the checksums of the pool go on from."""
    header = HEADER.unpack(superblock)
    return crc32c(header["uuid"]) if header["version"] >= CONSTANTS["identity_version"] else 0


class PoolImage:
    """Reads on construction; later changes of the files are not seen."""

    def __init__(self, directory: Path) -> None:
        self.superblock = (directory / "pool.holdfast").read_bytes()
        self.seed = seed_of(self.superblock)
        is_labelled = HEADER.unpack(self.superblock)["version"] >= CONSTANTS["identity_version"]
        self.log_origin = LABEL if is_labelled else 0
        self.log = (directory / "log-0000").read_bytes()[self.log_origin :]
        self.slots = [(directory / f"dense-{i}").read_bytes() for i in range(2)]
        self.header: Values = HEADER.unpack(self.superblock)
        self.tables: list[Values] = [
            TABLE.unpack(self.superblock, self.table_offset(i)) for i in range(self.header["num_tables"])
        ]
        self._directory = directory

    @staticmethod
    def table_offset(table: int) -> int:
        return TABLES_OFFSET + TABLE.size * table

    def element_bytes(self, table: int) -> int:
        return 4 if self.tables[table]["dtype"] == ENUMS["RowDtype"]["f32"] else 2

    def newest_epoch(self) -> tuple[int, Values]:
        """Offset and values of the epoch record that counts."""
        return max(self._whole(EPOCH_OFFSETS, EPOCH, "epoch_magic"), key=lambda r: (r[1]["epoch"], r[1]["clean"]))

    def newest_commit(self) -> tuple[int, Values]:
        return max(self._whole(COMMIT_OFFSETS, COMMIT, "commit_magic"), key=lambda r: (r[1]["epoch"], r[1]["step"]))

    def _whole(self, offsets: tuple[int, int], layout: Any, magic: str) -> list[tuple[int, Values]]:
        found = [(offset, layout.unpack(self.superblock, offset)) for offset in offsets]
        return [
            (o, r) for o, r in found if r["magic"] == MAGICS[magic] and layout.holds(self.superblock, o, seed=self.seed)
        ]

    def slot(self, i: int) -> Values | None:
        """The header of dense slot i, where it holds a whole state."""
        data = self.slots[i]
        header = DENSE.unpack(data)
        if header["magic"] != MAGICS["dense_magic"] or not DENSE.holds(data, seed=self.seed):
            return None
        payload = up(header["structure_bytes"], LINE) + header["tensors_bytes"]
        whole = crc32c(data[PAYLOAD_OFFSET : PAYLOAD_OFFSET + payload], self.seed) == header["payload_crc"]
        return header if whole else None

    def newest_slot(self) -> int:
        headers = [self.slot(i) for i in range(2)]
        return max(range(2), key=lambda i: -1 if headers[i] is None else headers[i]["step"])

    def record(self, position: int) -> Values | None:
        """The whole record at a log position."""
        offset = position % len(self.log)
        if offset + RECORD.size > len(self.log):
            return None
        header = RECORD.unpack(self.log, offset)
        if header["magic"] != MAGICS["record_magic"] or not RECORD.holds(self.log, offset, seed=self.seed):
            return None
        payload = self.log[offset + RECORD.size : offset + header["bytes"]]
        whole = header["position"] == position and crc32c(payload, self.seed) == header["payload_crc"]
        return header if whole else None

    def records_backwards(self) -> Iterator[Values]:
        """The chain that the newest commit record names, newest first, as far as the ring still has it."""
        _, commit = self.newest_commit()
        position, crc, step = commit["last_record"], commit["last_record_crc"], commit["last_record_step"]
        while position != CONSTANTS["no_position"]:
            record = self.record(position)
            if record is None or record["crc"] != crc or record["step"] != step:
                return
            yield record
            position, crc, step = record["previous"], record["previous_crc"], record["previous_step"]

    def records_forwards(self) -> Iterator[Values]:
        """The records that were sealed after the newest commit record, oldest first."""
        _, commit = self.newest_commit()
        position, last, crc = commit["log_head"], commit["last_record"], commit["last_record_crc"]
        while True:
            turn = (position // len(self.log) + 1) * len(self.log)
            for candidate in (position, turn):
                record = self.record(candidate)
                if record and (record["epoch"], record["previous"], record["previous_crc"]) == (
                    commit["epoch"],
                    last,
                    crc,
                ):
                    break
            else:
                return
            yield record
            position, last, crc = record["position"] + record["bytes"], record["position"], record["crc"]

    def sections(self, record: Values) -> list[Values]:
        start = record["position"] % len(self.log) + RECORD.size
        return [SECTION.unpack(self.log, start + SECTION.size * i) for i in range(record["num_sections"])]

    def before_images(self, record: Values) -> Iterator[tuple[int, int, bool, bytes, bytes]]:
        """(table, row, untouched, weights, state) of every row in a record."""
        start = record["position"] % len(self.log)
        for section in self.sections(record):
            table = section["table"]
            weight_bytes = self.tables[table]["embedding_dim"] * self.element_bytes(table)
            state_bytes = self.tables[table]["state_floats"] * 4
            for i in range(section["num_rows"]):
                (row,) = struct.unpack_from("<Q", self.log, start + section["rows_offset"] + 8 * i)
                weights = start + section["weights_offset"] + weight_bytes * i
                state = start + section["state_offset"] + state_bytes * i
                yield (
                    table,
                    row & ~UNTOUCHED,
                    bool(row & UNTOUCHED),
                    self.log[weights : weights + weight_bytes],
                    self.log[state : state + state_bytes],
                )

    def table_file(self, table: int, what: str) -> bytes:
        """Without its label."""
        data = (self._directory / "shard-0000" / f"table-{table:04}.{what}").read_bytes()
        if not self.log_origin:
            return data
        rows, record = self.tables[table]["num_embeddings"], self.tables[table]
        sizes = {
            "weights": record["embedding_dim"] * self.element_bytes(table) * rows,
            "state": record["state_floats"] * 4 * rows,
            "touched": up(rows, 64) // 8,
            "checksums": 4 * rows,
        }
        assert len(data) == up(sizes[what], BLOCK) + LABEL
        return data[: sizes[what]]

    def touched_rows(self, table: int) -> set[int]:
        bits = int.from_bytes(self.table_file(table, "touched"), "little")
        return {row for row in range(bits.bit_length()) if bits >> row & 1}
