"""The ids of a run, batch after batch, instead of a law that they would follow.

What a batch touches, and what of it the batch before had, is counted over all batches that are replayed. Of a cache
(`caches.py` has the policies), the first half of the batches warms it up, and the misses of the second half count: one
that looks forward or back begins empty; the rows of a static one are those that the first half asks for most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ConfigError, IdError
from holdfast_lab.sim.model import Model, TableGroup, Touched

if TYPE_CHECKING:
    from holdfast.data.source import Source
    from holdfast.train.options import TrainConfig

Ids = NDArray[np.int64]

FEWEST_BATCHES = 16  # half of them are more than the window of a scratchpad that looks forward


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """batches: of each, the ids of each table, as they come; rows: of each table."""

    batches: Sequence[Sequence[Ids]]
    rows: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.batches) < FEWEST_BATCHES:
            raise ConfigError(f"--replay: {len(self.batches)} batches; it takes {FEWEST_BATCHES} at least")

    @property
    def num_rows(self) -> int:
        return sum(self.rows)

    def lookups(self, table: int) -> float:
        """Ids of a batch."""
        return float(np.mean([ids[table].size for ids in self.batches]))

    def rows_of_batches(self) -> list[Ids]:
        """Of each batch the ids of all tables, whose rows are numbered one table after the other."""
        firsts = np.concatenate([[0], np.cumsum(self.rows)[:-1]])
        return [
            np.concatenate([ids + first for ids, first in zip(batch, firsts, strict=True)]) for batch in self.batches
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedModel(Model):
    """A model whose batches are those of a replay: each table is a group of its own, in the replay's order."""

    replay: Replay

    def __post_init__(self) -> None:
        Model.__post_init__(self)
        if any(group.count != 1 for group in self.tables) or tuple(g.rows for g in self.tables) != tuple(
            self.replay.rows
        ):
            raise ValueError("tables cannot be changed: the replay is of the run's own")
        lookups = [self.replay.lookups(table) / self.batch_size for table in range(len(self.tables))]
        if not np.allclose(lookups, [group.lookups for group in self.tables]):
            raise ValueError(
                "batch_size and lookups cannot be changed: they are those of the batches that are replayed"
            )

    def touched(self) -> Sequence[Touched]:
        return [_touched(self.replay, table) for table in range(len(self.tables))]


@lru_cache(maxsize=4096)
def _touched(replay: Replay, table: int) -> Touched:
    """Means over all batches, and over all that have one before them."""
    unique = [np.unique(ids[table]) for ids in replay.batches]
    repeated_rows = [np.intersect1d(one, other, assume_unique=True).size for one, other in pairwise(unique)]
    repeated = [
        np.count_nonzero(np.isin(ids[table], before)) for before, ids in zip(unique, replay.batches[1:], strict=False)
    ]
    return Touched(
        unique=float(np.mean([rows.size for rows in unique])),
        repeated_rows=float(np.mean(repeated_rows)),
        repeated_accesses=float(np.mean(repeated)),
    )


def replay_of(
    source: Source, config: TrainConfig, *, num_batches: int, on_batch: Callable[[int], None] | None = None
) -> Replay:
    """Of the first batches that training with `config` sees. Raises ConfigError, IdError, and what the source does."""
    from holdfast.pools.tables import refuse_keys
    from holdfast.train.batches import make_loader

    refuse_keys(source.features, "a replay")
    rows = [feature.num_embeddings for feature in source.features]
    batches = []
    with make_loader(source, config, lambda batch: batch) as loader:
        for _, (batch, _) in zip(range(num_batches), loader, strict=False):
            values = batch.features.values().numpy()
            ends = batch.features.offsets()[batch.size :: batch.size].tolist()
            tables = np.split(values.astype(np.int64), ends[:-1])
            for feature, ids in zip(source.features, tables, strict=True):
                if ids.size and not 0 <= ids.min() <= ids.max() < feature.num_embeddings:
                    raise IdError(f"feature '{feature.name}', batch {batch.number}: an id lies outside of its table")
            batches.append([ids.copy() for ids in tables])
            if on_batch is not None:
                on_batch(1)
    return Replay(batches, rows)


def replayed_model(model: Model, replay: Replay) -> ReplayedModel:
    """The model with the replay's batches. model: of the same run."""
    groups = [group for group in model.tables for _ in range(group.count)]
    tables = tuple(
        TableGroup(rows=rows, dim=group.dim, lookups=replay.lookups(number) / model.batch_size)
        for number, (group, rows) in enumerate(zip(groups, replay.rows, strict=True))
    )
    same = {field.name: getattr(model, field.name) for field in fields(Model) if field.name not in ("tables", "source")}
    source = f"a run's configuration, and the ids of its first {len(replay.batches)} batches"
    return ReplayedModel(**same, tables=tables, source=source, replay=replay)
