"""A run's texts beside their keys, each once; and texts that share a key, made here as no chance makes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import holdfast
from holdfast.data import ParquetConfig, SparseColumn
from holdfast.data.texts import write_texts
from holdfast.errors import ConfigError

PRIME_1, PRIME_2 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F  # XXH64's
MASK = (1 << 64) - 1


def xxh64_round(total: int, lane: int) -> int:
    mixed = (total + lane * PRIME_2) & MASK
    return ((mixed << 31 | mixed >> 33) & MASK) * PRIME_1 & MASK


def texts_of_one_key(count: int) -> list[bytes]:
    """Of two stripes each: whatever the first leaves in a sum of XXH64's, a word of the second takes back."""
    begin = (PRIME_1 + PRIME_2) & MASK
    goal = (xxh64_round(begin, 0) + 7 * PRIME_2) & MASK
    made = []
    for first in range(count):
        second = (goal - xxh64_round(begin, first)) * pow(PRIME_2, -1, 1 << 64) & MASK
        made.append(first.to_bytes(8, "little") + bytes(24) + second.to_bytes(8, "little") + bytes(24))
    return made


def config_of(paths: list[Path], **columns: SparseColumn) -> ParquetConfig:
    return ParquetConfig(paths=paths, label="click", sparse=columns)


def test_each_text_is_written_once_beside_its_key(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    shades = [None if number % 9 == 0 else f"shade {number}" for number in draw.zipf(1.3, 3000) % 500]
    tags = [
        None if number % 7 == 0 else [f"tag {of % 40}" for of in range(number)] for number in draw.integers(0, 50, 3000)
    ]
    paths = []
    for part in range(2):
        rows = slice(1500 * part, 1500 * (part + 1))
        table = pa.table(
            {
                "click": np.zeros(1500, np.int8),
                "shade": pa.array(shades[rows]).dictionary_encode(),
                "tags": pa.array(tags[rows], pa.list_(pa.large_string())),
                "size": np.arange(1500),
            }
        )
        paths.append(tmp_path / f"{part}.parquet")
        pq.write_table(table, paths[-1], row_group_size=400)
    columns = {name: SparseColumn(column=name, keys=True, missing_id=0) for name in ("shade", "tags", "size")}
    columns["hashed"] = SparseColumn(column="shade", num_embeddings=9)
    seen: list[tuple[int, int]] = []
    summary = write_texts(
        config_of(paths, **columns), tmp_path / "out.parquet", progress=lambda *done: seen.append(done)
    )
    written = pq.read_table(tmp_path / "out.parquet")
    assert written.schema.field("text").type == pa.string()
    wanted = {
        "shade": list(dict.fromkeys(text for text in shades if text is not None)),
        "tags": list(dict.fromkeys(text for row in tags if row is not None for text in row)),
    }
    for feature, texts in wanted.items():
        rows = written.filter(pa.compute.equal(written["feature"], feature))
        assert rows["text"].to_pylist() == texts
        assert rows["key"].to_pylist() == holdfast.text_keys(texts).tolist()
    assert summary.counts == {name: len(texts) for name, texts in wanted.items()}
    assert summary.shared == {}
    assert written.num_rows == sum(summary.counts.values())
    assert seen[-1] == (3000, 3000)


@pytest.mark.parametrize("row_group_size", [1, 3, 100])
def test_texts_that_share_a_key_are_named(row_group_size: int, tmp_path: Path) -> None:
    same = texts_of_one_key(3)
    (key,) = set(holdfast.text_keys(same).tolist())
    others = [f"other {number}".encode() for number in range(20)]
    texts = [*others[:10], same[1], same[0], *others, same[1], same[2], same[0], same[2]]
    table = pa.table(
        {"click": np.zeros(len(texts), np.int8), "a": pa.array(texts), "b": pa.array((texts[:11] * 4)[: len(texts)])}
    )
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=row_group_size)
    columns = {name: SparseColumn(column=name, keys=True) for name in ("a", "b")}
    summary = write_texts(config_of([tmp_path / "in.parquet"], **columns), tmp_path / "out.parquet")
    assert summary.counts == {"a": 23, "b": 11}
    assert {which: sorted(texts) for which, texts in summary.shared.items()} == {("a", key): sorted(same)}
    assert pq.read_table(tmp_path / "out.parquet").schema.field("text").type == pa.binary()


def test_texts_never_take_the_place_of_the_data(tmp_path: Path) -> None:
    pq.write_table(pa.table({"click": [0], "shade": ["red"]}), path := tmp_path / "in.parquet")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"in\.parquet is one of the files that are read; name another"):
        write_texts(config_of([path], shade=SparseColumn(column="shade", keys=True)), path, overwrite=True)
    assert path.read_bytes() == before


def test_a_run_without_texts_for_keys_has_none_to_write(tmp_path: Path) -> None:
    pq.write_table(pa.table({"click": [0], "shade": ["red"], "size": [5]}), tmp_path / "in.parquet")
    columns = {"shade": SparseColumn(column="shade", num_embeddings=9), "size": SparseColumn(column="size", keys=True)}
    with pytest.raises(ConfigError, match="no column with keys = true holds texts"):
        write_texts(config_of([tmp_path / "in.parquet"], **columns), tmp_path / "out.parquet")
