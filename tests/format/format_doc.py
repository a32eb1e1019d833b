"""docs/FORMAT.md as data: its byte tables become struct layouts, its constants and enums dictionaries.

The tests of this folder read pools with nothing but what the document says.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docs" / "FORMAT.md").read_text()

_SCALARS = {"u8": "B", "u32": "I", "u64": "Q", "f32": "f"}


@dataclass(frozen=True)
class Field:
    name: str
    offset: int
    type: str

    @property
    def code(self) -> str:
        """For the struct module; arrays are bytes."""
        if found := re.fullmatch(r"(?:u8|char)\[(\d+)\]", self.type):
            return f"{found[1]}s"
        if found := re.fullmatch(r"u32\[(\d+)\]", self.type):
            return f"{4 * int(found[1])}s"
        return _SCALARS[self.type]

    @property
    def size(self) -> int:
        return struct.calcsize("<" + self.code)


@dataclass(frozen=True)
class Layout:
    name: str
    size: int
    fields: tuple[Field, ...]

    def unpack(self, data: bytes, offset: int = 0) -> dict[str, int | float | bytes]:
        """The structure at `offset` of `data` by field."""
        return {f.name: struct.unpack_from("<" + f.code, data, offset + f.offset)[0] for f in self.fields}

    def field(self, name: str) -> Field:
        return next(f for f in self.fields if f.name == name)

    def seal(self, data: bytearray, offset: int = 0, *, seed: int = 0) -> None:
        """Puts the right checksum over the structure at `offset`."""
        crc = self.field("crc").offset
        struct.pack_into("<I", data, offset + crc, crc32c(bytes(data[offset : offset + crc]), self._seed(seed)))

    def holds(self, data: bytes, offset: int = 0, *, seed: int = 0) -> bool:
        found = self.unpack(data, offset)
        return found["crc"] == crc32c(data[offset : offset + self.field("crc").offset], self._seed(seed))

    def _seed(self, seed: int) -> int:
        """What its checksum goes on from in a pool with this seed."""
        return 0 if self.name in ("PoolHeader", "FileLabel") else seed


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def _layouts() -> dict[str, Layout]:
    layouts = {}
    for found in re.finditer(r"^### (\w+): (\d+) bytes$(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL):
        rows = [cells for cells in _rows(found[3]) if cells[0].isdigit()]
        fields = tuple(Field(cells[2].strip("`"), int(cells[0]), cells[1]) for cells in rows)
        layouts[found[1]] = Layout(found[1], int(found[2]), fields)
    return layouts


def _table(heading: str) -> list[list[str]]:
    """The rows of the table whose first column has this heading."""
    found = re.search(rf"^\| {heading} \|.*?\n\|---.*?\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    assert found is not None, heading
    return list(_rows(found[1]))


LAYOUTS = _layouts()
CONSTANTS = {cells[0].strip("`"): int(cells[1]) for cells in _table("constant")}
MAGICS = {
    cells[0].strip("`"): int.from_bytes(cells[1].strip("`").replace("\\n", "\n").encode(), "little")
    for cells in _table("magic")
}
ENUMS = {
    cells[0].strip("`"): {name: int(value) for name, value in re.findall(r"`(\w+)` (\d+)", cells[1])}
    for cells in _table("enum")
}


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC_TABLE = _crc_table()


def crc32c(data: bytes, seed: int = 0) -> int:
    """CRC-32C, one byte at a time: independent of the core's."""
    crc = seed ^ 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF
