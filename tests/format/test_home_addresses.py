"""The files that say which row each image of a home is of: what one of them has does not hold in another."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import Pool
from holdfast.admin.repair import problems_of
from holdfast.errors import Corrupted
from tiny_pools import RoomyWriter

HEADER, SECTORS = slice(0, 64), slice(4096, 4096 + 512)


@pytest.fixture
def addresses(pool_root: Path) -> list[Path]:
    """Of a closed pool, those of two tables that count rows."""
    writer = RoomyWriter(pool_root / "pool", made_with={"log_store": True})
    counting: list[Path] = []
    while len(counting) < 2:
        writer.steps(9)
        writer.pool.close()
        files = sorted((pool_root / "pool").rglob("*.addresses"))
        counting = [file for file in files if any(file.read_bytes()[HEADER])][:2]
        writer = RoomyWriter(pool_root / "pool", made_with={"log_store": True})
    writer.pool.close()
    return counting


@pytest.mark.parametrize("part", [HEADER, SECTORS], ids=["headers", "sectors"])
def test_what_changes_places_between_two_tables_is_corruption(addresses: list[Path], part: slice) -> None:
    pool = addresses[0].parents[1]
    assert problems_of(pool) == []
    first, second = (bytearray(file.read_bytes()) for file in addresses)
    assert first[part] != second[part]
    first[part], second[part] = second[part], first[part]
    for file, data in zip(addresses, (first, second), strict=True):
        file.write_bytes(data)
    with pytest.raises(Corrupted, match="addresses"):
        Pool(pool).close()
    assert any("addresses" in problem for problem in problems_of(pool))
