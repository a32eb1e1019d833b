"""What has to cross the wire in a step: counted from the batches' ids alone, nothing of it asked of our code.

A scheme in which owners pool: every id goes to its owner, every bag's (partial) sum comes back from each owner that has
a row of it, and the gradient goes the same way. An id takes 4 bytes. Dense gradients are summed over the trainers, of
which each must send 2 (n - 1) / n of them, whatever the algorithm. What a rank has for itself does not travel.

- whole tables: every bag has one owner, so one vector of `dim` floats and one gradient.
- split tables: as many as there are owners of its rows.
- fetching instead: each trainer's unique rows come, and their gradients go back, with the row numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.group.layout import stride_bits
from holdfast.group.manifest import Manifest
from holdfast.group.roles import Roles, slice_of
from peers.batches import Batch
from peers.shapes import Shape

_ID_BYTES = 4
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WireBytes:
    """Of all ranks together, a step."""

    ids: float
    vectors: float
    gradients: float
    dense: float
    fetching_rows: float  # instead of ids, vectors and gradients

    @property
    def total(self) -> float:
        return self.ids + self.vectors + self.gradients + self.dense


def least_bytes(shape: Shape, batches: list[Batch], manifest: Manifest, roles: Roles, dense_bytes: int) -> WireBytes:
    """The mean over `batches`. dense_bytes: of all dense parameters."""
    ids = vectors = fetched = 0
    owner_of = np.array(manifest.owner_of)
    for batch in batches:
        of_batch = batch.ids.numpy().reshape(shape.num_tables, shape.batch_size, shape.lookups_per_bag)
        for table in range(shape.num_tables):
            owners = roles.owners[0] + owner_of[_shards(manifest, table, of_batch[table].reshape(-1))]
            owners = owners.reshape(shape.batch_size, shape.lookups_per_bag)
            for trainer in roles.trainers:
                begin, end = slice_of(shape.batch_size, trainer, len(roles.trainers))
                of_trainer = owners[begin:end]
                ids += int((of_trainer != trainer).sum())
                for owner in roles.owners:
                    if owner != trainer:
                        vectors += int((of_trainer == owner).any(axis=1).sum())
                unique, first = np.unique(of_batch[table, begin:end], return_index=True)
                fetched += int((of_trainer.reshape(-1)[first] != trainer).sum())
                del unique
    count = len(batches)
    vector_bytes = _FLOAT_BYTES * shape.embedding_dim
    trainers = len(roles.trainers)
    return WireBytes(
        ids=_ID_BYTES * ids / count,
        vectors=vector_bytes * vectors / count,
        gradients=vector_bytes * vectors / count,
        dense=2 * (trainers - 1) * dense_bytes,
        fetching_rows=(_ID_BYTES + 2 * vector_bytes) * fetched / count,
    )


def _shards(manifest: Manifest, table: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    entry = manifest.tables[table]
    if entry.table_shards == 1:
        return np.full(rows.shape, entry.first_shard)
    places = entry.places_of(rows)
    shards: NDArray[np.int64] = places >> stride_bits(entry.num_embeddings, entry.table_shards)
    return shards
