"""Parquet as a source: types, lists, nulls, and what is an error."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.data import arrow_file
from holdfast.data.criteo import CriteoTsvConfig, CriteoTsvSource
from holdfast.data.hashing import hash_values, text_values
from holdfast.data.loader import Loader
from holdfast.data.parquet import ParquetConfig, ParquetSource, SparseColumn
from holdfast.data.text_keys import text_keys
from holdfast.errors import ConfigError, DataError, IdError


def write(path, row_group_size=4, **columns):
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def source_of(path, sparse=None, **more):
    sparse = {"f": SparseColumn(column="ids", num_embeddings=100, hashing="identity")} if sparse is None else sparse
    return ParquetSource(ParquetConfig(**{"paths": (path,), "label": "click", "sparse": sparse, **more}))


def hashed(values, num_embeddings):
    return hash_values(np.array(values, np.int64), num_embeddings).tolist()


def text_ids(texts, num_embeddings):
    raw = [text.encode() for text in texts]
    lengths = np.array([len(text) for text in raw])
    data = np.frombuffer(b"".join(raw), np.uint8)
    return hash_values(text_values(data, np.cumsum(lengths) - lengths, lengths), num_embeddings).tolist()


def only_batch(source):
    with Loader(source, batch_size=source.num_samples, seed=0) as loader:
        return next(loader.once())


def bags_of(batch, feature):
    lengths = batch.features.lengths().tolist()
    bags = [bag.tolist() for bag in batch.features.values().split(lengths)]
    return bags[feature * batch.size : (feature + 1) * batch.size]


def test_scalar_columns_of_every_type(tmp_path):
    path = write(
        tmp_path / "a.parquet",
        row_group_size=2,
        click=pa.array([True, False, True]),
        age=pa.array([1.5, None, float("nan")]),
        count=pa.array([3, -1, None], pa.int16()),
        small=pa.array([7, None, -9], pa.int8()),
        big=pa.array([2**64 - 1, 0, None], pa.uint64()),
        name=pa.array(["b", "", None]),
        shade=pa.array(["red", "blue", "red"]).dictionary_encode(),
    )
    names = ("small", "big", "name", "shade")
    batch = only_batch(
        source_of(
            path,
            dense=("age", "count"),
            sparse={f"F_{name}": SparseColumn(column=name, num_embeddings=50) for name in names},
            missing_dense_value=-5.0,
        )
    )
    assert batch.features.keys() == [f"F_{name}" for name in names]
    assert batch.labels.tolist() == [1.0, 0.0, 1.0]
    assert batch.dense.tolist() == [[1.5, 3.0], [-5.0, -1.0], [-5.0, -5.0]]
    assert bags_of(batch, 0) == [hashed([7], 50), [0], hashed([-9], 50)]
    assert bags_of(batch, 1) == [hashed([-1], 50), hashed([0], 50), [0]]
    assert bags_of(batch, 2) == [text_ids(["b"], 50), text_ids([""], 50), [0]]
    assert bags_of(batch, 3) == [[number] for number in text_ids(["red", "blue", "red"], 50)]


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int32())])
def test_lists_are_bags(tmp_path, kind):
    lists = [[1, 2], [], None, [3, None, 3], [4], None]
    path = write(tmp_path / "a.parquet", click=pa.array([0, 1] * 3), ids=pa.array(lists, kind))
    hash_batch = only_batch(source_of(path, {"f": SparseColumn(column="ids", num_embeddings=70)}))
    three = hashed([3], 70)[0]
    assert bags_of(hash_batch, 0) == [hashed([1, 2], 70), [], [0], [three, 0, three], hashed([4], 70), [0]]
    identity = SparseColumn(column="ids", num_embeddings=5, hashing="identity", missing_id=0)
    assert bags_of(only_batch(source_of(path, {"f": identity})), 0) == [[1, 2], [], [0], [3, 0, 3], [4], [0]]


@pytest.mark.skipif(
    int(pa.__version__.split(".")[0]) < 19, reason="this pyarrow cannot write lists of a fixed size that are null"
)
def test_fixed_size_lists_and_lists_of_texts(tmp_path):
    path = write(
        tmp_path / "a.parquet",
        click=pa.array([0, 1, 1]),
        pair=pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2)),
        tags=pa.array([["x", "yy"], [], ["x"]]),
    )
    batch = only_batch(
        source_of(
            path,
            {
                "pair": SparseColumn(column="pair", num_embeddings=9, hashing="identity", missing_id=8),
                "tags": SparseColumn(column="tags", num_embeddings=90),
            },
        )
    )
    assert bags_of(batch, 0) == [[1, 2], [8], [3, 4]]
    assert bags_of(batch, 1) == [text_ids(["x", "yy"], 90), [], text_ids(["x"], 90)]


VIEWS = [pa.string_view(), pa.binary_view()] if hasattr(pa, "string_view") else []  # from pyarrow 16 on


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
        *VIEWS,
    ],
)
def test_texts_are_keys_of_every_type_and_in_lists(tmp_path, kind):
    texts = ["red", "", None, "na\u00efve", "red"]
    tags = [["red", "blue"], [], None, ["red", None], ["blue"]]
    path = write(
        tmp_path / "a.parquet",
        row_group_size=2,
        click=pa.array([0, 1, 1, 0, 1]),
        shade=(pa.array(texts, kind) if kind in VIEWS else pa.array(texts).cast(kind)),
        tags=pa.array(tags, pa.large_list(pa.string())),
    )
    of = dict(zip(known := ["red", "", "na\u00efve", "blue"], text_keys(known).tolist(), strict=True)) | {None: -7}
    sparse = {name: SparseColumn(column=name, keys=True, missing_id=-7) for name in ("shade", "tags")}
    batch = only_batch(source_of(path, sparse))
    assert bags_of(batch, 0) == [[of[text]] for text in texts]
    assert bags_of(batch, 1) == [[of[text] for text in ([None] if row is None else row)] for row in tags]
    with pytest.raises(DataError, match=r"row 3: feature shade: null; missing_id says"):
        source_of(path, {"shade": SparseColumn(column="shade", keys=True)}).read_block(1)


@pytest.mark.parametrize("keys", [True, False])
def test_numbers_in_one_file_and_texts_in_another_are_no_ids_of_one_table(tmp_path, keys):
    paths = [
        write(tmp_path / f"{name}.parquet", click=pa.array([0]), ids=pa.array([ids]))
        for name, ids in (("a", 5), ("b", "5"))
    ]
    sparse = {"f": SparseColumn(column="ids", num_embeddings=100, keys=keys)}
    with pytest.raises(
        ConfigError, match=r"b\.parquet: column 'ids' of feature 'f' holds text values, where .*integer"
    ):
        source_of(paths[0], sparse, paths=tuple(paths))


def test_shuffled_lists_stay_with_their_samples(tmp_path):
    lists = [[number] * (number % 4) for number in range(50)]
    path = write(
        tmp_path / "a.parquet",
        row_group_size=8,
        click=pa.array([number % 2 for number in range(50)]),
        number=pa.array(range(50)),
        ids=pa.array(lists),
    )
    with Loader(source_of(path, dense=("number",)), batch_size=20, seed=0, shuffle_window_samples=16) as loader:
        for _ in range(5):
            batch = next(loader)
            assert bags_of(batch, 0) == [lists[int(number)] for number in batch.dense[:, 0].tolist()]


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"click": [0, 1, 0, 1, 2], "ids": [1] * 5}, DataError, r"a\.parquet, row 5: column click: the label is 2"),
        ({"click": [0, None], "ids": [1] * 2}, DataError, r"row 2: column click: the label is null"),
        ({"click": [0.5], "ids": [1]}, DataError, r"row 1: column click: the label is 0\.5"),
        ({"click": [0] * 6, "ids": [1, 2, 3, 4, 99, 100]}, IdError, r"row 6: feature f: id 100 is not in \[0, 100\)"),
        ({"click": [0] * 2, "ids": [1, -1]}, IdError, r"row 2: feature f: id -1"),
        ({"click": [0] * 2, "ids": [1, None]}, DataError, r"row 2: feature f: null"),
        ({"click": [0] * 6, "ids": [[], [1], [], [], [1, 2], [3, 500]]}, IdError, r"row 6: feature f: id 500"),
        ({"click": [0] * 3, "ids": [[], [1], [2, None]]}, DataError, r"row 3: feature f: null"),
        ({"click": [0] * 3, "ids": [[], None, [1]]}, DataError, r"row 2: feature f: null"),
    ],
)
def test_bad_values_name_file_row_and_column(tmp_path, columns, error, message):
    path = write(tmp_path / "a.parquet", **{name: pa.array(values) for name, values in columns.items()})
    with pytest.raises(error, match=message):
        only_batch(source_of(path))


def test_a_file_whose_name_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "\udcff.parquet"
    path.touch()
    with pytest.raises(ConfigError, match=r"udcff.parquet' is not UTF-8") as refused:
        source_of(path)
    str(refused.value).encode()  # it can be printed


def test_infinite_dense_value_is_an_error(tmp_path):
    path = write(tmp_path / "a.parquet", click=[0, 1], ids=[1, 2], x=[1.0, float("inf")])
    with pytest.raises(DataError, match="row 2: column x: the value is infinite"):
        only_batch(source_of(path, dense=("x",)))


def test_a_dense_value_that_float32_cannot_hold_is_an_error_unless_it_is_transformed(tmp_path):
    path = write(tmp_path / "a.parquet", click=[0, 1], ids=[1, 2], x=[1.0, 1e300])
    with pytest.raises(DataError, match=r"row 2: column x: 1e\+300 is too large for float32"):
        only_batch(source_of(path, dense=("x",)))
    batch = only_batch(source_of(path, dense=("x",), dense_transform="log1p"))
    assert batch.dense[:, 0].tolist() == pytest.approx([np.log(2), 300 * np.log(10)])


def test_an_unsigned_number_beyond_int64_is_itself(tmp_path):
    """It was the negative number of the same bits: as a dense value, and where an error shows it."""
    big = pa.array([2**63 + 4096, None, 2**64 - 1], pa.uint64())
    path = write(tmp_path / "a.parquet", click=[0, 1, 1], ids=[1, 2, 3], big=big)
    assert only_batch(source_of(path, dense=("big",))).dense[:, 0].tolist() == [2.0**63, 0.0, 2.0**64]
    identity = {"f": SparseColumn(column="big", num_embeddings=10, hashing="identity", missing_id=0)}
    with pytest.raises(IdError, match=f"row 1: feature f: id {2**63 + 4096} is not in"):
        only_batch(source_of(path, sparse=identity))


@pytest.mark.parametrize(
    "columns",
    [
        ([1, 2], [[3, 4], []]),
        ([[1], [2]], [3, 4]),
        ([[1, 2], None], pa.array([[3, 4], [5, 6]], pa.list_(pa.int64(), 2))),
    ],
)
def test_one_file_may_hold_values_where_another_holds_lists(tmp_path, columns):
    """Blocks were laid side by side as if all were like the first: the others' ids were whatever lay in memory."""
    paths = [write(tmp_path / str(n), click=[0, 1], ids=column) for n, column in enumerate(columns)]
    sparse = {"f": SparseColumn(column="ids", num_embeddings=10, hashing="identity", missing_id=0)}
    config = ParquetConfig(paths=paths, label="click", sparse=sparse)
    wanted = [bag for path in paths for bag in bags_of(only_batch(source_of(path, sparse=sparse)), 0)]
    assert bags_of(only_batch(ParquetSource(config)), 0) == wanted


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e39])
def test_what_stands_for_a_missing_value_is_finite(tmp_path, value):
    with pytest.raises(ConfigError, match="missing_dense_value: must be finite in float32"):
        source_of(tmp_path, missing_dense_value=value)


def test_columns_are_checked_when_the_file_is_opened(tmp_path):
    path = write(tmp_path / "a.parquet", click=[0, 1], ids=["a", "b"], when=pa.array([0, 1], pa.timestamp("s")))
    with pytest.raises(ConfigError, match=r"'ids' of feature 'f' must hold integer"):
        source_of(path)
    with pytest.raises(ConfigError, match="no column 'absent'"):
        source_of(path, {}, dense=("absent",))
    with pytest.raises(ConfigError, match=r"column 'when' is of type timestamp.*write it as integers"):
        source_of(path, {}, dense=("when",))
    with pytest.raises(ConfigError, match="'ids' must hold numbers"):
        source_of(path, {}, dense=("ids",))
    floats = write(tmp_path / "b.parquet", click=[0, 1], ids=[1.0, None])
    with pytest.raises(ConfigError, match="but holds number; write integers with nulls as pandas' Int64"):
        source_of(floats)


def test_what_is_no_parquet_file_is_a_data_error(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"0\t1\n" * 100)
    with pytest.raises(DataError, match=r"a\.parquet: not a readable Parquet file"):
        source_of(path)


@pytest.mark.parametrize("source", [source_of, lambda path: CriteoTsvSource(CriteoTsvConfig(paths=[path]))])
def test_a_folder_or_a_pattern_in_place_of_a_file_says_to_name_the_files(tmp_path, source):
    with pytest.raises(ConfigError, match=f"paths: {tmp_path} is a directory, not a file: name each of its files"):
        source(tmp_path)
    with pytest.raises(ConfigError, match=r"day_\*\.parquet is not a file, and no pattern either: name each file"):
        source(tmp_path / "day_*.parquet")


def test_damaged_row_group_is_a_data_error(tmp_path):
    path = write(tmp_path / "a.parquet", row_group_size=1000, click=[0] * 1000, ids=list(range(100)) * 10)
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.parquet, row group 0"):
        source_of(path).read_block(0)


def test_rows_are_counted_across_row_groups_of_a_file_and_files_follow_each_other(tmp_path):
    first = write(tmp_path / "a.parquet", row_group_size=3, click=[0] * 7, ids=list(range(7)))
    second = write(tmp_path / "b.parquet", row_group_size=3, click=[1] * 4, ids=[7, 8, 9, 100])
    source = source_of(first, paths=(first, second))
    assert source.block_sizes.tolist() == [3, 3, 1, 3, 1]
    assert [source.read_block(block).bags[0].ids[0, 0] for block in range(4)] == [0, 3, 6, 7]
    with pytest.raises(IdError, match=r"b\.parquet, row 4:"):
        source.read_block(4)


def test_fingerprint_tells_files_and_columns_apart(tmp_path):
    first = write(tmp_path / "a.parquet", click=[0, 1], ids=[1, 2])
    second = write(tmp_path / "b.parquet", click=[0, 1], ids=[1, 3])
    prints = source_of(first).fingerprint(), source_of(second).fingerprint()
    assert prints[0]["files"] != prints[1]["files"]
    assert prints[0]["columns"] == prints[1]["columns"]
    hashing = source_of(first, {"f": SparseColumn(column="ids", num_embeddings=100)}).fingerprint()
    assert hashing["columns"] != prints[0]["columns"]
    assert hashing["files"] == prints[0]["files"]


def column_chunk(path, column):
    """Where the pages of a column's first row group lie: begin and end."""
    chunk = pq.read_metadata(path).row_group(0).column(column)
    begin = chunk.dictionary_page_offset or chunk.data_page_offset
    return begin, begin + chunk.total_compressed_size


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_fingerprint_of_a_file_that_was_edited_in_place_is_another(tmp_path, where):
    path = write(tmp_path / "a.parquet", click=[0, 1] * 5000, ids=list(range(10_000)))
    before = source_of(path).fingerprint()
    begin, end = column_chunk(path, 1)
    place = {"first": begin, "middle": (begin + end) // 2, "last": end - 1}[where]
    with path.open("rb+") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    after = source_of(path).fingerprint()
    assert after["files"] != before["files"]
    assert after["columns"] == before["columns"]


def test_a_run_over_a_file_that_was_edited_in_place_is_refused(tmp_path):
    path = write(tmp_path / "a.parquet", click=[0, 1] * 500, ids=list(range(1000)))
    state = Loader(source_of(path), batch_size=4, seed=1).state_dict()
    Loader(source_of(path), batch_size=4, seed=1).load_state_dict(state)
    begin, end = column_chunk(path, 1)
    with path.open("rb+") as file:
        file.seek((begin + end) // 2)
        file.write(b"\0\1\2\3")
    with pytest.raises(ConfigError, match=r"source\.files: .*: a file of the data was edited, added, .*: go on"):
        Loader(source_of(path), batch_size=4, seed=1).load_state_dict(state)


def test_fingerprint_of_a_large_file_finds_any_edit_as_long_as_the_distance_of_its_samples(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", row_group_size=100_000, click=[0, 1] * 50_000, ids=list(range(100_000)))
    monkeypatch.setattr(arrow_file, "_MAX_SAMPLES", 16)
    before = source_of(path).fingerprint()
    size = path.stat().st_size
    length = -(-size // 16) + 4096
    begin, end = column_chunk(path, 1)
    assert end - begin > length
    for place in (begin, begin + 5000, end - length):
        content = path.read_bytes()
        path.write_bytes(
            content[:place] + bytes(byte ^ 255 for byte in content[place : place + length]) + content[place + length :]
        )
        assert source_of(path).fingerprint()["files"] != before["files"]
        path.write_bytes(content)
        assert source_of(path).fingerprint() == before


def plain(path, ids):
    """A file that is as long for any ids, and has each at the same place."""
    table = pa.table({"click": [0, 1] * (len(ids) // 2), "ids": ids})
    pq.write_table(table, path, row_group_size=4, compression="none", use_dictionary=False, write_statistics=False)
    return path


@pytest.mark.parametrize("has_fingerprint", [True, False])
def test_a_file_that_another_one_took_the_place_of_gives_no_samples(tmp_path, has_fingerprint):
    source = source_of(plain(tmp_path / "a.parquet", list(range(8))))
    if has_fingerprint:
        source.fingerprint()
    assert source.read_block(1).bags[0].ids[:, 0].tolist() == [4, 5, 6, 7]
    plain(tmp_path / "b.parquet", list(range(50, 58))).replace(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: the file has changed since it was opened"):
        source.read_block(1)


def test_a_file_that_changed_before_its_fingerprint_was_taken_has_none(tmp_path):
    source = source_of(plain(tmp_path / "a.parquet", list(range(8))))
    plain(tmp_path / "a.parquet", list(range(50, 58)))
    with pytest.raises(DataError, match="the file has changed since it was opened"):
        source.fingerprint()


def test_a_file_that_was_touched_or_copied_over_itself_is_the_same_one(tmp_path):
    path = plain(tmp_path / "a.parquet", list(range(8)))
    source = source_of(path)
    source.fingerprint()
    path.touch()
    assert source.read_block(1).bags[0].ids[:, 0].tolist() == [4, 5, 6, 7]
    plain(tmp_path / "b.parquet", list(range(8))).replace(path)
    assert source.read_block(0).bags[0].ids[:, 0].tolist() == [0, 1, 2, 3]


def test_fingerprint_is_read_once(tmp_path):
    path = write(tmp_path / "a.parquet", click=[0, 1], ids=[1, 2])
    source = source_of(path)
    before = source.fingerprint()
    path.write_bytes(b"")
    assert source.fingerprint() == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_embeddings": 0}, "num_embeddings"),
        ({"hashing": "md5"}, "hashing"),
        ({"missing_id": 3}, "missing_id"),
        ({"missing_id": 10, "hashing": "identity"}, "missing_id"),
    ],
)
def test_bad_sparse_column_names_the_field(more, message):
    with pytest.raises(ConfigError, match=message):
        SparseColumn(**{"column": "c", "num_embeddings": 10, **more})
