"""Batches that are drawn before anything is timed: ids by Zipf's law, hot rows scattered over their table."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from holdfast.data import Feature, Source
from holdfast.data.block import FixedBags, SampleBlock
from holdfast.data.zipf import ZipfLaw


class Drawn:
    """A Source of whole batches, each a block. See holdfast.data.source."""

    def __init__(self, *, tables: int, rows: int, lookups: int, num_dense: int, batch: int, batches: int) -> None:
        law = ZipfLaw(num_ranks=rows, exponent=1.05)
        rng = np.random.default_rng(0)
        self.features = tuple(Feature(name=f"t{table}", num_embeddings=rows) for table in range(tables))
        self.num_dense = num_dense
        self.num_samples = batch * batches
        self.block_sizes: NDArray[np.int64] = np.full(batches, batch, np.int64)
        self.sample_bytes = 8 * tables * lookups + 4 * num_dense
        places = [rng.permutation(rows) for _ in range(tables)]
        self._blocks = [
            SampleBlock(
                labels=rng.integers(0, 2, batch).astype(np.float32),
                dense=rng.random((batch, num_dense), np.float32),
                bags=tuple(FixedBags(place[law.ranks(rng.random((batch, lookups))) - 1]) for place in places),
            )
            for _ in range(batches)
        ]

    def read_block(self, index: int) -> SampleBlock:
        return self._blocks[index]

    def fingerprint(self) -> Mapping[str, str | int]:
        return {"kind": "drawn", "tables": len(self.features), "samples": self.num_samples}


def drawn(tables: int, rows: int, lookups: int, num_dense: int, batch: int, batches: int) -> Source:
    """What a run's file names as data.source."""
    return Drawn(tables=tables, rows=rows, lookups=lookups, num_dense=num_dense, batch=batch, batches=batches)
