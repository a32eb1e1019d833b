"""Slots through the binding: what an admission packs, against NumPy on the batch's own ids, and the rows it misses,
against the pool's evaluation of them."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from holdfast import EmbeddingBagConfig, Pool, _core
from holdfast.errors import ConfigError, StepError, WindowTooLarge
from holdfast.pools.optim import OPTIMIZERS
from holdfast.pools.tables import normalize_all

SEED = 4711
ADAGRAD = OPTIMIZERS.index("adagrad")
DIM = 8
ROWS = {"large": 500, "other": 40, "small": 3}
TABLE_OF = [0, 1, 2, 0]  # of each feature
COLUMN_OF = [0, DIM, DIM + 4, 2 * DIM + 4]
WIDTH = 3 * DIM + 4
FEATURES = [(name, table) for name, table in zip("abcd", TABLE_OF, strict=True)]
WITH_SLOTS = [0, 2]  # tables
FEATURES_WITH_SLOTS = [0, 2, 3]

Medium = Literal["memory", "block"]


@dataclass(frozen=True)
class Batch:
    """Ids and offsets of every feature, block after block, as Collection.plan takes them."""

    ids: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray | None

    @property
    def num_bags(self) -> int:
        return (len(self.offsets) - 1) // len(FEATURES)

    def bags_of(self, feature: int) -> np.ndarray:
        """[num_bags + 1] where they begin."""
        return self.offsets[feature * self.num_bags : (feature + 1) * self.num_bags + 1]

    def lookups_of(self, feature: int) -> slice:
        bags = self.bags_of(feature)
        return slice(bags[0], bags[-1])


class Rows:
    def __init__(self, directory: Path, medium: Medium = "memory") -> None:
        tables = [
            EmbeddingBagConfig(
                num_embeddings=rows,
                embedding_dim=4 if name == "other" else DIM,
                name=name,
                feature_names=[feature for feature, table in FEATURES if table == t],
                pooling="sum" if name == "other" else "mean",
            )
            for t, (name, rows) in enumerate(ROWS.items())
        ]
        self.pool = Pool(directory / "pool", seed=3, log_bytes=1 << 20, medium=medium)
        self.numbers = self.pool.attach(normalize_all(tables), ADAGRAD, OPTIMIZERS)
        self.collection = self.pool.core.collection(self.numbers, FEATURES)

    def plan(self, batch: Batch) -> _core.Plan:
        return self.collection.plan(batch.ids, batch.offsets, batch.weights, [0, 1, 2, 3], len(FEATURES), True)

    def train(self, batch: Batch, grad: np.ndarray) -> None:
        capture = self.pool.core.capture(self.plan(batch))
        self.pool.core.update(
            [(capture, grad)], learning_rate=0.5, epsilon=0.1, beta1=0, beta2=0, weight_decay=0, gradient_scale=1
        )
        self.pool.commit(1)


def random_batch(rng: np.random.Generator, num_bags: int, longest: int, weighted: bool = False) -> Batch:
    """Every second id, about, is one of a few; bags of up to `longest` ids, some of them empty."""
    lengths = rng.integers(0, longest + 1, (len(FEATURES), num_bags))
    rows = np.array(list(ROWS.values()))[TABLE_OF]
    ids = [rng.integers(0, np.where(rng.random(n) < 0.5, rows[f], 3)) for f, n in enumerate(lengths.sum(1))]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    count = int(offsets[-1])
    weights = rng.random(count, np.float32) if weighted else None
    return Batch(np.concatenate(ids).astype(np.int64), offsets.astype(np.int64), weights)


def unpacked(admission: _core.Admission) -> dict[str, np.ndarray]:
    out = np.full(admission.packed_bytes, 0xA5, np.uint8)
    arrays = {}
    end = 0
    for name, (offset, count) in admission.pack(out).items():
        dtype = np.dtype({"rows": np.int64}.get(name, np.float32 if name.endswith("scale") else np.int32))
        assert offset % 128 == 0
        assert offset >= end
        end = offset + count * dtype.itemsize
        arrays[name] = out[offset:end].view(dtype)
    assert end <= len(out) < end + 128
    return arrays


def expected_arrays(rows: Rows, plan: _core.Plan, batch: Batch) -> dict[str, np.ndarray]:
    """All but slots, lookup_slot and missing, which are the directory's affair; and `lookup_row` for lookup_slot: the
    index of each lookup's unique row."""
    unique = {t: np.asarray(plan.rows(t), np.int64) for t in WITH_SLOTS}
    first = {0: 0, 2: len(unique[0])}
    row_of, offset_of, scale_of, weight_of, bag_start = [], [], [], [], [0]
    for f in FEATURES_WITH_SLOTS:
        lookups, bags, t = batch.lookups_of(f), batch.bags_of(f), TABLE_OF[f]
        lengths = np.diff(bags)
        row_of.append(first[t] + np.searchsorted(unique[t], batch.ids[lookups]))
        offset_of.append(np.repeat(np.arange(batch.num_bags) * WIDTH + COLUMN_OF[f], lengths))
        weights = np.ones(lookups.stop - lookups.start, np.float32)
        weights = weights if batch.weights is None else batch.weights[lookups]
        weight_of.append(weights)
        with np.errstate(divide="ignore"):
            scale_of.append(weights * np.repeat(np.float32(1) / lengths.astype(np.float32), lengths))
        bag_start.extend(bag_start[-1] + np.cumsum(lengths))
    lookup_row = np.concatenate(row_of)
    order = np.argsort(lookup_row, kind="stable")
    num_unique = sum(map(len, unique.values()))
    expected = {
        "rows": np.concatenate(list(unique.values())),
        "tables": np.repeat([rows.numbers[t] for t in WITH_SLOTS], [len(unique[t]) for t in WITH_SLOTS]),
        "row_start": np.searchsorted(lookup_row[order], np.arange(num_unique + 1)),
        "gradient_offset": np.concatenate(offset_of)[order],
        "bag_start": np.array(bag_start),
        "columns": np.array([COLUMN_OF[f] for f in FEATURES_WITH_SLOTS]),
        "lookup_row": lookup_row,
    }
    scale = np.concatenate(scale_of)[order]
    if batch.weights is not None or (scale != 1).any():
        expected["gradient_scale"] = scale
    if batch.weights is not None:
        expected["lookup_scale"] = np.concatenate(weight_of)
    return expected


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("num_bags", "longest"), [(1, 0), (1, 1), (64, 1), (37, 6), (6000, 5)])
def test_what_is_packed_is_what_numpy_makes_of_the_ids(
    pool_root: Path, num_bags: int, longest: int, weighted: bool
) -> None:
    rng = np.random.default_rng(SEED)
    rows = Rows(pool_root)
    directory = _core.SlotDirectory(rows.collection, WITH_SLOTS, ROWS["large"] + ROWS["small"])
    for _ in range(3):
        batch = random_batch(rng, num_bags, longest, weighted)
        plan = rows.plan(batch)
        resident = directory.num_resident
        admission = directory.admit(plan)
        assert admission is not None
        assert admission.plan is plan
        arrays = unpacked(admission)
        expected = expected_arrays(rows, plan, batch)
        lookup_row = expected.pop("lookup_row")
        assert set(arrays) == {"slots", "lookup_slot", "missing", *expected}
        for name, values in expected.items():
            np.testing.assert_array_equal(arrays[name], values, err_msg=name)
        np.testing.assert_array_equal(arrays["lookup_slot"], arrays["slots"][lookup_row])
        assert len(set(arrays["slots"])) == admission.num_unique == len(arrays["rows"])
        assert admission.num_lookups == len(lookup_row)
        assert admission.max_occurrences == max(np.diff(arrays["row_start"]), default=0)
        assert admission.num_missing == len(arrays["missing"]) == directory.num_resident - resident
        directory.release(admission)
        assert directory.num_held == 0


def one_row_each(ids: np.ndarray) -> Batch:
    """Bags of one id of table 0, of the first feature; the others' are empty."""
    offsets = np.concatenate([np.arange(len(ids) + 1), np.full(3 * len(ids), len(ids))])
    return Batch(np.asarray(ids, np.int64), offsets.astype(np.int64), None)


def test_one_row_that_every_lookup_hits_has_one_slot(pool_root: Path) -> None:
    rows = Rows(pool_root)
    directory = _core.SlotDirectory(rows.collection, [0], 1)
    admission = directory.admit(rows.plan(one_row_each(np.full(3000, 7))))
    assert admission is not None
    assert (admission.num_unique, admission.max_occurrences) == (1, 3000)
    assert (unpacked(admission)["lookup_slot"] == 0).all()


@pytest.mark.parametrize("keep", [True, False])
def test_a_directory_is_full_to_the_last_slot_and_no_further(pool_root: Path, keep: bool) -> None:
    rows = Rows(pool_root)
    directory = _core.SlotDirectory(rows.collection, [0], 100, keep=keep)
    first = directory.admit(rows.plan(one_row_each(np.arange(60))))
    second = directory.admit(rows.plan(one_row_each(np.arange(40, 100))))
    assert first is not None
    assert second is not None
    assert (directory.num_held, second.num_missing) == (100, 40)
    assert directory.admit(rows.plan(one_row_each(np.arange(100, 101)))) is None
    assert (directory.rows_hit, directory.rows_missed) == (20, 100)
    directory.release(first)
    assert directory.num_resident == (100 if keep else 60)
    third = directory.admit(rows.plan(one_row_each(np.arange(100, 140))))
    assert third is not None
    assert (third.num_missing, directory.num_held) == (40, 100)
    with pytest.raises(WindowTooLarge, match=r"101 different rows of feature.* 'a', 'd'.* 100 slots"):
        directory.admit(rows.plan(one_row_each(np.arange(101))))


def test_an_admission_that_is_dropped_is_released(pool_root: Path) -> None:
    rows = Rows(pool_root)
    directory = _core.SlotDirectory(rows.collection, [0], 10)
    admission = directory.admit(rows.plan(one_row_each(np.arange(10))))
    assert directory.num_held == 10
    del admission
    gc.collect()
    assert (directory.num_held, directory.num_resident) == (0, 10)
    directory.clear()
    assert directory.num_resident == 0


def test_what_was_released_is_not_packed(pool_root: Path) -> None:
    rows = Rows(pool_root)
    directory = _core.SlotDirectory(rows.collection, [0], 10)
    admission = directory.admit(rows.plan(one_row_each(np.arange(3))))
    assert admission is not None
    out = np.empty(admission.packed_bytes, np.uint8)
    with pytest.raises(ValueError, match="packed_bytes"):
        admission.pack(out[:-8])
    with pytest.raises(ValueError, match="multiple of 8"):
        admission.pack(np.empty(len(out) + 1, np.uint8)[1:])
    directory.forget(admission)
    with pytest.raises(StepError, match="released"):
        admission.pack(out)
    assert directory.num_resident == 0


def test_tables_whose_rows_differ_share_no_slots(pool_root: Path) -> None:
    rows = Rows(pool_root)
    with pytest.raises(ConfigError, match="embedding_dim"):
        _core.SlotDirectory(rows.collection, [0, 1], 10)


def state_of(rows: Rows) -> dict[int, np.ndarray]:
    """[rows of the table, DIM] of each table with slots."""
    rows.pool.core.flush()
    reader = _core.Reader(str(rows.pool.directory))
    state = {}
    for t in WITH_SLOTS:
        count = list(ROWS.values())[t]
        weights, of_table = np.empty(count * DIM * 4, np.uint8), np.empty(count * DIM * 4, np.uint8)
        reader.read_rows(rows.numbers[t], 0, count, weights, of_table)
        state[t] = of_table.view(np.float32).reshape(count, DIM)
    return state


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_missing_rows_are_what_the_pool_evaluates(pool_root: Path, medium: Medium) -> None:
    rng = np.random.default_rng(SEED)
    rows = Rows(pool_root, medium)
    for _ in range(3):
        batch = random_batch(rng, 50, 3)
        rows.train(batch, rng.standard_normal((50, WIDTH), np.float32))
    kept = state_of(rows)
    assert all((kept[0] == 0).all(1).any() and (kept[t] != 0).any() for t in WITH_SLOTS)  # fresh rows and others
    directory = _core.SlotDirectory(rows.collection, WITH_SLOTS, 400)
    for _ in range(3):
        plan = rows.plan(random_batch(rng, 100, 2))
        admission = directory.admit(plan)
        assert admission is not None
        weights = np.empty(admission.num_missing * DIM * 4, np.uint8)
        state = np.empty(admission.num_missing * DIM, np.float32)
        rows.pool.core.read_missing(admission, weights, state)

        arrays = unpacked(admission)
        numbers = arrays["rows"][arrays["missing"]]
        in_large = arrays["tables"][arrays["missing"]] == rows.numbers[0]
        pooled = np.empty((len(numbers), WIDTH), np.float32)
        count = len(numbers)
        single = np.concatenate([np.cumsum([0, *in_large]), np.full(count, in_large.sum())])
        single = np.concatenate([single, in_large.sum() + np.cumsum(~in_large), np.full(count, count)])
        ids = np.concatenate([numbers[in_large], numbers[~in_large]])
        rows.pool.core.evaluate(rows.plan(Batch(ids, single.astype(np.int64), None)), pooled)
        expected = np.where(in_large[:, None], pooled[:, :DIM], pooled[:, DIM + 4 : 2 * DIM + 4])
        np.testing.assert_array_equal(weights.view(np.float32).reshape(-1, DIM), expected)
        of_either = [kept[t][np.minimum(numbers, len(kept[t]) - 1)] for t in WITH_SLOTS]
        expected_state = np.where(in_large[:, None], *of_either)
        np.testing.assert_array_equal(state.reshape(-1, DIM), expected_state)

        with pytest.raises(ConfigError, match="missing rows take"):
            rows.pool.core.read_missing(admission, weights[:-1], state)
        with pytest.raises(ConfigError, match="missing rows take"):
            rows.pool.core.read_missing(admission, weights, np.empty(len(state) + 1, np.float32))


def test_a_closed_pool_reads_no_missing_rows(pool_root: Path) -> None:
    rows = Rows(pool_root)
    admission = _core.SlotDirectory(rows.collection, [0], 10).admit(rows.plan(one_row_each(np.arange(0))))
    assert admission is not None
    rows.pool.close()
    with pytest.raises(StepError, match="closed"):
        rows.pool.core.read_missing(admission, np.empty(0, np.uint8), np.empty(0, np.float32))
