"""What trains, behind one interface: the real ``Trainer`` over a pool, or an outsider's rows under the same network.

Invariants
- All see the same batches in the same order, and start from the same rows and the same network.
- Home is real before the first step, unless new tables are asked for: every row has been written. Nothing is read of a
  row that was never written, and the disk is what is measured.
- Batches are made ready by a loader's thread in every system; planning runs there in holdfast, and is part of the step
  in the others, as their design has no plan.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding_bag

import holdfast
from holdfast.data.loader import Loader
from holdfast.models.dlrm import DLRM
from holdfast.train.options import TrainConfig
from holdfast.train.trainer import Trainer
from larger.workload import CHUNK_ROWS, FileOfBatches, IdDrawer, Workload, initial_weights

LEARNING_RATE = 0.01
EPSILON = 1e-8
CACHES = ("look_forward", "lru", "static")
_MODEL_SEED = 1
_SLOT_OVERHEAD_BYTES = 40  # of the scratchpad's, see core/scratchpad/scratchpad.cpp
_ENDLESS = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a system is given. directory: empty, on its medium. cache: of the log store; window: batches that it looks
    forward. dense_interval: steps from one dense state to the next. capture_ahead: as in TrainConfig. new_tables: rows
    are as a new pool has them, where no update has written them. log: a medium of its own for the row log; victims:
    memory for rows that leave the scratchpad; dial: of the pool's own medium."""

    directory: Path
    scratchpad_bytes: int
    log_bytes: int
    cache: str = "look_forward"
    window: int = 8
    dense_interval: int = 1
    capture_ahead: bool = False
    new_tables: bool = False
    log: holdfast.LogMedium | None = None
    victims: holdfast.VictimCache | None = None
    dial: holdfast.MediumDial | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """lag: steps that are committed and not yet durable (None: the system makes no promise). background_ms: what ended
    beside the step, on the pool's own threads, added up by stage."""

    loss: float
    lag: int | None = None
    stage_ms: dict[str, float] = field(default_factory=dict)
    background_ms: dict[str, float] = field(default_factory=dict)


class System(ABC):
    """A model in training."""

    durable: str
    """What a step that has ended survives, in words."""

    @abstractmethod
    def step(self) -> Step: ...

    def traffic(self) -> dict[str, float]:
        """Counters since opening; empty where the system keeps none."""
        return {}

    def facts(self) -> dict[str, object]:
        return {}

    @abstractmethod
    def close(self) -> None: ...


def make_dlrm(workload: Workload, embeddings: nn.Module) -> DLRM:
    """The shape's network, with the same initial weights every time."""
    torch.manual_seed(_MODEL_SEED)
    shape = workload.shape
    return DLRM(
        embeddings=embeddings,
        num_dense=shape.num_dense,
        embedding_dim=shape.embedding_dim,
        num_features=shape.num_tables,
        bottom=shape.bottom,
        top=shape.top,
    )


def _dense_optimizer(model: DLRM) -> torch.optim.Optimizer:
    dense = [*model.bottom.parameters(), *model.top.parameters()]
    return torch.optim.SGD(dense, lr=LEARNING_RATE, fused=True)


class Holdfast(System):
    """The real thing. in_memory: the in-place pool, all rows in DRAM; else the log store, at level power."""

    def __init__(self, workload: Workload, source: FileOfBatches, settings: Settings, *, in_memory: bool) -> None:
        self._in_memory = in_memory
        is_new = not (settings.directory / "pool.holdfast").exists()
        self.trainer = _open_trainer(workload, source, settings, in_memory=in_memory)
        if is_new and not settings.new_tables:
            fill_pool(self.trainer.pool, workload)
        self.trainer.recover()
        if settings.cache == "static" and not in_memory:
            _keep_hottest(self.trainer.pool, workload, settings)
        self._steps: Iterator[Any] = self.trainer.steps()
        self.durable = f"every step, level {self.trainer.pool.level}"

    def step(self) -> Step:
        report = next(self._steps)
        background_ms: dict[str, float] = {}
        for stage, span in report.background:
            background_ms[stage] = background_ms.get(stage, 0.0) + 1e3 * (span.ended - span.began)
        return Step(
            loss=report.loss,
            lag=report.step - report.durable_step,
            stage_ms=report.stage_ms,
            background_ms=background_ms,
        )

    def traffic(self) -> dict[str, float]:
        core: Any = self.trainer.pool.core
        return {} if self._in_memory else dict(core.traffic())

    def facts(self) -> dict[str, object]:
        core = self.trainer.pool.core
        return {"medium": core.medium, "level": core.level, "log_bytes": core.log_bytes}

    def close(self) -> None:
        self.trainer.close()


def _open_trainer(workload: Workload, source: FileOfBatches, settings: Settings, *, in_memory: bool) -> Trainer:
    # The in-place store has no scratchpad and looks nowhere; a tmpfs directory makes a pool in memory by itself.
    pool_options: dict[str, Any] = {"seed": 1, "dense_interval": settings.dense_interval}
    train_options: dict[str, Any] = {}
    if not in_memory:
        pool_options |= {
            "medium": "block",
            "log_bytes": settings.log_bytes,
            "scratchpad_bytes": settings.scratchpad_bytes,
            "log": settings.log,
            "victims": settings.victims,
            "dial": settings.dial,
        }
        # Without batches that are announced ahead the scratchpad is an LRU cache that is filled on demand.
        train_options = {"window": settings.window if settings.cache == "look_forward" else 0}
    pool = holdfast.Pool(settings.directory, **pool_options)
    shape = workload.shape
    rows = holdfast.EmbeddingBagCollection(
        pool,
        [
            holdfast.EmbeddingBagConfig(
                name=feature.name,
                num_embeddings=feature.num_embeddings,
                embedding_dim=shape.embedding_dim,
                feature_names=[feature.name],
            )
            for feature in source.features
        ],
        optimizer=holdfast.RowWiseAdagrad(lr=LEARNING_RATE, eps=EPSILON),
    )
    model = make_dlrm(workload, rows)
    config = TrainConfig(
        batch_size=shape.batch_size,
        steps=_ENDLESS,
        shuffle=False,
        capture_ahead=settings.capture_ahead,
        **train_options,
    )
    return Trainer(
        config, pool=pool, rows=rows, model=model, dense_optimizer=_dense_optimizer(model), source=source
    )  # fmt: skip


def open_pool(workload: Workload, source: FileOfBatches, settings: Settings) -> holdfast.Pool:
    """Opens a log store that is there, and everything up to the state of its next step."""
    trainer = _open_trainer(workload, source, settings, in_memory=False)
    trainer.recover()
    return trainer.pool


def _keep_hottest(pool: holdfast.Pool, workload: Workload, settings: Settings) -> None:
    """A static cache: what the scratchpad has room for beside the rows of two batches, by a perfect profile."""
    drawer, num_tables = IdDrawer(workload), workload.shape.num_tables
    row_bytes = workload.row_bytes + _SLOT_OVERHEAD_BYTES
    room = settings.scratchpad_bytes // row_bytes // num_tables - 2 * workload.ids_per_table
    for table in range(num_tables):
        pool.core.keep_rows(table, drawer.hottest(table, max(room, 0)).tolist())


def fill_pool(pool: holdfast.Pool, workload: Workload) -> None:
    """Writes every row home. Without it the log store would read holes, and never wait for the disk."""
    for table, first, weights in _initial_chunks(workload):
        state = np.zeros(len(weights), dtype=np.float32)
        pool.core.import_rows(table, first, weights.view(np.uint8).reshape(-1), state)


def _initial_chunks(workload: Workload) -> Iterator[tuple[int, int, np.ndarray[Any, np.dtype[np.float32]]]]:
    """(table, first row, weights float32 ``[count, embedding_dim]``) of everything, table by table in order."""
    shape = workload.shape
    for table in range(shape.num_tables):
        for first in range(0, shape.num_embeddings, CHUNK_ROWS):
            count = min(CHUNK_ROWS, shape.num_embeddings - first)
            yield table, first, initial_weights(shape, table, first, count)


def initial_rows(workload: Workload) -> Iterator[tuple[int, int, np.ndarray[Any, np.dtype[np.float32]]]]:
    """The same with the state, which is zero, as the last column: float32 ``[count, embedding_dim + 1]``."""
    for table, first, weights in _initial_chunks(workload):
        rows = np.zeros((len(weights), weights.shape[1] + 1), dtype=np.float32)
        rows[:, :-1] = weights
        yield table, first, rows


class RowStore(ABC):
    """Where an outsider keeps its rows: weights and row-wise Adagrad's state side by side, so that a row is one read
    and one write."""

    durable: str

    @abstractmethod
    def read(self, rows: list[Tensor]) -> list[Tensor]:
        """Per table the rows int64 ``[n]``, ascending, as float32 ``[n, embedding_dim + 1]``: a copy. What was never
        written is zeros."""

    @abstractmethod
    def write(self, rows: list[Tensor], values: list[Tensor]) -> None:
        """All new values of one step."""

    def facts(self) -> dict[str, object]:
        return {}

    @abstractmethod
    def close(self) -> None: ...


class Outsider(System):
    """Rows of a RowStore under the same network: unique rows are read, pooled, updated in PyTorch and written back.
    Of new tables a row without state begins its life."""

    def __init__(self, workload: Workload, source: FileOfBatches, store: RowStore, *, new_tables: bool) -> None:
        self._shape = workload.shape
        self._store = store
        self._new_tables = new_tables
        self._generator = torch.Generator().manual_seed(_MODEL_SEED)
        self.durable = store.durable
        self._model = make_dlrm(workload, nn.Identity())
        self._optimizer = _dense_optimizer(self._model)
        self._loader = Loader(source, batch_size=self._shape.batch_size, seed=0, shuffle=False)
        bags = torch.arange(self._shape.batch_size, dtype=torch.int64)
        self._offsets = bags * self._shape.lookups_per_bag
        self._missed = 0

    def step(self) -> Step:
        batch = next(self._loader)
        ids = batch.features.values().view(self._shape.num_tables, -1)
        found = [torch.unique(of_table, return_inverse=True) for of_table in ids]
        rows = [unique for unique, _ in found]
        values = self._store.read(rows)
        if self._new_tables:
            for of_table in values:
                self._begin(of_table)
        weights = [of_table[:, :-1].contiguous().requires_grad_() for of_table in values]
        pooled = torch.cat(
            [
                embedding_bag(inverse, of_table, self._offsets, mode="sum")
                for of_table, (_, inverse) in zip(weights, found, strict=True)
            ],
            dim=1,
        )
        loss = binary_cross_entropy_with_logits(self._model.from_pooled(batch.dense, pooled), batch.labels)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss is {value}")
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()
        with torch.no_grad():
            for of_table, weight in zip(values, weights, strict=True):
                _rowwise_adagrad(of_table, weight)
        self._store.write(rows, values)
        return Step(loss=value)

    def _begin(self, rows: Tensor) -> None:
        """Initial weights, uniform in ±1/sqrt(num_embeddings), for rows that no update has written."""
        begins = rows[:, -1] == 0
        bound = 1.0 / math.sqrt(self._shape.num_embeddings)
        new = torch.empty(int(begins.sum()), self._shape.embedding_dim)
        rows[begins, :-1] = new.uniform_(-bound, bound, generator=self._generator)

    def facts(self) -> dict[str, object]:
        return self._store.facts()

    def close(self) -> None:
        self._loader.close()
        self._store.close()


def _rowwise_adagrad(rows: Tensor, weight: Tensor) -> None:
    """m += mean(g²); w -= lr · g / (sqrt(m) + eps); rows float32 ``[n, embedding_dim + 1]``, state last."""
    grad = weight.grad
    assert grad is not None
    rows[:, -1] += grad.square().mean(dim=1)
    scale = LEARNING_RATE / (rows[:, -1].sqrt() + EPSILON)
    rows[:, :-1] -= grad * scale[:, None]
