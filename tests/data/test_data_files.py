"""Converting text to Parquet, and writing generated samples to files."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest

from holdfast.data import (
    CriteoTsvConfig,
    CriteoTsvSource,
    Loader,
    ParquetSource,
    SyntheticSource,
    convert_criteo,
    converted_config,
    criteo_shape,
    uniform_shape,
    write_synthetic,
    written_config,
)
from holdfast.data.hashing import hash_values
from holdfast.data.text_keys import text_keys
from holdfast.errors import ConfigError, DataError


def batches_of(source, batch_size=97):
    with Loader(source, batch_size=batch_size, seed=0, shuffle=False) as loader:
        return list(loader.once())


def messy_text(num_lines):
    """Criteo-shaped lines with missing fields everywhere, negative numbers, and a short last line."""
    numbers = np.random.Generator(np.random.Philox(key=5))
    lines = []
    for _ in range(num_lines):
        integers = [str(number) if number > -4 else "" for number in numbers.integers(-9, 70_000, 13)]
        categories = [f"{number:08x}" if number % 5 else "" for number in numbers.integers(0, 1 << 32, 26)]
        lines.append("\t".join([str(numbers.integers(0, 2)), *integers, *categories]))
    lines.insert(num_lines // 2, "")
    return "\n".join([*lines, "1\t5\t\t7"])


@pytest.mark.parametrize("row_group_samples", [100, 256, 16_384])
def test_text_and_its_converted_parquet_give_the_same_batches(tmp_path, assert_same_batch, row_group_samples):
    path = tmp_path / "part.tsv"
    path.write_text(messy_text(1000))
    config = CriteoTsvConfig(
        paths=(path, path),
        num_embeddings=1000,
        num_embeddings_by_column={"C3": 7},
        block_lines=64,
        missing_dense_value=-1.0,
    )
    seen = []
    summary = convert_criteo(
        config,
        tmp_path / "part.parquet",
        row_group_samples=row_group_samples,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert (summary.num_samples, summary.bad_rows.count) == (2002, 0)
    assert seen[-1] == (2002, 2002)
    parquet = ParquetSource(converted_config(config, [tmp_path / "part.parquet"]))
    assert parquet.block_sizes.tolist()[:-1] == [row_group_samples] * (2001 // row_group_samples)
    left, right = batches_of(CriteoTsvSource(config)), batches_of(parquet)
    assert len(left) == len(right) == 21
    for ours, theirs in zip(left, right, strict=True):
        assert_same_batch(ours, theirs)


def test_text_categories_convert_too(tmp_path, assert_same_batch):
    path = tmp_path / "part.tsv"
    path.write_text("1\t3\tshoes\n0\t\t\n1\t1\t\u00e9t\u00e9\n", encoding="utf-8")
    config = CriteoTsvConfig(paths=(path,), dense=("n",), categorical=("item",), categorical_encoding="text")
    convert_criteo(config, tmp_path / "part.parquet")
    parquet = ParquetSource(converted_config(config, [tmp_path / "part.parquet"]))
    assert_same_batch(batches_of(CriteoTsvSource(config))[0], batches_of(parquet)[0])


def test_real_rows_convert_to_the_same_batches(criteo_dir, tmp_path, assert_same_batch):
    config = CriteoTsvConfig(paths=(criteo_dir / "train.tsv",), num_embeddings=50_000)
    convert_criteo(config, tmp_path / "train.parquet")
    parquet = ParquetSource(converted_config(config, [tmp_path / "train.parquet"]))
    for left, right in zip(batches_of(CriteoTsvSource(config), 1024), batches_of(parquet, 1024), strict=True):
        assert_same_batch(left, right)


def test_converting_keeps_values_and_nulls(tmp_path):
    path = tmp_path / "part.tsv"
    path.write_text("1\t-3\t\tff\t\n0\t\t4\t\tffffffffffffffff\n")
    config = CriteoTsvConfig(paths=(path,), dense=("I1", "I2"), categorical=("C1", "C2"))
    convert_criteo(config, tmp_path / "part.parquet")
    assert pq.read_table(tmp_path / "part.parquet").to_pydict() == {
        "label": [1, 0],
        "I1": [-3, None],
        "I2": [None, 4],
        "C1": [255, None],
        "C2": [None, -1],
    }


def test_bad_lines_stop_or_are_counted(tmp_path):
    path, out = tmp_path / "part.tsv", tmp_path / "part.parquet"
    path.write_text(messy_text(50) + "\n2\n0\n")
    with pytest.raises(DataError, match=r"part\.tsv, line 5[0-9]"):
        convert_criteo(CriteoTsvConfig(paths=(path,)), out)
    assert [entry.name for entry in tmp_path.iterdir()] == ["part.tsv"]
    summary = convert_criteo(CriteoTsvConfig(paths=(path,), on_bad_row="skip"), out)
    # the short line is no longer the last, and a label of 2 is none
    assert (summary.num_samples, summary.bad_rows.count) == (51, 2)


def test_a_conversion_never_takes_the_place_of_what_it_reads(tmp_path):
    path, link = tmp_path / "day.tsv", tmp_path / "day.parquet"
    path.write_text(text := messy_text(5))
    link.symlink_to(path)
    for out in (path, link):
        with pytest.raises(ConfigError, match=f"{out.name} is one of the files that are read; name another"):
            convert_criteo(CriteoTsvConfig(paths=(path,)), out, overwrite=True)
    assert (path.read_text(), link.is_symlink()) == (text, True)


def test_output_is_not_overwritten_unasked(tmp_path):
    config = uniform_shape(num_samples=10, num_tables=2, rows_per_table=5)
    out = tmp_path / "out.parquet"
    write_synthetic(config, out)
    with pytest.raises(ConfigError, match=r"out\.parquet is there already"):
        write_synthetic(config, out)
    write_synthetic(config, out, 4, overwrite=True)
    assert pq.read_metadata(out).num_rows == 4
    with pytest.raises(ConfigError, match="no directory"):
        write_synthetic(config, tmp_path / "absent" / "out.tsv")
    with pytest.raises(ConfigError, match="suffix"):
        write_synthetic(config, tmp_path / "out.csv")


@pytest.mark.parametrize("lookups", [1, (1, 3, 2)])
def test_written_parquet_gives_the_generated_samples(tmp_path, assert_same_batch, lookups):
    config = replace(uniform_shape(num_samples=1000, num_tables=3, rows_per_table=50, num_dense=2), lookups=lookups)
    seen = []
    written = write_synthetic(
        config, tmp_path / "out.parquet", row_group_samples=300, progress=lambda *done: seen.append(done)
    )
    assert written == 1000
    assert seen == [(300, 1000), (600, 1000), (900, 1000), (1000, 1000)]
    parquet = ParquetSource(written_config(config, [tmp_path / "out.parquet"]))
    for left, right in zip(batches_of(SyntheticSource(config)), batches_of(parquet), strict=True):
        assert_same_batch(left, right)


@pytest.mark.parametrize("drift", [0.0, 0.1])
def test_written_texts_give_the_generated_samples_with_their_keys(tmp_path, drift):
    config = replace(
        uniform_shape(num_samples=1000, num_tables=3, rows_per_table=50, num_dense=2), lookups=(1, 3, 1), drift=drift
    )
    write_synthetic(config, tmp_path / "out.parquet", row_group_samples=300, texts=True)
    parquet = ParquetSource(written_config(config, [tmp_path / "out.parquet"], texts=True))
    for left, right in zip(batches_of(SyntheticSource(config)), batches_of(parquet), strict=True):
        assert np.array_equal(left.dense, right.dense)
        assert np.array_equal(left.labels, right.labels)
        assert np.array_equal(left.features.lengths(), right.features.lengths())
        bounds = left.features.offsets()[:: left.size].tolist()
        for number, (begin, end) in enumerate(pairwise(bounds), 1):
            ids = left.features.values()[begin:end].numpy().view(np.uint64)
            texts = [f"C{number}-{value:016x}" for value in ids.tolist()]
            assert text_keys(texts).tolist() == right.features.values()[begin:end].tolist()
    with pytest.raises(ConfigError, match=r"write \.parquet"):
        write_synthetic(replace(config, lookups=1, drift=0.0), tmp_path / "out.tsv", texts=True)


def test_written_text_gives_the_generated_samples_with_hashed_ids(tmp_path):
    config = criteo_shape(num_samples=5000, scale=0.01)
    write_synthetic(config, tmp_path / "out.tsv")
    text = CriteoTsvSource(CriteoTsvConfig(paths=(tmp_path / "out.tsv",), num_embeddings=300))
    generated, read = batches_of(SyntheticSource(config), 5000)[0], batches_of(text, 5000)[0]
    assert np.array_equal(generated.dense, read.dense)
    assert np.array_equal(generated.labels, read.labels)
    assert np.array_equal(hash_values(generated.features.values().numpy(), 300), read.features.values().numpy())


def test_written_text_is_plain(tmp_path):
    config = uniform_shape(num_samples=500, num_tables=2, rows_per_table=1 << 32, num_dense=2)
    write_synthetic(config, tmp_path / "out.tsv")
    drawn = SyntheticSource(config).draw(0, 500)
    expected = [
        f"{int(label)}\t{counts[0]}\t{counts[1]}\t{first[0]:08x}\t{second[0]:08x}\n"
        for label, counts, first, second in zip(drawn.labels, drawn.counts, *drawn.ids, strict=True)
    ]
    assert (tmp_path / "out.tsv").read_text() == "".join(expected)


def test_text_cannot_hold_bags_of_several_ids(tmp_path):
    config = uniform_shape(num_samples=5, num_tables=2, rows_per_table=5, lookups_per_bag=2)
    with pytest.raises(ConfigError, match="lookups"):
        write_synthetic(config, tmp_path / "out.tsv")
