"""The disk that power cuts are tested with: what was flushed stays, of the rest anything may."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from volatile_disk import SECTOR_BYTES, VolatileCache

SECTORS = 8


@pytest.fixture
def platter(tmp_path: Path) -> Path:
    path = tmp_path / "platter"
    path.write_bytes(bytes(SECTORS * SECTOR_BYTES))
    return path


def sectors(*values: int) -> bytes:
    return b"".join(bytes([value]) * SECTOR_BYTES for value in values)


def after_cut(platter: Path, cache: VolatileCache, seed: int) -> bytes:
    cache.cut(random.Random(seed))
    cache.close()
    return platter.read_bytes()


def outcomes(platter: Path, sector: int, versions: tuple[int, ...]) -> Iterator[int]:
    """What a sector may hold after versions were written to it one after the other, and the power failed."""
    for seed in range(64):
        platter.write_bytes(bytes(SECTORS * SECTOR_BYTES))
        cache = VolatileCache(platter)
        for version in versions:
            cache.write(sector * SECTOR_BYTES, sectors(version))
        yield after_cut(platter, cache, seed)[sector * SECTOR_BYTES]


def test_what_was_written_is_read_before_it_is_on_the_platter(platter: Path) -> None:
    cache = VolatileCache(platter)
    cache.write(SECTOR_BYTES, sectors(1, 2))
    assert cache.read(0, 4 * SECTOR_BYTES) == sectors(0, 1, 2, 0)
    assert platter.read_bytes() == bytes(SECTORS * SECTOR_BYTES)


@pytest.mark.parametrize("seed", range(20))
def test_what_was_flushed_survives_every_cut(platter: Path, seed: int) -> None:
    cache = VolatileCache(platter)
    cache.write(0, sectors(*range(1, SECTORS + 1)))
    cache.flush()
    assert after_cut(platter, cache, seed) == sectors(*range(1, SECTORS + 1))


@pytest.mark.parametrize("seed", range(20))
def test_what_was_written_through_survives_every_cut(platter: Path, seed: int) -> None:
    cache = VolatileCache(platter)
    cache.write(0, sectors(1))
    cache.write(0, sectors(2, 3), through=True)
    assert after_cut(platter, cache, seed)[: 2 * SECTOR_BYTES] == sectors(2, 3)


def test_a_cut_leaves_any_version_of_a_sector_that_was_not_flushed(platter: Path) -> None:
    assert set(outcomes(platter, 3, (1, 2, 3))) == {0, 1, 2, 3}


def test_a_cut_tears_a_write_between_its_sectors(platter: Path) -> None:
    left = set()
    for seed in range(64):
        platter.write_bytes(bytes(SECTORS * SECTOR_BYTES))
        cache = VolatileCache(platter)
        cache.write(0, sectors(1, 1))
        found = after_cut(platter, cache, seed)
        left.add((found[0], found[SECTOR_BYTES]))
    assert left == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_the_seed_decides_what_is_lost(platter: Path) -> None:
    found = []
    for _ in range(2):
        platter.write_bytes(bytes(SECTORS * SECTOR_BYTES))
        cache = VolatileCache(platter)
        for value in range(1, 6):
            cache.write(0, sectors(*[value] * SECTORS))
        found.append(after_cut(platter, cache, 7))
    assert found[0] == found[1]


def test_a_forgetful_disk_loses_what_it_was_told_to_keep(platter: Path) -> None:
    cache = VolatileCache(platter, forgetful=True)
    cache.write(0, sectors(*[1] * SECTORS), through=True)
    cache.flush()
    assert cache.counts["flushes"] == 1
    assert after_cut(platter, cache, 1) != sectors(*[1] * SECTORS)
