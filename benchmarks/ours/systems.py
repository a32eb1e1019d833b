"""holdfast and the bare baseline behind one interface: the embedding verbs of a step, timed one by one.

Invariants
- All start from the peers' table values and network weights, and see the peers' batches: equal optimizers give equal
  losses, and committed, bare and logged rows end with the same bits.
- All rows have been written once before anything is timed.
"""

from __future__ import annotations

import hashlib
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

import holdfast
from holdfast import _core
from holdfast.pools.read_only import KEY_RECORD
from holdfast.state.generators import rng_state
from holdfast.train.step_report import Stopwatch
from holdfast.train.training_state import TrainingState
from ours.bare import BareTables
from peers.batches import SCATTER, with_new_ids
from peers.systems import EPSILON, LEARNING_RATE

if TYPE_CHECKING:
    from peers.batches import Batch
    from peers.shapes import Shape

Train = Callable[["Batch", Tensor], None]


def initial_tables(shape: Shape, seed: int = 1) -> Iterator[Tensor]:
    """The values that ``peers.systems.fill_tables`` gives, table by table (one buffer: copy what you need)."""
    bound = 1 / math.sqrt(shape.num_embeddings)
    values = torch.empty(shape.num_embeddings, shape.embedding_dim)
    for number in range(shape.num_tables):
        yield values.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed * 1000 + number))


class System(ABC):
    """Tables with their verbs. ``step`` runs one whole step and gives the milliseconds of each verb."""

    embeddings: nn.Module

    @abstractmethod
    def attach_model(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The dense part, before the first step."""

    @abstractmethod
    def step(self, number: int, batch: Batch, train: Train) -> dict[str, float]:
        """One step on batch ``number`` of the batches that were prepared; ``train`` gets the pooled rows."""

    @abstractmethod
    def embedding_step(self, number: int, batch: Batch, grad: Tensor) -> dict[str, float]:
        """The tables alone, with ``grad`` for a gradient. What is behind the timed verbs has ended when it returns."""

    @abstractmethod
    def files(self) -> list[Path]:
        """Where the rows are, weights and state."""

    def facts(self) -> dict[str, object]:
        """What the report should know of it."""
        return {}

    @abstractmethod
    def close(self) -> None: ...


def rows_digest(system: System) -> str:
    """SHA-256 of all weights and state of a closed system."""
    digest = hashlib.sha256()
    for path in system.files():
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            digest.update(content)
    return digest.hexdigest()


class Holdfast(System):
    """The real thing: plan inline, capture, lookup, train, update, commit. What ``holdfast.train.trainer`` does,
    without its loader, so that planning counts."""

    def __init__(
        self,
        shape: Shape,
        optimizer: str,
        directory: Path,
        batches: list[Batch],
        *,
        dense_interval: int = 1,
        row_checksums: bool = False,
    ) -> None:
        self._directory = directory
        self._num_tables = shape.num_tables
        self._has_state = optimizer != "sgd"
        self._options = {"seed": 1, "dense_interval": dense_interval, "row_checksums": row_checksums}
        self._optimizer = (
            holdfast.SGD(lr=LEARNING_RATE)
            if optimizer == "sgd"
            else holdfast.RowWiseAdagrad(lr=LEARNING_RATE, eps=EPSILON)
        )
        self._open(shape)
        self._features = [
            holdfast.JaggedFeatures(self.rows.keys(), self.ids(shape, batch, number), batch.offsets)
            for number, batch in enumerate(batches)
        ]
        self._checkpoint: holdfast.Checkpoint | None = None
        self._small_state: TrainingState | None = None
        self._largest_capture_bytes = 0

    def _open(self, shape: Shape) -> None:
        self.pool = holdfast.Pool(self._directory, **self._options)  # type: ignore[arg-type]
        tables = [
            holdfast.EmbeddingBagConfig(
                name=f"t{number}",
                embedding_dim=shape.embedding_dim,
                feature_names=[f"f{number}"],
                **self.table_size(shape),
            )
            for number in range(shape.num_tables)
        ]
        self.rows = holdfast.EmbeddingBagCollection(self.pool, tables, optimizer=self._optimizer)
        self.embeddings = self.rows

    def table_size(self, shape: Shape) -> dict[str, Any]:
        return {"num_embeddings": shape.num_embeddings}

    def ids(self, shape: Shape, batch: Batch, number: int) -> Tensor:
        """What the tables are asked for of the batch, which is the so-manieth."""
        return batch.ids

    def fill(self, shape: Shape) -> None:
        for number, values in enumerate(initial_tables(shape)):
            self.pool.core.import_rows(number, 0, values.view(torch.uint8).reshape(-1).numpy(), None)

    def attach_model(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._checkpoint = holdfast.Checkpoint(self.pool, model=model, optimizer=optimizer)
        self._checkpoint.resume()

    def step(self, number: int, batch: Batch, train: Train) -> dict[str, float]:
        assert self._checkpoint is not None
        watch = Stopwatch()
        planned = self.rows.plan(self._features[number], ahead=False)
        watch.lap("plan")
        capture = self.rows.capture(planned)
        watch.lap("capture")
        pooled = self.rows.lookup(capture, planned)
        watch.lap("lookup")
        train(batch, pooled)
        watch.lap("train")
        self.rows.optimizer.step()
        watch.lap("update")
        self._checkpoint.commit(self.pool.core.cursor + batch.labels.numel())
        watch.lap("commit")
        self._largest_capture_bytes = max(self._largest_capture_bytes, capture.bytes)
        return watch.stage_ms

    def embedding_step(self, number: int, batch: Batch, grad: Tensor) -> dict[str, float]:
        if self._small_state is None:  # hardly any dense state: what the tables alone leave behind
            self._small_state = TrainingState(model=nn.Identity(), optimizers=[], row_optimizers=[self.rows.optimizer])
        watch = Stopwatch()
        planned = self.rows.plan(self._features[number], ahead=False)
        watch.lap("plan")
        capture = self.rows.capture(planned)
        watch.lap("capture")
        pooled = self.rows.lookup(capture, planned)
        watch.lap("lookup")
        torch.autograd.backward(pooled, grad)
        self.rows.optimizer.step()  # waits for the seal
        watch.lap("update")
        dense = self._small_state.collect(rng_state()) if self.pool.dense_due else None
        self.pool.commit(self.pool.core.cursor + batch.labels.numel(), dense)
        self.pool.flush()
        return watch.stage_ms

    def files(self) -> list[Path]:
        return [
            self._directory / "shard-0000" / f"table-{number:04}.{kind}"
            for number in range(self._num_tables)
            for kind in (("weights", "state") if self._has_state else ("weights",))
        ]

    def facts(self) -> dict[str, object]:
        return {
            "medium": self.pool.core.medium,
            "level": self.pool.level,
            "log_bytes": self.pool.core.log_bytes,
            "largest_capture_bytes": self._largest_capture_bytes,
            "durable_step": self.pool.durable_step,
            "step": self.pool.step,
            "instruction_set": _core.instruction_set(),
        }

    def close(self) -> None:
        self.pool.close()


class Reopened(Holdfast):
    """The same rows in a pool that was opened again, of tables with room for more. keys: each row is found by a key of
    the 64 bits. new_share: of a batch's different ids, so many that no batch had before. ttl_steps: keys that no step
    updated for longer are left behind."""

    def __init__(
        self, *arguments: Any, keys: bool, new_share: float = 0.0, ttl_steps: int | None = None, **options: Any
    ) -> None:
        self._keys = keys
        self._new_share = new_share
        self._ttl_steps = ttl_steps
        super().__init__(*arguments, **options)

    def table_size(self, shape: Shape) -> dict[str, Any]:
        rows = 16 * shape.num_embeddings
        if not self._keys:
            return {"num_embeddings": rows}
        return {"num_embeddings": None, "capacity": rows, "ttl_steps": self._ttl_steps}

    def ids(self, shape: Shape, batch: Batch, number: int) -> Tensor:
        ids = with_new_ids(shape, batch, number, self._new_share)
        return ids * SCATTER if self._keys else ids

    def fill(self, shape: Shape) -> None:
        count = shape.num_embeddings
        state = np.zeros((count, 4 * self._has_state + self._keys * KEY_RECORD.itemsize), np.uint8)
        if self._keys:
            records = np.zeros(count, KEY_RECORD)
            records["key"] = (torch.arange(count) * SCATTER).numpy()
            records["updates"] = 1
            state[:, 4 * self._has_state :] = records.view(np.uint8).reshape(count, -1)
        rows = np.arange(count, dtype=np.uint64)
        floats = state.view(np.float32).reshape(-1) if state.size else None
        for number, values in enumerate(initial_tables(shape)):
            self.pool.core.import_rows(number, rows, values.view(torch.uint8).reshape(-1).numpy(), floats)
        self.pool.close()
        self._open(shape)  # the directories are filled then


class Bare(System):
    """Lookup and update from home. ``log``: None, or "redo" (updated rows and dense state are logged after the step,
    and waited for), or "undo" (rows before lookup, dense state after the step, both waited for)."""

    def __init__(
        self,
        shape: Shape,
        optimizer: str,
        directory: Path,
        batches: list[Batch],
        *,
        library: Path,
        num_threads: int,
        dense_bytes: int,
        log: str | None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._num_tables = shape.num_tables
        self._has_state = optimizer != "sgd"
        self._log = log
        self._dense: list[Tensor] = []
        self.tables = BareTables(library, directory, shape, optimizer, dense_bytes=dense_bytes, num_threads=num_threads)
        self.embeddings = self.tables
        # uint32 bits, made before anything is timed: to the baseline's advantage
        self._rows = [batch.ids.to(torch.int32) for batch in batches]

    def fill(self, shape: Shape) -> None:
        for number, values in enumerate(initial_tables(shape)):
            self.tables.write_table(number, values)

    def attach_model(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._dense = [tensor.detach() for tensor in model.state_dict().values()]

    def step(self, number: int, batch: Batch, train: Train) -> dict[str, float]:
        watch = Stopwatch()
        self.tables.plan(batch)
        watch.lap("plan")
        if self._log == "undo":
            self.tables.log_rows()
            watch.lap("log_rows")
        pooled = self.tables.lookup(self._rows[number])
        watch.lap("lookup")
        train(batch, pooled)
        watch.lap("train")
        self.tables.update(LEARNING_RATE, EPSILON)
        watch.lap("update")
        if self._log == "redo":
            self.tables.log_rows()
            watch.lap("log_rows")
        if self._log is not None:
            self.tables.log_dense(self._dense)
            watch.lap("log_dense")
        return watch.stage_ms

    def embedding_step(self, number: int, batch: Batch, grad: Tensor) -> dict[str, float]:
        watch = Stopwatch()
        self.tables.plan(batch)
        watch.lap("plan")
        pooled = self.tables.lookup(self._rows[number])
        watch.lap("lookup")
        torch.autograd.backward(pooled, grad)
        self.tables.update(LEARNING_RATE, EPSILON)
        watch.lap("update")
        return watch.stage_ms

    def files(self) -> list[Path]:
        return [
            self._directory / f"table-{number:04}.{kind}"
            for number in range(self._num_tables)
            for kind in (("weights", "state") if self._has_state else ("weights",))
        ]

    def close(self) -> None:
        self.tables.close()
