"""One writer's part of a pool of several writers: version 3, byte for byte, and what is not taken for one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from format_doc import CONSTANTS, LAYOUTS, MAGICS
from holdfast import _core
from holdfast.errors import ConfigError, Corrupted, FormatMismatch
from pool_image import seed_of

GROUP = bytes(range(16))
NUM_SHARDS = 4
ROWS = 140_003
TABLES_OFFSET = CONSTANTS["tables_offset"]
SHARDS_OFFSET = 24_576  # two tables are in the block before
MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def shard_of(row: int) -> int:
    return (row + mix(row // NUM_SHARDS)) % NUM_SHARDS


def specs() -> list[_core.TableSpec]:
    common = {"embedding_dim": 6, "dtype": 0, "optimizer": 1, "pooling": 0, "init_low": -0.1, "init_high": 0.1}
    return [
        _core.TableSpec(name="split", num_embeddings=ROWS, table_shards=NUM_SHARDS, **common),
        _core.TableSpec(name="whole", num_embeddings=300, table_shards=1, first_shard=2, **common),
    ]


def make_member(pool: Path, writer: int, owned: list[int], *, log_store: bool = False) -> Path:
    member = pool / "writers-1" / f"{writer:04}"
    member.mkdir(parents=True)
    _core.Pool.create(str(member), 1, 1 << 16, specs(), log_store, num_shards=NUM_SHARDS, owned=owned, group_uuid=GROUP)
    return member


@pytest.mark.parametrize("log_store", [False, True])
def test_a_writers_pool_says_which_shards_it_owns_and_its_rows_are_beside_it(tmp_path: Path, log_store: bool):
    member = make_member(tmp_path, 0, [2, 3], log_store=log_store)
    data = (member / "pool.holdfast").read_bytes()
    assert len(data) == SHARDS_OFFSET + CONSTANTS["block_bytes"]
    header = LAYOUTS["PoolHeader"].unpack(data)
    assert (header["version"], header["num_shards"], header["num_writers"]) == (5, NUM_SHARDS, 1)
    tables = [LAYOUTS["TableRecord"].unpack(data, TABLES_OFFSET + 512 * i) for i in range(2)]
    assert [(table["first_shard"], table["table_shards"]) for table in tables] == [(0, NUM_SHARDS), (2, 1)]
    record = LAYOUTS["ShardsRecord"].unpack(data, SHARDS_OFFSET)
    assert LAYOUTS["ShardsRecord"].holds(data, SHARDS_OFFSET, seed=seed_of(data))
    assert (record["magic"], record["group_uuid"]) == (MAGICS["shards_magic"], GROUP)
    assert record["owned"] == bytes([0b1100]) + bytes(511)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard-0002", "shard-0003", "writers-1"]
    assert not list(member.glob("shard-*"))
    rows = [shard_of(row) for row in range(ROWS)]
    for shard in (2, 3):
        images = -(-rows.count(shard) // 16) * 512  # 32 bytes each
        column, size = ("home", images) if log_store else ("weights", rows.count(shard) * 24)
        labelled = -(-size // 4096) * 4096 + 4096
        assert (tmp_path / f"shard-{shard:04}" / f"table-0000.{column}").stat().st_size == labelled
        assert (tmp_path / f"shard-{shard:04}" / f"table-0001.{column}").exists() == (shard == 2)

    reader = _core.Reader(str(member))
    assert (reader.owned, reader.group_uuid, reader.header["format_version"]) == ([2, 3], GROUP, 5)
    assert reader.verify() == []
    assert [(table.first_shard, table.table_shards) for table in reader.tables] == [(0, NUM_SHARDS), (2, 1)]


def test_places_number_a_shards_rows_as_the_document_says():
    rows = np.arange(0, ROWS, 7, dtype=np.int64)
    places = _core.places_of(ROWS, NUM_SHARDS, 0, rows)
    assert places.tolist() == [shard_of(row) << 16 | row // NUM_SHARDS for row in rows.tolist()]
    np.testing.assert_array_equal(_core.rows_of_places(ROWS, NUM_SHARDS, 0, places), rows)
    with pytest.raises(ValueError, match="outside the table"):
        _core.places_of(ROWS, NUM_SHARDS, 0, np.array([-1], dtype=np.int64))
    with pytest.raises(ValueError, match="power of two"):
        _core.places_of(ROWS, 3, 0, rows)


@pytest.mark.parametrize("log_store", [False, True])
def test_initial_rows_do_not_depend_on_shards(tmp_path: Path, log_store: bool):
    plain = tmp_path / "plain"
    plain.mkdir()
    unsharded = [
        _core.TableSpec(
            name="split",
            num_embeddings=ROWS,
            embedding_dim=6,
            dtype=0,
            optimizer=1,
            pooling=0,
            init_low=-0.1,
            init_high=0.1,
        )
    ]
    _core.Pool.create(str(plain), 1, 1 << 16, unsharded)
    member = make_member(tmp_path / "group", 0, [1], log_store=log_store)
    rows = np.array([row for row in range(2000) if shard_of(row) == 1], dtype=np.int64)
    found = []
    for directory, numbers in ((member, _core.places_of(ROWS, NUM_SHARDS, 0, rows)), (plain, rows)):
        weights = np.empty(24 * len(rows), dtype=np.uint8)
        state = np.empty(4 * len(rows), dtype=np.uint8)
        differs = np.empty(len(rows), dtype=np.uint8)
        _core.Reader(str(directory)).gather_rows(0, numbers.tolist(), weights, state, differs)
        assert not differs.any()
        found.append(weights)
    np.testing.assert_array_equal(*found)


def test_rows_of_other_writers_are_refused_and_say_whose_they_are(tmp_path: Path):
    reader = _core.Reader(str(make_member(tmp_path, 0, [1])))
    row = next(row for row in range(100) if shard_of(row) == 3)
    place = int(_core.places_of(ROWS, NUM_SHARDS, 0, np.array([row], dtype=np.int64))[0])
    weights, state = np.empty(24, dtype=np.uint8), np.empty(4, dtype=np.uint8)
    with pytest.raises(ConfigError, match=f"row {row} of table 'split' is of shard 3, which this writer does not own"):
        reader.read_rows(0, place, 1, weights, state)


def reseal(layout: str, offset: int, field: str, value: bytes) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        begin = offset + LAYOUTS[layout].field(field).offset
        data[begin : begin + len(value)] = value
        LAYOUTS[layout].seal(data, offset, seed=seed_of(bytes(data)))

    return change


def flip_shards_record(data: bytearray) -> None:
    data[SHARDS_OFFSET + 30] ^= 1


def number(value: int) -> bytes:
    return value.to_bytes(4, "little")


IMPOSSIBLE = {
    "a record that does not hold": (flip_shards_record, Corrupted),
    "3 shards": (reseal("PoolHeader", 0, "num_shards", number(3)), Corrupted),
    "no shards": (reseal("PoolHeader", 0, "num_shards", number(0)), Corrupted),
    "8192 shards": (reseal("PoolHeader", 0, "num_shards", number(8192)), Corrupted),
    "another number than a table's": (reseal("PoolHeader", 0, "num_shards", number(8)), Corrupted),
    "two writers": (reseal("PoolHeader", 0, "num_writers", number(2)), FormatMismatch),
    "shards before version 3": (reseal("PoolHeader", 0, "version", number(2)), FormatMismatch),
    "a version to come": (reseal("PoolHeader", 0, "version", number(6)), FormatMismatch),
    "a table in 2 of 4": (reseal("TableRecord", TABLES_OFFSET, "table_shards", number(2)), Corrupted),
    "a table in none": (reseal("TableRecord", TABLES_OFFSET, "table_shards", number(0)), Corrupted),
    "a split table turned by 4": (reseal("TableRecord", TABLES_OFFSET, "first_shard", number(4)), Corrupted),
    "a whole table in shard 4": (reseal("TableRecord", TABLES_OFFSET + 512, "first_shard", number(4)), Corrupted),
    "shard 4 is owned": (reseal("ShardsRecord", SHARDS_OFFSET, "owned", bytes([0b10000])), Corrupted),
    "no magic": (reseal("ShardsRecord", SHARDS_OFFSET, "magic", bytes(8)), Corrupted),
}


@pytest.mark.parametrize(("change", "error"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_shards_are_told_with_file_and_place(
    tmp_path: Path, change: Callable[[bytearray], None], error: type[Exception]
):
    superblock = make_member(tmp_path, 0, [0, 1]) / "pool.holdfast"
    data = bytearray(superblock.read_bytes())
    change(data)
    superblock.write_bytes(data)
    with pytest.raises(error, match=r"pool\.holdfast"):
        _core.Reader(str(superblock.parent))
    with pytest.raises(error, match=r"pool\.holdfast"):
        open_pool(superblock.parent)


def open_pool(directory: Path) -> _core.Pool:
    return _core.Pool(
        str(directory),
        relaxed=False,
        dense_interval=1,
        grow_log=True,
        scratchpad_bytes=1 << 20,
        trust_after_reboot=False,
    )


@pytest.mark.parametrize("field", [field.name for field in LAYOUTS["ShardsRecord"].fields])
def test_no_field_of_the_shards_record_is_damaged_unnoticed(tmp_path: Path, field: str):
    superblock = make_member(tmp_path, 0, [0, 1]) / "pool.holdfast"
    data = bytearray(superblock.read_bytes())
    data[SHARDS_OFFSET + LAYOUTS["ShardsRecord"].field(field).offset] ^= 4
    superblock.write_bytes(data)
    with pytest.raises(Corrupted, match=rf"pool\.holdfast at offset {SHARDS_OFFSET}: .*shards record"):
        _core.Reader(str(superblock.parent))


def test_a_superblock_that_is_cut_off_before_its_shards_is_truncated(tmp_path: Path):
    superblock = make_member(tmp_path, 0, [0, 1]) / "pool.holdfast"
    superblock.write_bytes(superblock.read_bytes()[:SHARDS_OFFSET])
    with pytest.raises(Corrupted, match="truncated"):
        _core.Reader(str(superblock.parent))


@pytest.mark.parametrize("log_store", [False, True])
def test_whoever_adopts_shards_misses_a_file_that_is_lost(tmp_path: Path, log_store: bool):
    make_member(tmp_path, 0, [0, 1], log_store=log_store)
    column = "home" if log_store else "touched"
    (tmp_path / "shard-0001" / f"table-0000.{column}").unlink()
    heir = tmp_path / "writers-2" / "0000"
    heir.mkdir(parents=True)
    with pytest.raises(Corrupted, match=rf"shard-0001/table-0000\.{column}"):
        _core.Pool.create(
            str(heir), 1, 1 << 16, specs(), log_store, num_shards=NUM_SHARDS, owned=[0, 1], group_uuid=GROUP, adopt=True
        )
