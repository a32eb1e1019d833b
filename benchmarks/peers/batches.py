"""The same synthetic batches for every system: Zipf ids, scattered over the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from peers.shapes import Shape

ZIPF_EXPONENT = 1.05
SCATTER = -0x61C8864680B583EB  # odd, so that multiplying tells apart keys of 64 bits
_HASH_MULTIPLIER = 2_654_435_761  # prime, so that multiplying permutes the rows of a table of any smaller size


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """``ids`` int64 ``[F * B * L]``, feature by feature, sample by sample; ``offsets`` int64 ``[F * B + 1]``."""

    dense: Tensor
    ids: Tensor
    offsets: Tensor
    labels: Tensor


def make_batches(shape: Shape, num_batches: int, seed: int = 1) -> list[Batch]:
    """``num_batches`` distinct batches, a function of the arguments alone."""
    generator = np.random.default_rng(seed)
    ranks = np.arange(1, shape.num_embeddings + 1, dtype=np.float64)
    cumulative = np.cumsum(ranks**-ZIPF_EXPONENT)
    cumulative /= cumulative[-1]
    bags_per_batch = shape.num_tables * shape.batch_size
    # each table has its hot rows elsewhere
    shift = np.arange(shape.num_tables, dtype=np.int64)[:, None] * (shape.num_embeddings // shape.num_tables)
    offsets = torch.arange(bags_per_batch + 1, dtype=torch.int64) * shape.lookups_per_bag
    batches = []
    for _ in range(num_batches):
        uniforms = generator.random((shape.num_tables, shape.batch_size * shape.lookups_per_bag))
        rank = np.searchsorted(cumulative, uniforms, side="right").astype(np.int64)
        ids = (rank * _HASH_MULTIPLIER + shift) % shape.num_embeddings
        dense = generator.standard_normal((shape.batch_size, shape.num_dense), dtype=np.float32)
        labels = (generator.random(shape.batch_size) < 0.25).astype(np.float32)
        batches.append(
            Batch(
                dense=torch.from_numpy(dense),
                ids=torch.from_numpy(ids.reshape(-1)),
                offsets=offsets,
                labels=torch.from_numpy(labels),
            )
        )
    return batches


def with_new_ids(shape: Shape, batch: Batch, number: int, share: float) -> Tensor:
    """The ids of batch ``number``, where so many of the different ones are replaced by such as no batch had before."""
    ids = batch.ids.clone()
    of_tables = ids.view(shape.num_tables, -1)
    draw = torch.Generator().manual_seed(number)
    for table in range(shape.num_tables if share > 0 else 0):
        different = of_tables[table].unique()  # type: ignore[no-untyped-call]
        count = int(len(different) * share)
        place = torch.randperm(of_tables.shape[1], generator=draw)[:count]
        first = shape.num_embeddings + number * int(of_tables.shape[1] * share)
        of_tables[table, place] = first + torch.arange(count)
    return ids
