"""Rows that were updated elsewhere, through the seam to Python: put leaves the pool that update leaves, and a pool's
own mapping has the rows of a batch."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from holdfast import SGD, Adam, _core
from holdfast.admin.digest import digest_pool
from holdfast.errors import ConfigError, StepError

SEED = 5
ROWS = 50
DIM = 16
BATCH = 20
STATE_FLOATS = (2 * DIM, 0)  # of the tables


def make_pool(directory: Path, *, log_store: bool = False) -> tuple[_core.Pool, _core.Collection]:
    """Two tables, with state and without, each read by a feature."""
    directory.mkdir()
    specs = [
        _core.TableSpec(
            name=name, num_embeddings=ROWS, embedding_dim=DIM, dtype=0, optimizer=optimizer.kind, pooling=0,
            init_low=-1.0, init_high=1.0,
        )
        for name, optimizer in (("adam", Adam), ("sgd", SGD))
    ]  # fmt: skip
    _core.Pool.create(str(directory), SEED, 1 << 20, specs, log_store=log_store)
    pool = _core.Pool(
        str(directory), relaxed=False, dense_interval=1, grow_log=True, scratchpad_bytes=1 << 20,
        trust_after_reboot=False,
    )  # fmt: skip
    return pool, pool.collection([0, 1], [("a", 0), ("b", 1)])


def a_plan(collection: _core.Collection, seed: int) -> _core.Plan:
    ids = np.random.default_rng(seed).integers(0, ROWS, 2 * BATCH)
    return collection.plan(ids, np.arange(2 * BATCH + 1), None, [0, 1], 2, True)


def rows_of(directory: Path, plan: _core.Plan, table: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights uint8 and state float32 of the plan's rows."""
    rows = plan.rows(table)
    weights = np.empty(len(rows) * DIM * 4, np.uint8)
    state = np.empty(len(rows) * STATE_FLOATS[table] * 4, np.uint8)
    _core.Reader(str(directory)).gather_rows(table, rows, weights, state, np.empty(len(rows), np.uint8))
    return weights, state.view(np.float32)


@pytest.mark.parametrize("log_store", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_put_leaves_the_pool_that_update_leaves(pool_root: Path, log_store: bool, together: bool) -> None:
    updated, collection = make_pool(pool_root / "updated")
    put, of_put = make_pool(pool_root / "put", log_store=log_store)
    for step in range(1, 6):
        plan = a_plan(collection, step)
        capture = updated.capture(plan)
        grad = np.random.default_rng(step).standard_normal((BATCH, 2 * DIM), np.float32)
        updated.update(
            [(capture, grad)], learning_rate=0.1, epsilon=1e-6, beta1=0.9, beta2=0.99, weight_decay=0.0,
            gradient_scale=1.0,
        )  # fmt: skip
        updated.commit(step, None, [], 0)
        updated.flush()

        capture = put.capture(a_plan(of_put, step))
        parts = [([table], *rows_of(pool_root / "updated", plan, table)) for table in (0, 1)]
        if together:
            parts = [([0, 1], *(np.concatenate(arrays) for arrays in zip(*(part[1:] for part in parts), strict=True)))]
        put.put([(capture, *part) for part in parts])
        put.commit(step, None, [], 0)
    for pool in (updated, put):
        assert (pool.step, pool.row_updates) == (5, 5)
        pool.close()
    one, other = (digest_pool(_core.Reader(str(pool_root / name))) for name in ("updated", "put"))
    assert one == other


def test_what_is_refused_says_how_much_it_should_be(pool_root: Path) -> None:
    pool, collection = make_pool(pool_root / "pool")
    plan = a_plan(collection, 1)
    capture = pool.capture(plan)
    count = len(plan.rows(0))
    weights, state = np.zeros(count * DIM * 4, np.uint8), np.zeros(count * 2 * DIM, np.float32)
    sizes = f"'adam' take {weights.size} bytes of weights and {state.size} floats of state.* {weights.size - 4} and"
    with pytest.raises(ConfigError, match=sizes):
        pool.put([(capture, [0], weights[4:], state)])
    with pytest.raises(StepError, match="'sgd' were given 0 times"):
        pool.put([(capture, [0], weights, state)])


def test_the_mapping_has_the_rows_of_a_batch_once_they_are_there(pool_root: Path) -> None:
    pool, collection = make_pool(pool_root / "pool")
    plan = a_plan(collection, 1)
    assert pool.materialize(plan) == plan.num_unique
    for table, state_floats in enumerate(STATE_FLOATS):
        mapping = pool.mapping(table)
        assert mapping is not None
        address, state_address, ranges = mapping
        of_state = [(state_address, ROWS * state_floats * 4)] if state_floats else []
        assert ranges == [(address, ROWS * DIM * 4), *of_state]
        home = np.frombuffer(ctypes.string_at(*ranges[0]), np.uint8).reshape(ROWS, -1)
        weights, _ = rows_of(pool_root / "pool", plan, table)
        np.testing.assert_array_equal(home[plan.rows(table)].ravel(), weights)
        assert state_floats == 0 or not any(ctypes.string_at(*ranges[1]))
    log_pool, of_log = make_pool(pool_root / "log", log_store=True)
    assert log_pool.mapping(0) is None
    with pytest.raises(ConfigError, match="log store"):
        log_pool.materialize(a_plan(of_log, 1))
