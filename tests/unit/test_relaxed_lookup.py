"""Relaxed lookup, a batch pooled in two parts, against numpy: the rows that the step before does not have, pooled
before its update, and the others, added after it. The same bits whatever the threads and the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from holdfast import Adagrad, RowWiseAdagrad, _core
from holdfast.errors import StepError
from holdfast.pools.tables import DTYPES, POOLINGS

SEED = 5
BATCH = 300  # more bags than one thread pools at a time
ROWS = 400
# (dim, pooling, dtype, the features that read it)
TABLES = [
    (16, "sum", "fp32", ["a", "b"]),
    (5, "mean", "fp32", ["c"]),
    (32, "mean", "bf16", ["d"]),
    (3, "sum", "fp16", ["e"]),
]
FEATURES = [(name, number) for number, table in enumerate(TABLES) for name in table[3]]
WIDTH = sum(TABLES[number][0] for _, number in FEATURES)
HYPERPARAMETERS = {
    "learning_rate": 0.1, "epsilon": 1e-6, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "gradient_scale": 1.0,
}  # fmt: skip


@dataclass
class Batch:
    """bags: per feature, per sample, (ids, weights)."""

    bags: list[list[tuple[np.ndarray, np.ndarray]]]
    weighted: bool

    @classmethod
    def drawn(cls, random: np.random.Generator, *, weighted: bool, low: int = 0, high: int = ROWS) -> Batch:
        def bag() -> tuple[np.ndarray, np.ndarray]:
            length = int(random.choice([0, 1, 2, 9]))
            ids = low + (random.random(length) ** 3 * (high - low)).astype(np.int64)  # the first rows are the hot ones
            return ids, random.standard_normal(length).astype(np.float32)

        return cls([[bag() for _ in range(BATCH)] for _ in FEATURES], weighted)

    def plan(self, collection: _core.Collection) -> _core.Plan:
        bags = [bag for feature in self.bags for bag in feature]
        offsets = np.cumsum([0] + [len(ids) for ids, _ in bags])
        weights = np.concatenate([weights for _, weights in bags]) if self.weighted else None
        blocks = list(range(len(FEATURES)))
        return collection.plan(np.concatenate([ids for ids, _ in bags]), offsets, weights, blocks, len(blocks), True)

    def rows_of(self, table: int) -> set[int]:
        of_table = [bags for bags, (_, number) in zip(self.bags, FEATURES, strict=True) if number == table]
        return {int(row) for bags in of_table for ids, _ in bags for row in ids}

    def pooled(self, rows: list[np.ndarray], now: Batch) -> np.ndarray:
        """What the two parts of a lookup come to: [BATCH, WIDTH]. rows: float32 [ROWS, dim] of each table."""
        out = np.zeros((BATCH, WIDTH), np.float32)
        column = 0
        for bags, (_, number) in zip(self.bags, FEATURES, strict=True):
            dim, pooling, _, _ = TABLES[number]
            shared = now.rows_of(number)
            for sample, (ids, weights) in enumerate(bags):
                sums = {False: np.zeros(dim, np.float32), True: np.zeros(dim, np.float32)}
                for row, weight in zip(ids.tolist(), weights, strict=True):
                    sums[row in shared] += weight * rows[number][row] if self.weighted else rows[number][row]
                total = sums[False] + sums[True]
                if pooling == "mean" and len(ids) != 0:
                    total *= np.float32(1) / np.float32(len(ids))
                out[sample, column : column + dim] = total
            column += dim
        return out


@dataclass
class Training:
    """A new pool in `directory`, and the steps that it takes."""

    directory: Path
    log_store: bool = False
    ahead: bool = False
    outputs: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory.mkdir()
        specs = [
            _core.TableSpec(
                name=f"t{number}", num_embeddings=ROWS, embedding_dim=dim, dtype=DTYPES.index(dtype),
                optimizer=(Adagrad if number == 1 else RowWiseAdagrad).kind, pooling=POOLINGS.index(pooling),
                init_low=-1.0, init_high=1.0,
            )
            for number, (dim, pooling, dtype, _) in enumerate(TABLES)
        ]  # fmt: skip
        _core.Pool.create(str(self.directory), SEED, 4 << 20, specs, log_store=self.log_store)
        self.pool = _core.Pool(
            str(self.directory), relaxed=False, dense_interval=1, grow_log=True, scratchpad_bytes=1 << 20,
            trust_after_reboot=False,
        )  # fmt: skip
        self.collection = self.pool.collection(list(range(len(TABLES))), FEATURES)

    def rows(self) -> list[np.ndarray]:
        """As they are at the end of the newest step: float32 [ROWS, dim] of each table."""
        self.pool.flush()
        reader = _core.Reader(str(self.directory))
        tables = []
        for number, (dim, _, dtype, _) in enumerate(TABLES):
            weights = np.empty(ROWS * dim * (4 if dtype == "fp32" else 2), np.uint8)
            state = np.empty(ROWS * reader.tables[number].embedding_dim * 4 if number == 1 else ROWS * 4, np.uint8)
            reader.read_rows(number, 0, ROWS, weights, state)
            if dtype == "bf16":
                values = (weights.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                values = weights.view(np.float16 if dtype == "fp16" else np.float32).astype(np.float32)
            tables.append(values.reshape(ROWS, dim))
        return tables

    def update(self, capture: _core.Capture) -> None:
        grad = np.random.default_rng(self.pool.step).standard_normal((BATCH, WIDTH), np.float32)
        self.pool.update([(capture, grad)], **HYPERPARAMETERS)
        self.pool.commit(0, None, [], 0)

    def run(self, batches: list[Batch], *, check: bool = False) -> None:
        """Every batch but the first is looked up relaxed; `outputs` gets what that gave."""
        plans = [batch.plan(self.collection) for batch in batches]
        for plan in plans if self.log_store else []:
            self.pool.announce(plan)
        capture = self.pool.capture(plans[0])
        for number in range(1, len(plans)):
            now, then = plans[number - 1], plans[number]
            if self.ahead:
                assert self.pool.capture_ahead(then)
            out = np.full((BATCH, WIDTH), np.nan, np.float32)  # all of it is written
            self.pool.lookup_ahead(then, now, out)
            self.update(capture)
            capture = self.pool.capture(then)
            self.pool.lookup_rest(capture, now, out)
            self.outputs.append(out)
            if check:
                assert_same_bits(out, batches[number].pooled(self.rows(), batches[number - 1]))
        self.update(capture)
        self.pool.close()


def assert_same_bits(one: np.ndarray, other: np.ndarray) -> None:
    np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def drawn_batches(weighted: bool) -> list[Batch]:
    random = np.random.default_rng(SEED)
    return [Batch.drawn(random, weighted=weighted) for _ in range(4)]


@pytest.mark.parametrize("weighted", [False, True])
def test_own_rows_and_shared_rows_are_summed_apart_and_then_together(pool_root: Path, weighted: bool) -> None:
    Training(pool_root / "pool").run(drawn_batches(weighted), check=True)


@pytest.mark.parametrize("weighted", [False, True])
def test_neither_threads_nor_the_store_nor_when_rows_are_captured_show_in_the_bits(
    pool_root: Path, weighted: bool
) -> None:
    batches = drawn_batches(weighted)
    runs = []
    for threads in (1, 2, 5):
        for way in ({}, {"ahead": True}, {"log_store": True}):
            _core.set_num_threads(threads)
            run = Training(pool_root / str(len(runs)), **way)
            run.run(batches)
            runs.append(run)
    for run in runs[1:]:
        for one, other in zip(runs[0].outputs, run.outputs, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("log_store", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_bags_with_rows_of_one_kind_have_the_bits_of_a_plain_lookup(
    pool_root: Path, shared: bool, weighted: bool, log_store: bool
) -> None:
    random = np.random.default_rng(SEED)
    now = Batch.drawn(random, weighted=weighted, high=ROWS // 2)
    then = now if shared else Batch.drawn(random, weighted=weighted, low=ROWS // 2)
    training = Training(pool_root / "pool", log_store=log_store)
    plans = [batch.plan(training.collection) for batch in (now, then)]
    capture = training.pool.capture(plans[0])
    out, plain = np.full((2, BATCH, WIDTH), np.nan, np.float32)
    training.pool.lookup_ahead(plans[1], plans[0], out)
    training.update(capture)
    capture = training.pool.capture(plans[1])
    training.pool.lookup_rest(capture, plans[0], out)
    training.pool.lookup(capture, plain)
    assert_same_bits(out, plain)


def test_nothing_in_common_with_another_collection(pool_root: Path) -> None:
    training = Training(pool_root / "pool")
    batch = drawn_batches(False)[0]
    other = training.pool.collection(list(range(len(TABLES))), FEATURES)
    plan, foreign = batch.plan(training.collection), batch.plan(other)
    out = np.zeros((BATCH, WIDTH), np.float32)
    with pytest.raises(StepError, match="collection"):
        training.pool.lookup_ahead(plan, foreign, out)
    with pytest.raises(StepError, match="collection"):
        training.pool.lookup_rest(training.pool.capture(plan), foreign, out)
    with pytest.raises(ValueError, match="batch_size"):
        training.pool.lookup_ahead(plan, plan, out[1:])
