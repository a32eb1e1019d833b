"""The digest of a pool sees everything that training goes on from, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast import _core
from holdfast.admin.digest import PoolDigest, dense_parts, digest_pool
from holdfast.errors import PoolNotFound
from holdfast.pools.read_only import at_rest, touched_rows
from holdfast.state.reproducibility import prepare_environment

prepare_environment()  # before any test computes

NUM_ROWS, DIM = 300, 4


class Run:
    """A small model over one table, in the open: every part of its state can be changed by a test."""

    def __init__(self, directory: Path, **pool: object) -> None:
        torch.manual_seed(1)
        self.pool = holdfast.Pool(directory, **{"seed": 3, **pool})  # type: ignore[arg-type]
        self.rows = holdfast.EmbeddingBagCollection(
            self.pool,
            [holdfast.EmbeddingBagConfig(name="t", num_embeddings=NUM_ROWS, embedding_dim=DIM, feature_names=["f"])],
            optimizer=holdfast.RowWiseAdagrad(lr=0.1),
        )
        self.model = torch.nn.Linear(DIM, 1)
        self.dense = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def checkpoint(self, **extra: object) -> holdfast.Checkpoint:
        return holdfast.Checkpoint(self.pool, model=self.model, optimizer=self.dense, extra=extra)

    def train(self, steps: int, checkpoint: holdfast.Checkpoint) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.pool.step)
            ids = torch.randint(0, NUM_ROWS, (20,), generator=generator)
            self.dense.zero_grad()
            self.model(self.rows({"f": (ids, torch.arange(20))}).values()).square().sum().backward()
            self.dense.step()
            self.rows.optimizer.step()
            checkpoint.commit(20 * (self.pool.step + 1))
        checkpoint.flush()


def trained(
    directory: Path,
    pieces: tuple[int, ...] = (6,),
    change: Callable[[Run], None] | None = None,
    extra: dict[str, object] | None = None,
    **pool: object,
) -> PoolDigest:
    for steps in pieces:
        run = Run(directory, **pool)
        with run.pool:
            checkpoint = run.checkpoint(**(extra or {}))
            checkpoint.resume()
            run.train(steps, checkpoint)
            if change is not None:
                change(run)
                run.train(1, checkpoint)
    with at_rest(directory) as (reader, _):
        return digest_pool(reader)


def test_it_does_not_depend_on_how_the_pool_is_stored(pool_root: Path) -> None:
    reference = trained(pool_root / "a")
    assert trained(pool_root / "b", pieces=(2, 0, 3, 1)) == reference
    assert trained(pool_root / "c", log_bytes=1 << 20) == reference
    assert trained(pool_root / "d", dense_interval=4) == reference
    with at_rest(pool_root / "a") as (reader, _):
        assert digest_pool(reader) == reference


def test_it_does_not_depend_on_how_the_run_was_configured(pool_root: Path) -> None:
    one = trained(pool_root / "a", extra={"config": {"train": {"workers": 1}}})
    assert trained(pool_root / "b", extra={"config": {"train": {"workers": 2}}}) == one


def change_bias(run: Run) -> None:
    with torch.no_grad():
        run.model.bias.mul_(1.0 + 2.0**-20)


def change_momentum(run: Run) -> None:
    run.dense.state[run.model.bias]["momentum_buffer"].mul_(1.0 + 2.0**-20)


def change_learning_rate(run: Run) -> None:
    run.rows.optimizer.param_groups[0]["lr"] = 0.1000001


def draw_a_random_number(run: Run) -> None:
    torch.rand(1)


@pytest.mark.parametrize("change", [change_bias, change_momentum, change_learning_rate, draw_a_random_number])
def test_it_sees_every_part_of_the_dense_state(pool_root: Path, change: Callable[[Run], None]) -> None:
    reference = trained(pool_root / "a", change=lambda run: None)
    assert trained(pool_root / "b", change=change).whole != reference.whole


def test_its_parts_say_that_only_a_generator_differs_where_a_script_seeds_torch_alone(pool_root: Path) -> None:
    parts = []
    for name in ("a", "b"):
        random.seed()
        assert trained(pool_root / name).dense
        with at_rest(pool_root / name) as (reader, _):
            parts.append(dense_parts(reader))
    one, other = parts
    assert set(one) == set(other) >= {"model", "optimizers[0]", "row_optimizers[0]", "rng.torch", "rng.numpy"}
    assert {name for name in one if one[name] != other[name]} == {"rng.python"}


def test_it_sees_the_step(pool_root: Path) -> None:
    assert trained(pool_root / "a", pieces=(6,)).whole != trained(pool_root / "b", pieces=(7,)).whole


def import_rows(directory: Path, first: int, weights: np.ndarray, state: np.ndarray) -> PoolDigest:
    """The digest of a new pool with these rows."""
    run = Run(directory)
    with run.pool:
        run.pool.core.import_rows(0, first, weights.view(np.uint8).reshape(-1), state.reshape(-1))
    with at_rest(directory) as (reader, _):
        return digest_pool(reader)


def initial_rows(directory: Path) -> np.ndarray:
    with Run(directory).pool:
        weights, state = np.empty(NUM_ROWS * DIM * 4, np.uint8), np.empty(NUM_ROWS * 4, np.uint8)
        _core.Reader(str(directory)).read_rows(0, 0, NUM_ROWS, weights, state)
    return weights.view(np.float32).reshape(NUM_ROWS, DIM)


def test_rows_with_their_initial_bits_do_not_count_whether_touched_or_not(pool_root: Path) -> None:
    initial = initial_rows(pool_root / "untouched")
    zeros = np.zeros(NUM_ROWS, np.float32)
    with at_rest(pool_root / "untouched") as (reader, _):
        untouched = digest_pool(reader)
    touched = import_rows(pool_root / "touched", 0, initial, zeros)
    assert touched == untouched
    assert touched.rows_counted == 0


def test_it_sees_one_bit_of_a_row_of_its_state_and_of_its_number(pool_root: Path) -> None:
    initial = initial_rows(pool_root / "initial")
    zeros = np.zeros(NUM_ROWS, np.float32)
    seen = {import_rows(pool_root / "same", 0, initial, zeros).whole}
    for name, row, bit in (("first", 0, 0), ("last", NUM_ROWS - 1, 0), ("sign", 7, 31)):
        weights = initial.copy()
        weights.view(np.uint32)[row, DIM - 1] ^= np.uint32(1 << bit)
        found = import_rows(pool_root / name, 0, weights, zeros)
        assert found.rows_counted == 1
        seen.add(found.whole)
    state = zeros.copy()
    state.view(np.uint32)[5] = 1
    seen.add(import_rows(pool_root / "state", 0, initial, state).whole)
    state = zeros.copy()
    state.view(np.uint32)[6] = 1
    seen.add(import_rows(pool_root / "next", 0, initial, state).whole)
    assert len(seen) == 6


def test_touched_rows_come_once_and_in_order_whatever_the_chunk(pool_root: Path) -> None:
    trained(pool_root / "a")
    reader = _core.Reader(str(pool_root / "a"))
    whole = np.concatenate([chunk.rows for chunk in touched_rows(reader, 0)])
    for chunk_rows in (1, 7, 64):
        parts = [chunk.rows for chunk in touched_rows(reader, 0, chunk_rows)]
        assert max(len(part) for part in parts) <= chunk_rows
        assert np.array_equal(np.concatenate(parts), whole)
    assert np.all(np.diff(whole.astype(np.int64)) > 0)


def test_a_directory_without_a_pool_is_named(pool_root: Path) -> None:
    with pytest.raises(PoolNotFound, match="nowhere"), at_rest(pool_root / "nowhere"):
        pass
