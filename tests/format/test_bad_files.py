"""Damaged, truncated, foreign and future files: a typed error that names file and offset, and not one byte changed.

What a crash leaves (a torn record) is not damage; docs/FORMAT.md says what is told apart, and what cannot be.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from format_doc import Field, Layout, crc32c
from holdfast import Pool, _core
from holdfast.admin.snapshot.taking import take_snapshot
from holdfast.errors import Corrupted, FormatMismatch, PoolError, PoolNotFound, UntrustedPool
from pool_image import (
    BLOCK,
    COMMIT,
    COMMIT_OFFSETS,
    DENSE,
    EPOCH,
    EPOCH_OFFSETS,
    HEADER,
    LABEL,
    PAYLOAD_OFFSET,
    RECORD,
    SECTION,
    TABLE,
    TABLES_OFFSET,
    PoolImage,
    seed_of,
)
from tiny_pools import (
    LOG_BYTES,
    STATES,
    TABLES,
    Writer,
    closed_cleanly,
    died_in_step_six,
    died_in_the_first_step_of_its_second_life,
    died_two_steps_after_its_dense_state,
    digest_of_rows,
    files_of,
)

State = Callable[[Path], Path]
CopyOf = Callable[[State], Path]


@pytest.fixture(scope="module")
def made(new_root: Callable[[], Path]) -> dict[State, Path]:
    return {state: state(new_root()) for state in STATES}


@pytest.fixture
def copy_of(made: dict[State, Path], pool_root: Path) -> CopyOf:
    """A fresh copy of a pool in one of the states; the one before is gone."""

    def copy(state: State) -> Path:
        shutil.rmtree(pool_root / "copy", ignore_errors=True)
        return shutil.copytree(made[state], pool_root / "copy")

    return copy


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def put(path: Path, offset: int, layout: Layout, **values: int) -> None:
    """Sets fields of a structure and makes its checksum right again."""
    data = bytearray(path.read_bytes())
    for name, value in values.items():
        field = layout.field(name)
        struct.pack_into("<" + field.code, data, offset + field.offset, value)
    whole = bytearray(data[offset : offset + layout.size])
    layout.seal(whole, seed=seed_of((path.parent / "pool.holdfast").read_bytes()))
    data[offset : offset + layout.size] = whole
    path.write_bytes(data)


def refuses(directory: Path, error: type[PoolError], *words: str) -> None:
    """Opening raises `error` with all of these words, twice the same way, and changes no byte."""
    before = files_of(directory)
    for _ in range(2):
        with pytest.raises(error) as raised:
            Pool(directory)
        message = str(raised.value)
        assert all(word in message for word in words), f"{message!r} lacks one of {words}"
    after = files_of(directory)
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == []


def verify_names(directory: Path, *words: str) -> None:
    """verify finds a problem that has all of these words."""
    try:
        problems = _core.Reader(str(directory)).verify()
    except (Corrupted, FormatMismatch) as error:
        problems = [str(error)]
    assert any(all(word in problem for word in words) for problem in problems), problems


def opens(directory: Path, step: int, *, clean: bool) -> None:
    with Pool(directory) as pool:
        assert (pool.step, pool.recovered.clean) == (step, clean)


@pytest.fixture(scope="module")
def rows_at_step(made: dict[State, Path], new_root: Callable[[], Path]) -> dict[State, str]:
    """The digest of the rows that each state recovers to."""
    digests = {}
    for state in STATES:
        copy = shutil.copytree(made[state], new_root() / "copy")
        Pool(copy).close()
        digests[state] = digest_of_rows(copy)
    return digests


def test_undamaged_pools_verify_and_recover_to_the_newest_dense_state(copy_of: CopyOf, rows_at_step: dict[State, str]):
    for state, step in zip(STATES, (5, 5, 3, 5), strict=True):
        directory = copy_of(state)
        assert _core.Reader(str(directory)).verify() == []
        opens(directory, step, clean=state is closed_cleanly)
        assert _core.Reader(str(directory)).verify() == []
    same = {rows_at_step[state] for state in STATES if state is not died_two_steps_after_its_dense_state}
    assert same == {digest_of_rows(copy_of(closed_cleanly))}


def each_field(layout: Layout) -> list[Field]:
    return list(layout.fields)


@pytest.mark.parametrize("field", each_field(HEADER), ids=lambda field: field.name)
@pytest.mark.parametrize("state", [closed_cleanly, died_in_step_six], ids=lambda state: state.__name__)
def test_a_flipped_bit_in_the_header_is_found(copy_of: CopyOf, state: State, field: Field):
    error = FormatMismatch if field.name in ("magic", "version") else Corrupted
    for offset in {field.offset, field.offset + field.size - 1}:
        directory = copy_of(state)
        flip(directory / "pool.holdfast", offset, bit=5)
        refuses(directory, error, "pool.holdfast")
        verify_names(directory, "pool.holdfast")


@pytest.mark.parametrize("table", range(len(TABLES)))
def test_a_flipped_bit_in_a_table_record_is_found(copy_of: CopyOf, table: int):
    for field in TABLE.fields:
        directory = copy_of(closed_cleanly)
        record = PoolImage.table_offset(table)
        flip(directory / "pool.holdfast", record + field.offset, bit=3)
        refuses(directory, Corrupted, f"pool.holdfast at offset {record}", f"table record {table}")
        verify_names(directory, f"pool.holdfast at offset {record}")


@pytest.mark.parametrize("field", each_field(COMMIT), ids=lambda field: field.name)
def test_a_flipped_bit_in_either_commit_record_of_a_closed_pool_is_found(copy_of: CopyOf, field: Field):
    for offset in COMMIT_OFFSETS:
        directory = copy_of(closed_cleanly)
        flip(directory / "pool.holdfast", offset + field.offset)
        refuses(directory, Corrupted, f"pool.holdfast at offset {offset}", "commit record")
        verify_names(directory, f"pool.holdfast at offset {offset}")


def test_a_flipped_bit_in_the_older_epoch_record_of_a_closed_pool_is_found(copy_of: CopyOf):
    for field in EPOCH.fields:
        directory = copy_of(closed_cleanly)
        newest, _ = PoolImage(directory).newest_epoch()
        (older,) = set(EPOCH_OFFSETS) - {newest}
        flip(directory / "pool.holdfast", older + field.offset)
        refuses(directory, Corrupted, f"pool.holdfast at offset {older}", "epoch record")
        verify_names(directory, f"pool.holdfast at offset {older}")


def test_a_flipped_bit_in_the_newest_epoch_record_of_a_closed_pool_makes_it_one_that_was_not_closed(
    copy_of: CopyOf, rows_at_step: dict[State, str]
):
    for field in EPOCH.fields:
        directory = copy_of(closed_cleanly)
        newest, _ = PoolImage(directory).newest_epoch()
        flip(directory / "pool.holdfast", newest + field.offset)
        opens(directory, 5, clean=False)
        assert digest_of_rows(directory) == rows_at_step[closed_cleanly]


def test_a_flipped_bit_in_the_newest_epoch_record_of_a_pool_in_use_is_found(copy_of: CopyOf):
    # Otherwise the older one would say "closed cleanly", and a pool would be trusted that was open at a power cut.
    for state in (died_in_step_six, died_in_the_first_step_of_its_second_life):
        for field in EPOCH.fields:
            directory = copy_of(state)
            newest, _ = PoolImage(directory).newest_epoch()
            flip(directory / "pool.holdfast", newest + field.offset)
            refuses(directory, Corrupted, f"pool.holdfast at offset {newest}", "epoch record")
            verify_names(directory, f"pool.holdfast at offset {newest}")


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
@pytest.mark.parametrize("offsets", [EPOCH_OFFSETS, COMMIT_OFFSETS], ids=["epoch", "commit"])
def test_a_pool_without_any_whole_record_is_corrupted(copy_of: CopyOf, state: State, offsets: tuple[int, int]):
    directory = copy_of(state)
    for offset in offsets:
        flip(directory / "pool.holdfast", offset + 9)
    refuses(directory, Corrupted, f"pool.holdfast at offset {offsets[0]}")
    verify_names(directory, f"pool.holdfast at offset {offsets[0]}")


@pytest.mark.parametrize("state", [closed_cleanly, died_in_step_six], ids=lambda state: state.__name__)
def test_a_lost_commit_record_whose_dense_state_is_there_is_corruption_and_no_older_step(copy_of: CopyOf, state: State):
    for field in COMMIT.fields:
        directory = copy_of(state)
        newest, _ = PoolImage(directory).newest_commit()
        flip(directory / "pool.holdfast", newest + field.offset)
        refuses(directory, Corrupted)
        verify_names(directory, "commit record")


def test_a_lost_commit_record_of_a_life_that_has_appended_is_corruption(copy_of: CopyOf):
    # The record of that life would not be believed, and rows that it overwrote would stay as they are.
    directory = copy_of(died_in_the_first_step_of_its_second_life)
    newest, commit = PoolImage(directory).newest_commit()
    assert commit["epoch"] == 2
    flip(directory / "pool.holdfast", newest + 16)
    refuses(directory, Corrupted, "log-0000 at offset", "epoch 2, whose commit record is lost")
    verify_names(directory, "log-0000 at offset", "epoch 2, whose commit record is lost")


def test_a_damaged_older_commit_record_of_a_pool_in_use_is_a_torn_one(copy_of: CopyOf, rows_at_step: dict[State, str]):
    for state in (died_in_step_six, died_in_the_first_step_of_its_second_life):
        directory = copy_of(state)
        newest, _ = PoolImage(directory).newest_commit()
        (older,) = set(COMMIT_OFFSETS) - {newest}
        flip(directory / "pool.holdfast", older + 16)
        opens(directory, 5, clean=False)
        assert digest_of_rows(directory) == rows_at_step[state]


# The log.


def test_a_flipped_bit_in_a_record_that_undoing_needs_is_found(copy_of: CopyOf):
    image = PoolImage(copy_of(died_two_steps_after_its_dense_state))
    needed = [record for record in image.records_backwards() if record["step"] > 3]
    assert [record["step"] for record in needed] == [5, 5, 4, 4]
    for record in needed:
        at = LABEL + record["position"] % LOG_BYTES
        payload = [at + RECORD.size + SECTION.size + 1, at + record["bytes"] - 1]
        for offset in [at + field.offset for field in RECORD.fields] + payload:
            directory = copy_of(died_two_steps_after_its_dense_state)
            flip(directory / "log-0000", offset)
            refuses(directory, Corrupted, f"log-0000 at offset {at}", "rolled back to step 3")
            verify_names(directory, f"log-0000 at offset {at}")


def test_a_flipped_bit_in_the_payload_of_a_record_in_flight_is_found(copy_of: CopyOf):
    for state in (died_in_step_six, died_two_steps_after_its_dense_state, died_in_the_first_step_of_its_second_life):
        for record in PoolImage(copy_of(state)).records_forwards():
            at = LABEL + record["position"] % LOG_BYTES
            for offset in (at + RECORD.size, at + RECORD.size + SECTION.size * 2, at + record["bytes"] - 1):
                directory = copy_of(state)
                flip(directory / "log-0000", offset)
                refuses(directory, Corrupted, f"log-0000 at offset {at}", "payload")
                verify_names(directory, f"log-0000 at offset {at}")


def test_damage_to_records_that_nothing_needs_is_not_looked_at(copy_of: CopyOf, rows_at_step: dict[State, str]):
    image = PoolImage(copy_of(closed_cleanly))
    for record in image.records_backwards():
        directory = copy_of(closed_cleanly)
        flip(directory / "log-0000", LABEL + record["position"] % LOG_BYTES + 40)
        opens(directory, 5, clean=True)
        assert digest_of_rows(directory) == rows_at_step[closed_cleanly]


@pytest.mark.parametrize(
    ("field", "value"),
    [("table", 3), ("num_rows", 1 << 40), ("rows_offset", 1 << 40), ("weights_offset", 0), ("state_offset", 64)],
)
def test_a_section_that_does_not_fit_its_table_is_found_even_where_checksums_hold(
    copy_of: CopyOf, field: str, value: int
):
    directory = copy_of(died_in_step_six)
    record = next(PoolImage(directory).records_forwards())
    at = LABEL + record["position"] % LOG_BYTES
    log = bytearray((directory / "log-0000").read_bytes())
    struct.pack_into("<" + SECTION.field(field).code, log, at + RECORD.size + SECTION.field(field).offset, value)
    rewrite_record(log, record, PoolImage(directory).seed)
    (directory / "log-0000").write_bytes(log)
    refuses(directory, Corrupted, f"log-0000 at offset {at}")


def test_rows_out_of_order_or_beyond_the_table_are_found_even_where_checksums_hold(copy_of: CopyOf):
    for row in (50, 1 << 40):
        directory = copy_of(died_in_step_six)
        image = PoolImage(directory)
        record = next(image.records_forwards())
        at = LABEL + record["position"] % LOG_BYTES
        log = bytearray((directory / "log-0000").read_bytes())
        struct.pack_into("<Q", log, at + image.sections(record)[0]["rows_offset"], row)
        rewrite_record(log, record, PoolImage(directory).seed)
        (directory / "log-0000").write_bytes(log)
        refuses(directory, Corrupted, f"log-0000 at offset {at}", "out of order")


def rewrite_record(log: bytearray, record: dict[str, int], seed: int) -> None:
    """Makes the checksums of a changed record right again."""
    at = LABEL + record["position"] % LOG_BYTES
    payload = bytes(log[at + RECORD.size : at + record["bytes"]])
    struct.pack_into("<I", log, at + RECORD.field("payload_crc").offset, crc32c(payload, seed))
    header = bytearray(log[at : at + RECORD.size])
    RECORD.seal(header, seed=seed)
    log[at : at + RECORD.size] = header


# Dense slots.


@pytest.mark.parametrize("slot", [0, 1])
def test_a_flipped_bit_in_either_dense_slot_of_a_closed_pool_is_found(copy_of: CopyOf, slot: int):
    header = PoolImage(copy_of(closed_cleanly)).slot(slot)
    assert header is not None
    payload = [
        PAYLOAD_OFFSET,
        PAYLOAD_OFFSET + header["structure_bytes"],
        PAYLOAD_OFFSET + header["structure_bytes"] + 70,
    ]
    for offset in [field.offset for field in DENSE.fields] + payload:
        directory = copy_of(closed_cleanly)
        flip(directory / f"dense-{slot}", offset)
        refuses(directory, Corrupted, f"dense-{slot} at offset 0")
        verify_names(directory, f"dense-{slot} at offset 0")


@pytest.mark.parametrize(
    "state", [died_in_step_six, died_two_steps_after_its_dense_state], ids=lambda state: state.__name__
)
def test_a_flipped_bit_in_the_payload_of_a_dense_slot_is_found_after_a_crash_too(copy_of: CopyOf, state: State):
    for slot in range(2):
        directory = copy_of(state)
        flip(directory / f"dense-{slot}", PAYLOAD_OFFSET + 10)
        refuses(directory, Corrupted, f"dense-{slot} at offset 0", "payload")
        verify_names(directory, f"dense-{slot} at offset 0")


def test_a_damaged_header_of_the_newest_slot_after_a_crash_is_a_torn_one_and_the_older_state_is_exact(copy_of: CopyOf):
    directory = copy_of(died_in_step_six)
    image = PoolImage(directory)
    flip(directory / f"dense-{image.newest_slot()}", DENSE.field("step").offset)
    verify_names(directory, f"dense-{image.newest_slot()} at offset 0")
    before = {(table, row): (fresh, *images) for table, row, fresh, *images in records_of_step(image, 5)}
    opens(directory, 4, clean=False)
    recovered = PoolImage(directory)
    for (table, row), (fresh, weights, state) in before.items():
        if fresh:  # what such a row has at home means nothing again
            assert row not in recovered.touched_rows(table)
            continue
        assert recovered.table_file(table, "weights")[row * len(weights) :][: len(weights)] == weights
        assert recovered.table_file(table, "state")[row * len(state) :][: len(state)] == state


def test_a_lost_dense_state_with_which_a_life_began_is_corruption(copy_of: CopyOf):
    # What takes rows back behind the beginning of a life was given up then.
    directory = copy_of(died_in_the_first_step_of_its_second_life)
    flip(directory / f"dense-{PoolImage(directory).newest_slot()}", DENSE.field("step").offset)
    refuses(directory, Corrupted, "log-0000 at offset", "begins at the end of step 5, whose dense state is lost")
    verify_names(directory, "log-0000 at offset", "rolled back to step 4")


@pytest.mark.parametrize("saves_dense", [True, False])
def test_what_a_closed_pool_had_at_its_end_and_lost_to_zeros_is_missed(pool_root: Path, saves_dense: bool):
    writer = Writer(pool_root / "pool", saves_dense=saves_dense)
    writer.steps(5)
    writer.pool.close()
    image = PoolImage(pool_root / "pool")
    name, offset, size = ("pool.holdfast", image.newest_commit()[0], COMMIT.size)
    if saves_dense:
        name, offset, size = (f"dense-{image.newest_slot()}", 0, DENSE.size)
    data = bytearray((pool_root / "pool" / name).read_bytes())
    data[offset : offset + size] = bytes(size)
    (pool_root / "pool" / name).write_bytes(data)
    refuses(pool_root / "pool", Corrupted, f"{name} at offset {offset}", "step 5, where the pool was closed, is lost")
    verify_names(pool_root / "pool", f"{name} at offset {offset}", "is lost")


def records_of_step(image: PoolImage, step: int):
    return [
        row for record in image.records_backwards() if record["step"] == step for row in image.before_images(record)
    ]


def test_two_damaged_dense_slots_are_corruption(copy_of: CopyOf):
    for state in STATES:
        directory = copy_of(state)
        for slot in range(2):
            flip(directory / f"dense-{slot}", DENSE.field("step").offset)
        refuses(directory, Corrupted, "dense-")
        verify_names(directory, "dense-0 at offset 0")
        verify_names(directory, "dense-1 at offset 0")


# Truncated and missing files.


def files_that_matter() -> list[str]:
    tables = [f"shard-0000/table-{i:04}.{what}" for i in range(3) for what in ("weights", "state", "touched")]
    return ["log-0000", "dense-0", "dense-1", *tables]


@pytest.mark.parametrize("name", files_that_matter())
@pytest.mark.parametrize("state", [closed_cleanly, died_in_step_six], ids=lambda state: state.__name__)
def test_a_truncated_file_is_corruption(copy_of: CopyOf, state: State, name: str):
    size = (copy_of(state) / name).stat().st_size
    # Behind a slot's payload there are only zeros up to the block's end.
    lengths = {0, 1, BLOCK - 1, BLOCK, BLOCK + 100} if name.startswith("dense") else {0, 1, size // 2, size - 1}
    for length in lengths:
        directory = copy_of(state)
        os.truncate(directory / name, length)
        refuses(directory, Corrupted, name)
        verify_names(directory, name)


def test_a_truncated_superblock_is_corrupted_and_one_without_a_header_is_no_pool(copy_of: CopyOf):
    size = (copy_of(closed_cleanly) / "pool.holdfast").stat().st_size
    for length in (HEADER.size, BLOCK, TABLES_OFFSET - 1, TABLES_OFFSET, TABLES_OFFSET + 3 * TABLE.size - 1):
        assert length < size
        directory = copy_of(closed_cleanly)
        os.truncate(directory / "pool.holdfast", length)
        refuses(directory, Corrupted, "pool.holdfast", f"truncated to {length} bytes")
        verify_names(directory, f"truncated to {length} bytes")
    for length in (0, 8, HEADER.size - 1):
        directory = copy_of(closed_cleanly)
        os.truncate(directory / "pool.holdfast", length)
        refuses(directory, FormatMismatch, "pool.holdfast")


def test_a_superblock_that_cannot_be_read_says_what_to_do_where_its_copy_holds(copy_of: CopyOf):
    damaged: list[tuple[Callable[[bytes], bytes], type[PoolError]]] = [
        (lambda data: bytes(len(data)), FormatMismatch),
        (lambda data: b"something else", FormatMismatch),
        (lambda data: data[:BLOCK], Corrupted),
        (lambda data: data[: HEADER.size // 2] + b"?" + data[HEADER.size // 2 + 1 :], Corrupted),
    ]
    for damage, error in damaged:
        directory = copy_of(closed_cleanly)
        file = directory / "pool.holdfast"
        file.write_bytes(damage(file.read_bytes()))
        refuses(directory, error, "pool.holdfast", "`holdfast verify --repair` makes it anew from pool.copy")
        (directory / "pool.copy").write_bytes(b"")
        with pytest.raises(error) as raised:
            Pool(directory)
        assert "--repair" not in str(raised.value)


@pytest.mark.parametrize("name", files_that_matter())
def test_a_missing_file_is_corruption_and_is_not_made_anew(copy_of: CopyOf, name: str):
    directory = copy_of(closed_cleanly)
    (directory / name).unlink()
    refuses(directory, Corrupted, name)
    verify_names(directory, name)


def test_a_superblock_on_its_way_is_none(copy_of: CopyOf):
    directory = copy_of(closed_cleanly)
    (directory / "pool.holdfast").rename(directory / "pool.holdfast.new")
    with pytest.raises(PoolNotFound):
        _core.Reader(str(directory))
    refuses(directory, Corrupted, "no pool.holdfast")


# Foreign and future pools.


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" * 10000, bytes(30000), b"HOLDFAST"], ids=len)
def test_a_foreign_file_is_a_format_mismatch(copy_of: CopyOf, content: bytes):
    directory = copy_of(closed_cleanly)
    (directory / "pool.holdfast").write_bytes(content)
    refuses(directory, FormatMismatch, "pool.holdfast")
    verify_names(directory, "pool.holdfast")


def test_a_newer_version_is_named_even_if_its_header_is_laid_out_otherwise(copy_of: CopyOf):
    directory = copy_of(closed_cleanly)
    put(directory / "pool.holdfast", 0, HEADER, version=6)
    refuses(directory, FormatMismatch, "format version 6", "use the holdfast that wrote it")
    flip(directory / "pool.holdfast", 200)
    refuses(directory, FormatMismatch, "format version 6")


@pytest.mark.parametrize(
    ("values", "word"),
    [({"num_shards": 2}, "shards"), ({"num_writers": 2}, "shards"), ({"row_checksums": 2}, "row checksums")],
)
def test_what_the_format_has_room_for_and_this_build_does_not_know_is_a_format_mismatch(
    copy_of: CopyOf, values: dict[str, int], word: str
):
    directory = copy_of(closed_cleanly)
    put(directory / "pool.holdfast", 0, HEADER, **values)
    refuses(directory, FormatMismatch, "pool.holdfast", word)


def test_an_unknown_id_map_is_a_format_mismatch(copy_of: CopyOf):
    directory = copy_of(closed_cleanly)
    put(directory / "pool.holdfast", PoolImage.table_offset(1), TABLE, id_map=1)
    refuses(directory, FormatMismatch, f"pool.holdfast at offset {PoolImage.table_offset(1)}", "id map")


def test_unknown_keys_are_a_format_mismatch(copy_of: CopyOf):
    directory = copy_of(closed_cleanly)
    put(directory / "pool.holdfast", PoolImage.table_offset(1), TABLE, keys=2)
    refuses(directory, FormatMismatch, f"pool.holdfast at offset {PoolImage.table_offset(1)}", "keys")


@pytest.mark.parametrize(
    "values",
    [
        {"num_embeddings": 0},
        {"keys": 1},  # whose ids are row numbers
        {"id_map": 2},  # without state for keys
        {"num_embeddings": (1 << 40) + 1},
        {"embedding_dim": 0},
        {"embedding_dim": 4097},
        {"dtype": 3},
        {"optimizer": 5},
        {"state_floats": 2},
        {"pooling": 2},
    ],
    ids=str,
)
def test_an_impossible_table_is_corruption_even_where_checksums_hold(copy_of: CopyOf, values: dict[str, int]):
    directory = copy_of(closed_cleanly)
    put(directory / "pool.holdfast", PoolImage.table_offset(0), TABLE, **values)
    refuses(directory, Corrupted)


def test_more_tables_than_the_file_holds_is_corruption(copy_of: CopyOf):
    directory = copy_of(closed_cleanly)
    put(directory / "pool.holdfast", 0, HEADER, num_tables=1 << 31)
    refuses(directory, Corrupted, "pool.holdfast")


def test_touched_bits_beyond_the_last_row_are_found_by_verify(copy_of: CopyOf):
    directory = copy_of(closed_cleanly)
    flip(directory / "shard-0000/table-0000.touched", 7, bit=7)
    verify_names(directory, "table-0000.touched at offset 0")


# A machine that went down.


def test_a_process_level_pool_that_was_open_when_the_machine_went_down_is_not_trusted(copy_of: CopyOf):
    directory = copy_of(died_in_step_six)
    newest, _ = PoolImage(directory).newest_epoch()
    data = bytearray((directory / "pool.holdfast").read_bytes())
    data[newest + 16 : newest + 32] = bytes(16)
    record = bytearray(data[newest : newest + EPOCH.size])
    EPOCH.seal(record, seed=seed_of((directory / "pool.holdfast").read_bytes()))
    data[newest : newest + EPOCH.size] = record
    (directory / "pool.holdfast").write_bytes(data)
    refuses(directory, UntrustedPool, "trust_after_reboot")
    with pytest.raises(UntrustedPool, match="holdfast train --trust-after-reboot"):
        take_snapshot(directory, directory.parent / "snapshot")
    with Pool(directory, trust_after_reboot=True) as pool:
        assert pool.step == 5


def test_an_error_message_names_a_path_that_exists(copy_of: CopyOf):
    directory = copy_of(closed_cleanly)
    flip(directory / "dense-0", PAYLOAD_OFFSET)
    with pytest.raises(Corrupted) as raised:
        Pool(directory)
    found = re.match(r"(/\S+) at offset (\d+): ", str(raised.value))
    assert found is not None
    assert Path(found[1]).is_file()
