"""The files of a pool are what docs/FORMAT.md says: read with its tables and an independent checksum."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from format_doc import ENUMS, MAGICS, crc32c
from holdfast import EmbeddingBagCollection, EmbeddingBagConfig, Pool, _core
from holdfast.state import state_tree
from pool_image import BLOCK, COMMIT, EPOCH, HEADER, LINE, PAYLOAD_OFFSET, RECORD, SECTION, TABLE, PoolImage, up
from tiny_pools import BATCH, LOG_BYTES, SEED, TABLES, Writer, dense_tree, image_of, rows_of


@pytest.fixture
def two_steps(pool_root: Path) -> Path:
    """A pool after two steps, closed."""
    writer = Writer(pool_root / "pool")
    writer.steps(2)
    writer.pool.close()
    return pool_root / "pool"


def boot_id() -> bytes:
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", ""))


def test_the_directory_holds_the_documents_files_and_no_others(two_steps: Path):
    names = {str(path.relative_to(two_steps)) for path in two_steps.rglob("*") if path.is_file()}
    tables = {f"shard-0000/table-{i:04}.{what}" for i in range(3) for what in ("weights", "state", "touched")}
    assert names == {"pool.holdfast", "pool.copy", "log-0000", "dense-0", "dense-1", "lock"} | tables


def test_the_header_and_the_table_records_say_what_the_pool_was_made_with(two_steps: Path):
    image = PoolImage(two_steps)
    assert HEADER.holds(image.superblock)
    assert len(image.superblock) == up(image.table_offset(len(TABLES)), BLOCK)
    header = image.header
    assert (header["magic"], header["version"], header["seed"]) == (MAGICS["pool_magic"], 5, SEED)
    assert (header["num_tables"], header["num_shards"], header["num_writers"]) == (len(TABLES), 1, 1)
    assert (header["log_bytes"], header["row_checksums"], header["level"]) == (LOG_BYTES, 0, ENUMS["Level"]["process"])
    optimizers = ["rowwise_adagrad", "rowwise_adagrad", "adam"]
    for number, (table, optimizer) in enumerate(zip(TABLES, optimizers, strict=True)):
        record = image.tables[number]
        assert TABLE.holds(image.superblock, image.table_offset(number), seed=image.seed)
        assert record["magic"] == MAGICS["table_magic"]
        assert record["name"].rstrip(b"\0").decode() == table.name
        assert (record["num_embeddings"], record["embedding_dim"]) == (table.num_embeddings, table.embedding_dim)
        assert record["dtype"] == ENUMS["RowDtype"][table.data_type.replace("fp", "f")]
        assert record["pooling"] == ENUMS["Pooling"][table.pooling]
        assert record["optimizer"] == ENUMS["RowOptimizer"][optimizer]
        assert record["state_floats"] == (2 * table.embedding_dim if optimizer == "adam" else 1)
        assert record["id_map"] == ENUMS["IdMap"]["identity"]
        bound = struct.unpack("<f", struct.pack("<f", table.num_embeddings**-0.5))[0]
        assert (record["init_low"], record["init_high"]) == (-bound, bound)


def test_reserved_bytes_and_what_follows_a_record_in_its_block_are_zeros(two_steps: Path):
    image = PoolImage(two_steps)
    covered = bytearray(image.superblock)
    for layout, offsets in (
        (HEADER, [0]),
        (EPOCH, [4096, 8192]),
        (COMMIT, [12288, 16384]),
        (TABLE, [image.table_offset(i) for i in range(3)]),
    ):
        for offset in offsets:
            for field in layout.fields:
                if field.name not in ("reserved", "padding", "group_uuid"):
                    covered[offset + field.offset : offset + field.offset + field.size] = bytes(field.size)
    assert not any(covered)


def test_every_opening_counts_an_epoch_and_a_clean_close_says_so(pool_root: Path):
    directory = pool_root / "pool"
    for life in (1, 2, 3):
        writer = Writer(directory)
        epoch = PoolImage(directory).newest_epoch()[1]
        assert (epoch["epoch"], epoch["clean"], epoch["boot_id"]) == (life, 0, boot_id())
        writer.step()
        writer.pool.close()
        epoch = PoolImage(directory).newest_epoch()[1]
        assert (epoch["epoch"], epoch["clean"]) == (life, 1)
        commit = PoolImage(directory).newest_commit()[1]
        assert (commit["epoch"], commit["step"]) == (life, life)


def test_the_newest_commit_record_counts_steps_samples_and_updates(two_steps: Path):
    image = PoolImage(two_steps)
    _, commit = image.newest_commit()
    assert (commit["epoch"], commit["step"], commit["cursor"], commit["row_updates"]) == (1, 2, 2 * BATCH, 2)
    records = list(image.records_backwards())
    assert commit["last_record"] == records[0]["position"]
    assert commit["log_head"] == records[0]["position"] + records[0]["bytes"]
    assert commit["log_tail"] == records[1]["position"], "step 1 was durable: its two records were given up"
    assert list(image.records_forwards()) == []


def test_the_log_is_one_chain_of_aligned_records_from_the_newest_to_the_first(two_steps: Path):
    image = PoolImage(two_steps)
    records = list(image.records_backwards())[::-1]
    assert [record["step"] for record in records] == [1, 1, 2, 2], "a record for each collection's forward"
    assert [record["num_sections"] for record in records] == [2, 1, 2, 1]
    assert [record["previous_step"] for record in records] == [0, 1, 1, 2]
    position = 0
    for record in records:
        assert (record["position"], record["epoch"], record["bytes"] % LINE) == (position, 1, 0)
        offset = RECORD.size + SECTION.size * record["num_sections"]
        for section in image.sections(record):
            table = image.tables[section["table"]]
            assert (section["shard"], section["rows_offset"]) == (0, offset)
            offset += up(section["num_rows"] * 8, LINE)
            assert section["weights_offset"] == offset
            weight_bytes = table["embedding_dim"] * image.element_bytes(section["table"])
            offset += up(section["num_rows"] * weight_bytes, LINE)
            assert section["state_offset"] == offset
            offset += up(section["num_rows"] * table["state_floats"] * 4, LINE)
        assert record["bytes"] == offset
        position += record["bytes"]


def test_a_record_holds_its_rows_as_they_were_before_its_step(pool_root: Path):
    writer = Writer(pool_root / "pool")
    before = {}
    for step in (1, 2, 3):
        before[step] = [rows_of(pool_root / "pool", table) for table in range(3)]
        writer.step()
    writer.pool.close()
    image = PoolImage(pool_root / "pool")
    touched = [set[int]() for _ in range(3)]
    for record in list(image.records_backwards())[::-1]:
        seen = list(image.before_images(record))
        rows = [(table, row) for table, row, *_ in seen]
        assert rows == sorted(set(rows)), "ascending, each once"
        for table, row, untouched, weights, state in seen:
            all_weights, all_state = before[record["step"]][table]
            assert weights == all_weights[row * len(weights) :][: len(weights)]
            assert state == all_state[row * len(state) :][: len(state)]
            assert untouched == (row not in touched[table])
            touched[table].add(row)
    assert [image.touched_rows(table) for table in range(3)] == touched


def test_the_table_files_hold_the_touched_rows_and_nothing_else_counts(two_steps: Path):
    image = PoolImage(two_steps)
    reader = _core.Reader(str(two_steps))
    for table, config in enumerate(TABLES):
        weights, state = rows_of(two_steps, table)
        weight_bytes = config.embedding_dim * image.element_bytes(table)
        state_bytes = image.tables[table]["state_floats"] * 4
        home_weights, home_state = image.table_file(table, "weights"), image.table_file(table, "state")
        assert len(home_weights) == config.num_embeddings * weight_bytes
        assert len(home_state) == config.num_embeddings * state_bytes
        assert len(image.table_file(table, "touched")) == up(config.num_embeddings, 64) // 8
        touched = image.touched_rows(table)
        assert sorted(touched) == reader.touched_rows(table, 0, 1000)
        for row in range(config.num_embeddings):
            of_weights = slice(row * weight_bytes, (row + 1) * weight_bytes)
            of_state = slice(row * state_bytes, (row + 1) * state_bytes)
            if row in touched:
                assert home_weights[of_weights] == weights[of_weights]
                assert home_state[of_state] == state[of_state]
            else:
                assert not any(home_weights[of_weights]), "a hole; its value is the initial one"
                assert any(weights[of_weights])
                assert not any(state[of_state])


def test_the_two_dense_slots_hold_the_states_of_the_last_two_steps(two_steps: Path):
    image = PoolImage(two_steps)
    steps = {}
    for i in range(2):
        header = image.slot(i)
        assert header is not None
        steps[header["step"]] = i
        assert (header["epoch"], header["cursor"], header["row_updates"]) == (1, header["step"] * BATCH, header["step"])
        data = image.slots[i]
        structure = data[PAYLOAD_OFFSET:][: header["structure_bytes"]]
        tensors_at = PAYLOAD_OFFSET + up(header["structure_bytes"], LINE)
        assert not any(data[PAYLOAD_OFFSET + len(structure) : tensors_at])
        assert len(data) == up(tensors_at + header["tensors_bytes"], BLOCK)
        assert json.loads(structure)["tensors"] == [["float32", [5, 3]], ["int64", [4]]]
        weight = torch.frombuffer(bytearray(data[tensors_at : tensors_at + 60]), dtype=torch.float32)
        bias = torch.frombuffer(bytearray(data[tensors_at + 64 : tensors_at + 96]), dtype=torch.int64)
        expected = dense_tree(header["step"])
        assert torch.equal(weight.view(5, 3), expected["weight"])
        assert torch.equal(bias, expected["bias"])
        tree = state_tree.unpack(structure, data[tensors_at : tensors_at + header["tensors_bytes"]])
        assert tree["step"] == header["step"]
    assert sorted(steps) == [1, 2]


def test_a_dense_slot_that_is_being_written_is_never_the_newest(pool_root: Path):
    writer = Writer(pool_root / "pool", dense_interval=100)
    writer.steps(3)
    image = PoolImage(pool_root / "pool")
    assert [image.slot(i) is None for i in range(2)].count(True) == 1
    header = image.slot(image.newest_slot())
    assert header is not None
    assert header["step"] == 0
    writer.pool.close()


def test_a_row_in_flight_follows_the_chain_forwards(pool_root: Path):
    writer = Writer(pool_root / "pool")
    writer.steps(3)
    writer.update()
    image = PoolImage(image_of(writer, pool_root / "image"))
    writer.pool.close()
    assert [record["step"] for record in image.records_forwards()] == [4, 4]


def test_records_of_many_turns_of_the_ring_are_told_apart(pool_root: Path):
    writer = Writer(pool_root / "pool")
    writer.steps(60)
    writer.update()
    image = PoolImage(image_of(writer, pool_root / "image"))
    writer.pool.close()
    _, commit = image.newest_commit()
    assert commit["log_head"] > 5 * len(image.log)
    assert [record["step"] for record in image.records_forwards()] == [61, 61]
    backwards = list(image.records_backwards())
    assert backwards[0]["step"] == backwards[1]["step"] == 60
    for record in backwards:
        assert record["position"] % len(image.log) + record["bytes"] <= len(image.log), "in one piece"


def test_a_log_that_grew_keeps_its_positions(pool_root: Path):
    config = EmbeddingBagConfig(num_embeddings=1 << 20, embedding_dim=64, name="t", feature_names=["a"])
    with Pool(pool_root / "pool") as pool:
        emb = EmbeddingBagCollection(pool, [config])
        for size in (1000, 20000, 1000):
            ids = torch.randint(0, 1 << 20, (size,))
            emb({"a": (ids, torch.arange(size + 1))}).values().sum().backward()
            emb.optimizer.step()
            pool.commit(size)
    image = PoolImage(pool_root / "pool")
    assert len(image.log) > image.header["log_bytes"]
    assert len(image.log) % BLOCK == 0
    assert len(list(image.records_backwards())) >= 1
    Pool(pool_root / "pool").close()


def test_a_table_of_a_hundred_gigabytes_costs_no_disk_until_rows_are_touched(pool_root: Path):
    config = EmbeddingBagConfig(num_embeddings=1_600_000_000, embedding_dim=16, name="t", feature_names=["a"])
    with Pool(pool_root / "pool", log_bytes=1 << 16) as pool:
        emb = EmbeddingBagCollection(pool, [config])
        emb({"a": (torch.tensor([0, 1_599_999_999]), torch.arange(3))}).values().sum().backward()
        emb.optimizer.step()
        pool.commit(2)
    files = [path for path in (pool_root / "pool").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) > 100e9
    assert sum(path.stat().st_blocks * 512 for path in files) < 1 << 20
    assert _core.Reader(str(pool_root / "pool")).touched_rows(0, 0, 10) == [0, 1_599_999_999]


def test_the_checksum_of_a_payload_covers_its_gaps(two_steps: Path):
    image = PoolImage(two_steps)
    for record in image.records_backwards():
        offset = record["position"] % len(image.log)
        payload = image.log[offset + RECORD.size : offset + record["bytes"]]
        assert crc32c(payload, image.seed) == record["payload_crc"]
        covered = bytearray(payload)
        for section in image.sections(record):
            table = image.tables[section["table"]]
            for at, width in (
                (section["rows_offset"], 8),
                (section["weights_offset"], table["embedding_dim"] * image.element_bytes(section["table"])),
                (section["state_offset"], table["state_floats"] * 4),
            ):
                length = section["num_rows"] * width
                covered[at - RECORD.size : at - RECORD.size + length] = bytes(length)
        assert not any(covered[SECTION.size * record["num_sections"] :]), "gaps are zeros"
