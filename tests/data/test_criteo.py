"""Raw Criteo text: what is read, what is tolerated, what is an error or skipped."""

from __future__ import annotations

import gzip
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.convert import convert_criteo, converted_config
from holdfast.data.criteo import CriteoTsvConfig, CriteoTsvSource
from holdfast.data.hashing import hash_values, text_values
from holdfast.data.loader import Loader
from holdfast.data.parquet import ParquetSource
from holdfast.data.text_keys import text_keys
from holdfast.data.tsv import FRONT_PAD_BYTES, TsvLayout, padded_buffer, parse_lines
from holdfast.errors import ConfigError, DataError

LAYOUT = TsvLayout(dense=("I1", "I2"), categorical=("C1", "C2", "C3"), categorical_encoding="hex")
TABLE_ROWS = {"C1": 10, "C2": 1000, "C3": 2**33}


def parse(text, layout=LAYOUT, **more):
    buffer = padded_buffer(len(text))
    buffer[FRONT_PAD_BYTES : FRONT_PAD_BYTES + len(text)] = np.frombuffer(text, np.uint8)
    return parse_lines(buffer, len(text), layout, **{"first_line": 1, "ends_file": True, **more})


def small_config(path, **more):
    return CriteoTsvConfig(
        paths=(path,), dense=("I1", "I2"), categorical=("C1", "C2", "C3"), num_embeddings_by_column=TABLE_ROWS, **more
    )


def one_pass(source):
    """Labels, dense rows, and ids per feature, of all samples in order."""
    blocks = [source.read_block(index) for index in range(len(source.block_sizes))]
    labels = np.concatenate([block.labels for block in blocks])
    dense = np.concatenate([block.dense for block in blocks])
    ids = [np.concatenate([block.bags[f].ids[:, 0] for block in blocks]) for f in range(len(source.features))]
    return labels, dense, ids


optional_integers = st.none() | st.integers(-(10**15), 10**16 - 1) | st.integers(-3, 70_000)
optional_hex = (
    st.none()
    | st.integers(0, 2**64 - 1).map(lambda value: f"{value:x}")
    | st.from_regex("[0-9a-fA-F]{8}", fullmatch=True)
)
rows = st.tuples(st.integers(0, 1), *[optional_integers] * 2, *[optional_hex] * 3)


def line_of(row):
    return "\t".join("" if field is None else str(field) for field in row)


@given(
    lines=st.lists(st.none() | rows, max_size=12),
    line_end=st.sampled_from(["\n", "\r\n"]),
    has_last_end=st.booleans(),
    num_lacking=st.integers(0, 5),
)
def test_parser_agrees_with_a_plain_one(lines, line_end, has_last_end, num_lacking):
    texts = ["" if row is None else line_of(row) for row in lines]
    wanted = [row for row in lines if row is not None]
    if lines and lines[-1] is not None and num_lacking:
        # the last line lacks fields
        wanted[-1] = wanted[-1][: 6 - num_lacking] + (None,) * num_lacking
        texts[-1] = line_of(lines[-1][: 6 - num_lacking])
    text = line_end.join(texts) + (line_end if has_last_end and texts else "")
    parsed, bad_lines = parse(text.encode())
    assert not bad_lines
    assert parsed.labels.tolist() == [row[0] for row in wanted]
    for column in range(2):
        values = [row[1 + column] for row in wanted]
        assert parsed.integers_missing[column].tolist() == [value is None for value in values]
        assert parsed.integers[column].tolist() == [value or 0 for value in values]
    for column in range(3):
        values = [row[3 + column] for row in wanted]
        assert parsed.categories_missing[column].tolist() == [value is None for value in values]
        assert parsed.categories[column].view(np.uint64).tolist() == [int(value or "0", 16) for value in values]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("2\t1\t2\ta\tb\tc", "label is '2'"),
        ("\t1\t2\ta\tb\tc", "label is ''"),
        ("01\t1\t2\ta\tb\tc", "label is '01'"),
        ("0\t1\t2x\ta\tb\tc", "column I2: '2x'"),
        ("0\t-\t2\ta\tb\tc", "column I1: '-'"),
        ("0\t1.5\t2\ta\tb\tc", "column I1: '1.5'"),
        ("0\t+1\t2\ta\tb\tc", "column I1: '\\+1'"),
        ("0\t--1\t2\ta\tb\tc", "column I1: '--1'"),
        ("0\t1-1\t2\ta\tb\tc", "column I1: '1-1'"),
        ("0\t 1\t2\ta\tb\tc", "column I1: ' 1'"),
        ("0\t12345678901234567\t2\ta\tb\tc", "column I1: '12345678901234567'"),
        ("0\tx234567890123456\t2\ta\tb\tc", "column I1: 'x234567890123456'"),
        ("0\t1\t2\ta\tg\tc", "column C2: 'g'"),
        ("0\t1\t2\ta\tb\t0x12", "column C3: '0x12'"),
        ("0\t1\t2\ta\tb\t-1", "column C3: '-1'"),
        ("0\t1\t2\t\u00e9\tb\tc", "column C1: '\u00e9'"),
        ("0\t1\t2\tx23456789abc\tb\tc", "column C1: 'x23456789abc'"),
        ("0\t1\t2\t" + "a" * 17 + "\tb\tc", "column C1"),
        ("0\t1\t2\t" + "z" * 99 + "\tb\tc", "column C1: 'z+'\\.\\.\\."),
        ("0\t1\t2\ta\tb", "5 fields, not 6"),
        ("0\t1\t2\ta\tb\tc\td", "7 fields, not 6"),
        (" ", "1 fields, not 6"),
    ],
)
def test_malformed_line_names_file_line_and_field(tmp_path, line, reason):
    path = tmp_path / "part.tsv"
    path.write_text("0\t\t\t\t\t\n\n" + line + "\n1\t1\t2\ta\tb\tc\n", encoding="utf-8")
    for block_lines in (1, 2, 100):
        source = CriteoTsvSource(small_config(path, block_lines=block_lines))
        assert source.num_samples == 3
        with (
            pytest.raises(DataError, match=f"part.tsv, line 3: .*{reason}"),
            Loader(source, batch_size=3, seed=0) as loader,
        ):
            next(loader)
    skipping = CriteoTsvSource(small_config(path, on_bad_row="skip"))
    assert skipping.num_samples == 2
    assert one_pass(skipping)[0].tolist() == [0.0, 1.0]
    assert skipping.bad_rows.count == 1
    assert "part.tsv, line 3: " in skipping.bad_rows.summary()


@pytest.mark.parametrize("byte", [*range(256)])
def test_only_digits_are_digits(byte):
    if byte in b"\t\r\n":
        return
    for size in (1, 8, 9, 16):
        for place in {0, size - 1, size // 2}:
            text = bytearray(b"1" * size)
            text[place] = byte
            digits, hex_digits = b"0123456789", b"0123456789abcdefABCDEF"
            is_integer = byte in digits or (byte == ord("-") and place == 0 and size > 1)
            _, bad = parse(b"0\t" + text + b"\t\t\t\t\n")
            assert bool(bad) == (not is_integer)
            _, bad = parse(b"0\t\t\t" + text + b"\t\t\n")
            assert bool(bad) == (byte not in hex_digits)


def test_a_last_line_with_a_bad_label_is_malformed_however_short():
    _, bad = parse(b"0\t1\t2\ta\tb\tc\n7")
    assert [(line.line, line.reason) for line in bad] == [(2, "the label is '7', not 0 or 1")]


def test_short_line_is_tolerated_only_as_the_last_of_its_file(tmp_path):
    first, second = tmp_path / "a.tsv", tmp_path / "b.tsv"
    first.write_text("1\t5\n\n\r\n")
    second.write_text("0\t\t3\ta\n1\t\t\t\t\t")
    config = CriteoTsvConfig(paths=(first, second), dense=("I1", "I2"), categorical=("C1", "C2", "C3"), block_lines=1)
    source = CriteoTsvSource(config)
    assert source.num_samples == 3
    assert source.read_block(0).dense.tolist() == [[np.float32(math.log(6)), 0.0]]
    with pytest.raises(DataError, match=r"b\.tsv, line 1: it has 4 fields, not 6"):
        source.read_block(1)
    assert source.read_block(2).bags[0].ids.tolist() == [[0]]


def test_skipped_lines_are_counted_wherever_they_are(tmp_path):
    good, bad = "1\t1\t2\ta\tb\tc\n", "1\tx\t2\ta\tb\tc\n"
    path = tmp_path / "part.tsv"
    path.write_text(bad * 3 + good * 5 + bad * 20 + "\n" + good + bad)
    for block_lines in (1, 4, 1000):
        source = CriteoTsvSource(small_config(path, on_bad_row="skip", block_lines=block_lines))
        assert source.num_samples == 6
        assert source.bad_rows.count == 24
        assert len(source.bad_rows.examples) == 10
        assert "24 malformed lines" in source.bad_rows.summary()
        assert "14 more" in source.bad_rows.summary()
        assert len(one_pass(source)[0]) == 6


def test_dense_and_ids_follow_the_documented_rules(tmp_path):
    path = tmp_path / "part.tsv"
    path.write_text("1\t-2\t\t\t0a\tffffffff\n0\t0\t7\t1\t0A\t\n")
    labels, dense, ids = one_pass(CriteoTsvSource(small_config(path)))
    assert labels.tolist() == [1.0, 0.0]
    assert dense.tolist() == [[0.0, 0.0], [0.0, float(np.float32(math.log(8)))]]
    assert ids[0].tolist() == [0, int(hash_values(np.array([1]), 10)[0])]
    assert ids[1].tolist() == hash_values(np.array([10, 10]), 1000).tolist()
    assert ids[2].tolist() == [int(hash_values(np.array([2**32 - 1]), 2**33)[0]), 0]
    _, plain, _ = one_pass(CriteoTsvSource(small_config(path, dense_transform="none", missing_dense_value=-1.0)))
    assert plain.tolist() == [[-2.0, -1.0], [0.0, 7.0]]


def test_text_categories_are_any_bytes(tmp_path):
    path = tmp_path / "part.tsv"
    path.write_text("1\t1\t1\tna\u00efve\t\tx y\n", encoding="utf-8")
    _, _, ids = one_pass(CriteoTsvSource(small_config(path, categorical_encoding="text")))
    data = np.frombuffer("na\u00efve".encode(), np.uint8)
    value = text_values(data, np.array([0]), np.array([len(data)]))
    assert ids[0].tolist() == hash_values(value, 10).tolist()
    assert ids[1].tolist() == [0]


def test_text_categories_are_keys_where_keys_are_wanted(tmp_path):
    path = tmp_path / "part.tsv"
    path.write_text("1\t1\t1\tna\u00efve\t\tx y\n", encoding="utf-8")
    config = small_config(path, categorical_encoding="text", keys=True)
    _, _, ids = one_pass(CriteoTsvSource(config))
    assert [part.tolist() for part in ids] == [
        [key] for key in (text_keys(["na\u00efve"])[0], -1, text_keys(["x y"])[0])
    ]
    convert_criteo(config, tmp_path / "part.parquet")
    converted = ParquetSource(converted_config(config, [tmp_path / "part.parquet"]))
    assert [part.tolist() for part in one_pass(converted)[2]] == [part.tolist() for part in ids]


def test_blocks_do_not_change_the_samples(tmp_path):
    lines = [f"{n % 2}\t{n}\t\t{n:x}\t\t{n * 7919:08x}" for n in range(500)]
    lines[100] = lines[300] = ""
    path = tmp_path / "part.tsv"
    path.write_text("\n".join(lines))
    expected = one_pass(CriteoTsvSource(small_config(path)))
    assert len(expected[0]) == 498
    for block_lines in (1, 7, 100, 499, 500):
        source = CriteoTsvSource(small_config(path, block_lines=block_lines))
        assert source.num_samples == 498
        found = one_pass(source)
        assert np.array_equal(found[0], expected[0])
        assert np.array_equal(found[1], expected[1])
        assert np.array_equal(found[2], expected[2])


def test_index_is_the_same_however_the_file_is_read(tmp_path, monkeypatch):
    path = tmp_path / "part.tsv"
    path.write_text("".join(f"{n % 2}\t{n}\t\t{n:x}\t\t\n" for n in range(300)) + "\n\n1\t3")
    whole = CriteoTsvSource(small_config(path, block_lines=10))
    for chunk_bytes in (1, 2, 17, 1000):
        monkeypatch.setattr("holdfast.data.tsv_index._CHUNK_BYTES", chunk_bytes)
        parts = CriteoTsvSource(small_config(path, block_lines=10))
        assert parts.fingerprint() == whole.fingerprint()
        assert parts.block_sizes.tolist() == whole.block_sizes.tolist()
        assert np.array_equal(one_pass(parts)[1], one_pass(whole)[1])


def test_a_changed_file_is_noticed(tmp_path):
    path = tmp_path / "part.tsv"
    path.write_text("1\t1\t2\ta\tb\tc\n" * 50)
    source = CriteoTsvSource(small_config(path))
    state = Loader(source, batch_size=2, seed=0).state_dict()
    path.write_text("1\t1\t2\ta\tb\tc\n" * 40)
    with pytest.raises(DataError, match="shorter"):
        source.read_block(0)
    path.write_text("1\t1\t2\ta\t\n\n\n" * 100)
    with pytest.raises(DataError):
        source.read_block(0)
    path.write_text("1\t1\t2\ta\tb\tc\n" * 49 + "1\t1\t2\ta\tb\td\n")
    with pytest.raises(ConfigError, match=r"source\.files"):
        Loader(CriteoTsvSource(small_config(path)), batch_size=2, seed=0).load_state_dict(state)
    path.write_text("1\t1\t2\ta\tb\tc\n" * 50)
    other = Loader(CriteoTsvSource(small_config(path, dense_transform="none")), batch_size=2, seed=0)
    with pytest.raises(ConfigError, match=r"source\.columns"):
        other.load_state_dict(state)


def test_moved_files_are_the_same_data(tmp_path):
    text = "1\t1\t2\ta\tb\tc\n" * 5
    (tmp_path / "a.tsv").write_text(text)
    (tmp_path / "b.tsv").write_text(text)
    prints = [CriteoTsvSource(small_config(tmp_path / name)).fingerprint() for name in ("a.tsv", "b.tsv")]
    assert prints[0] == prints[1]


def test_endless_line_is_an_error_not_an_endless_buffer(tmp_path):
    path = tmp_path / "binary.tsv"
    path.write_bytes(b"1\t1\t2\ta\tb\tc\n" + b"\0" * (10 << 20))
    with pytest.raises(DataError, match=r"binary.tsv, line 2: longer"):
        CriteoTsvSource(small_config(path))


def test_progress_counts_bytes(tmp_path):
    path = tmp_path / "part.tsv"
    path.write_text("1\t1\t2\ta\tb\tc\n" * 50)
    seen = []
    CriteoTsvSource(small_config(path), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("paths", ()),
        ("paths", "one.tsv"),
        ("num_embeddings", 0),
        ("num_embeddings_by_column", {"C99": 5}),
        ("dense_transform", "sqrt"),
        ("categorical_encoding", "utf8"),
        ("on_bad_row", "ignore"),
        ("block_lines", 0),
        ("dense", ("C1",)),
    ],
)
def test_bad_config_names_the_field(field, value):
    with pytest.raises(ConfigError, match=field):
        CriteoTsvConfig(**{"paths": ("a.tsv",), field: value})


def test_absent_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.tsv"):
        CriteoTsvSource(CriteoTsvConfig(paths=(tmp_path / "absent.tsv",)))


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_a_file_of_gzip_is_not_taken_for_malformed_lines(tmp_path, on_bad_row):
    path = tmp_path / "day_0.gz"
    path.write_bytes(gzip.compress(b"0\t1\n" * 100))
    with pytest.raises(DataError, match=r"day_0\.gz: it is compressed by gzip, which is not read: unpack it"):
        CriteoTsvSource(CriteoTsvConfig(paths=[path], on_bad_row=on_bad_row))


def test_empty_file_holds_no_samples(tmp_path):
    (tmp_path / "empty.tsv").write_text("\n\n")
    assert CriteoTsvSource(CriteoTsvConfig(paths=(tmp_path / "empty.tsv",))).num_samples == 0


@pytest.mark.parametrize(("name", "num_samples"), [("train", 7200), ("valid", 409), ("test", 391)])
def test_real_rows_agree_with_a_plain_parser(criteo_dir, name, num_samples):
    path = criteo_dir / f"{name}.tsv"
    source = CriteoTsvSource(CriteoTsvConfig(paths=(path,), num_embeddings=50_000, block_lines=1000))
    assert source.num_samples == num_samples
    labels, dense, ids = one_pass(source)
    rows_of_file = [line.split("\t") for line in path.read_text().split("\n") if line]
    rows_of_file = [row + [""] * (40 - len(row)) for row in rows_of_file]
    assert labels.tolist() == [float(row[0]) for row in rows_of_file]
    expected = [[math.log1p(max(0, int(field))) if field else 0.0 for field in row[1:14]] for row in rows_of_file]
    assert np.allclose(dense, expected, rtol=1e-7, atol=0)
    for column in range(26):
        fields = [row[14 + column] for row in rows_of_file]
        values = np.array([int(field or "0", 16) for field in fields])
        missing = np.array([not field for field in fields])
        assert np.array_equal(ids[column], hash_values(values, 50_000, missing))


def test_a_text_file_that_was_written_while_it_is_read_gives_no_samples(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("0\t1\t2\ta\tb\tc\n")
    source = CriteoTsvSource(small_config(path))
    assert source.read_block(0).labels.tolist() == [0.0]
    path.touch()
    assert source.read_block(0).labels.tolist() == [0.0]
    for text in ("1\t1\t2\ta\tb\tc\n", "0\t1\t2\ta\tb\tc\n" * 2):
        path.write_text(text)
        with pytest.raises(DataError, match=r"a\.tsv: the file has changed since it was opened"):
            source.read_block(0)


def test_real_file_cut_anywhere_in_its_last_line_is_read(criteo_dir, tmp_path):
    text = (criteo_dir / "valid.tsv").read_bytes()
    last_line = text.rstrip(b"\n").rfind(b"\n") + 1
    path = tmp_path / "cut.tsv"
    for end in [*range(last_line + 1, len(text)), len(text.rstrip())]:
        path.write_bytes(text[:end])
        source = CriteoTsvSource(CriteoTsvConfig(paths=(path,)))
        assert source.num_samples == 409
        if text[end - 1 : end] != b"-":
            source.read_block(len(source.block_sizes) - 1)
