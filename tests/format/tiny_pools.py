"""Pools of a few kilobytes, in the states in which a process may leave them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from left_behind import left_behind
from torch import Tensor

from holdfast import Adam, EmbeddingBagCollection, EmbeddingBagConfig, JaggedFeatures, Pool, RowWiseAdagrad, _core
from holdfast.pools.dense_state import DenseState
from holdfast.pools.tables import normalize_all, to_spec
from holdfast.state import state_tree

SEED = 11
LOG_BYTES = 8192
BATCH = 2

# Two collections: two optimizers, three row dtypes and both poolings in one pool.
ADAGRAD_TABLES = [
    EmbeddingBagConfig(num_embeddings=50, embedding_dim=8, name="plain", feature_names=["a", "b"]),
    EmbeddingBagConfig(
        num_embeddings=70, embedding_dim=6, name="averaged", feature_names=["c"], data_type="bf16", pooling="mean"
    ),
]
ADAM_TABLES = [
    EmbeddingBagConfig(num_embeddings=30, embedding_dim=4, name="half", feature_names=["d"], data_type="fp16")
]
TABLES = ADAGRAD_TABLES + ADAM_TABLES


class Writer:
    """A tiny pool in training. Each step's ids and dense state are functions of its number."""

    adagrad_tables: Sequence[EmbeddingBagConfig] = ADAGRAD_TABLES
    adam_tables: Sequence[EmbeddingBagConfig] = ADAM_TABLES
    log_bytes = LOG_BYTES

    def __init__(
        self,
        directory: Path,
        *,
        dense_interval: int = 1,
        saves_dense: bool = True,
        made_with: Mapping[str, bool] | None = None,
        **options: bool,
    ) -> None:
        if not directory.exists():
            directory.mkdir(parents=True)
            specs = [to_spec(table, RowWiseAdagrad.kind) for table in normalize_all(self.adagrad_tables)]
            specs += [to_spec(table, Adam.kind) for table in normalize_all(self.adam_tables)]
            _core.Pool.create(str(directory), SEED, self.log_bytes, specs, **(made_with or {}))
        self.pool = Pool(directory, log_bytes=self.log_bytes, dense_interval=dense_interval, **options)
        self.collections = [
            EmbeddingBagCollection(self.pool, self.adagrad_tables, optimizer=RowWiseAdagrad(lr=0.5)),
            EmbeddingBagCollection(self.pool, self.adam_tables, optimizer=Adam(lr=0.05)),
        ]
        self._saves_dense = saves_dense
        if saves_dense and self.pool.step == 0:
            state, _tensors = dense_state(0)
            self.pool.core.write_dense(state.structure, state.tensors, state.tensors_bytes)

    def update(self) -> None:
        """Everything of the next step but its commit."""
        generator = torch.Generator().manual_seed(self.pool.step + 1)
        loss = torch.zeros(())
        for collection, tables in zip(self.collections, (self.adagrad_tables, self.adam_tables), strict=True):
            keys = collection.keys()
            rows = min(table.num_embeddings for table in tables)
            ids = torch.randint(0, rows, (2 * BATCH * len(keys),), generator=generator)
            pooled = collection(JaggedFeatures(keys, ids, torch.arange(0, ids.numel() + 1, 2))).values()
            loss = loss + (pooled * torch.randn(pooled.shape, generator=generator)).sum()
        loss.backward()
        for collection in self.collections:
            collection.optimizer.step()

    def step(self) -> None:
        self.update()
        state, _tensors = dense_state(self.pool.step + 1)
        due = self._saves_dense and self.pool.core.dense_due
        self.pool.commit(BATCH * (self.pool.step + 1), state if due else None)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


class RoomyWriter(Writer):
    log_bytes = 40960  # of a row log, too


def dense_tree(step: int) -> dict[str, object]:
    return {"step": step, "weight": torch.full((5, 3), float(step)), "bias": torch.arange(4) + step, "name": "tiny"}


def dense_state(step: int) -> tuple[DenseState, list[Tensor]]:
    """The dense state of a step, and the tensors that must live as long as it."""
    structure, tensors = state_tree.flatten(dense_tree(step))
    offsets, total = state_tree.layout(tensors)
    pointers = [(tensor.data_ptr(), tensor.nbytes, offset) for tensor, offset in zip(tensors, offsets, strict=True)]
    return DenseState(structure, pointers, total), tensors


def image_of(writer: Writer, to: Path) -> Path:
    """What a process that dies now leaves behind (at level `process`: what the mappings show)."""
    writer.pool.flush()
    return left_behind(writer.pool.directory, to)


# The states: of a pool of five steps.


def closed_cleanly(root: Path) -> Path:
    writer = Writer(root / "pool")
    writer.steps(5)
    writer.pool.close()
    return root / "pool"


def died_in_step_six(root: Path) -> Path:
    """Rows of step 6 are home, its commit record is not written."""
    writer = Writer(root / "pool")
    writer.steps(5)
    writer.update()
    image = image_of(writer, root / "image")
    writer.pool.close()
    return image


def died_two_steps_after_its_dense_state(root: Path) -> Path:
    """The newest dense state is step 3's; steps 4 and 5 are committed, step 6 is under way."""
    writer = Writer(root / "pool", dense_interval=3)
    writer.steps(5)
    writer.update()
    image = image_of(writer, root / "image")
    writer.pool.close()
    return image


def died_in_a_log_store_after_merges(root: Path) -> Path:
    """Most rows are home, the newest in the log; the newest dense state is some steps old."""
    writer = RoomyWriter(root / "pool", dense_interval=3, made_with={"log_store": True})
    writer.steps(20)
    writer.update()
    image = image_of(writer, root / "image")
    writer.pool.close()
    return image


def died_in_the_first_step_of_its_second_life(root: Path) -> Path:
    closed_cleanly(root)
    writer = Writer(root / "pool")
    writer.update()
    image = image_of(writer, root / "image")
    writer.pool.close()
    return image


STATES: tuple[Callable[[Path], Path], ...] = (
    closed_cleanly,
    died_in_step_six,
    died_two_steps_after_its_dense_state,
    died_in_the_first_step_of_its_second_life,
)


def rows_of(directory: Path, table: int) -> tuple[bytes, bytes]:
    """All rows' weights and state, as a reader sees them."""
    reader = _core.Reader(str(directory))
    spec = reader.tables[table]
    state_floats = (0, 1, spec.embedding_dim, 2 * spec.embedding_dim, spec.embedding_dim + 1)[spec.optimizer]
    weights = torch.empty(spec.num_embeddings * spec.embedding_dim * (4, 2, 2)[spec.dtype], dtype=torch.uint8)
    state = torch.empty(spec.num_embeddings * state_floats * 4, dtype=torch.uint8)
    reader.read_rows(table, 0, spec.num_embeddings, weights, state)
    return weights.numpy().tobytes(), state.numpy().tobytes()


def digest_of_rows(directory: Path) -> str:
    digest = hashlib.sha256()
    for table in range(len(TABLES)):
        for part in rows_of(directory, table):
            digest.update(part)
    return digest.hexdigest()


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file's bytes but those of `lock`, which is not part of the format."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "lock"
    }
