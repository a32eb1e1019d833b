"""Samples as columns: what a source decodes, and how samples are gathered from it into a batch.

Shapes: ``n`` samples in a block, ``L`` lookups per bag. All arrays are NumPy, C-contiguous and never written to after
they are made, because threads share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.data.batch import Batch, JaggedFeatures

Rows = NDArray[np.intp] | slice
"""Which samples of a pool, in which order."""


@dataclass(frozen=True, slots=True)
class FixedBags:
    """One feature where every sample looks up the same number of ids. ids: int64 ``[n, L]``."""

    ids: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class JaggedBags:
    """One feature where samples differ in their number of ids.

    ids: int64 ``[num_ids]``; offsets: int64 ``[n + 1]``, sample ``i`` holds ``ids[offsets[i] : offsets[i + 1]]``.
    """

    ids: NDArray[np.int64]
    offsets: NDArray[np.int64]


Bags = FixedBags | JaggedBags


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBlock:
    """A run of decoded samples. labels: float32 ``[n]``; dense: float32 ``[n, num_dense]``; bags: one per feature."""

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    bags: tuple[Bags, ...]

    @property
    def num_samples(self) -> int:
        return int(self.labels.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePool:
    """Samples of one or more blocks, laid out so that any of them can be gathered quickly: row by row.

    labels: float32 ``[n]``; dense: float32 ``[n, num_dense]``; fixed_ids: int64 ``[n, sum of L]``, the ids of all
    features with fixed bags side by side; bags: per feature the columns of ``fixed_ids`` that are its, or its jagged
    bags.
    """

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    fixed_ids: NDArray[np.int64]
    bags: tuple[slice | JaggedBags, ...]

    @property
    def num_samples(self) -> int:
        return int(self.labels.shape[0])


def cut_block(block: SampleBlock, begin: int, end: int) -> SampleBlock:
    """The samples ``[begin, end)`` of a block. Shares its memory."""
    if (begin, end) == (0, block.num_samples):
        return block
    return SampleBlock(
        labels=block.labels[begin:end],
        dense=block.dense[begin:end],
        bags=tuple(_cut_bags(bags, begin, end) for bags in block.bags),
    )


def no_samples(num_features: int, num_dense: int) -> SamplePool:
    """A pool that holds none."""
    return SamplePool(
        labels=np.empty(0, np.float32),
        dense=np.empty((0, num_dense), np.float32),
        fixed_ids=np.empty((0, 0), np.int64),
        bags=(slice(0, 0),) * num_features,
    )


def pool_blocks(blocks: Sequence[SampleBlock]) -> SamplePool:
    """The samples of ``blocks`` (one or more, of the same source), one after the other."""
    ends = np.cumsum([block.num_samples for block in blocks]).tolist()
    of_features = list(zip(*(block.bags for block in blocks), strict=True))
    widths = [_common_width(bags) for bags in of_features]
    column_ends = np.cumsum([width or 0 for width in widths]).tolist()
    columns = [
        None if width is None else slice(end - width, end) for end, width in zip(column_ends, widths, strict=True)
    ]
    fixed_ids = np.empty((ends[-1], sum(width or 0 for width in widths)), np.int64)
    for block, end in zip(blocks, ends, strict=True):
        for bags, place in zip(block.bags, columns, strict=True):
            if place is not None:
                fixed_ids[end - block.num_samples : end, place] = bags.ids
    return SamplePool(
        labels=np.concatenate([block.labels for block in blocks]),
        dense=np.concatenate([block.dense for block in blocks]),
        fixed_ids=fixed_ids,
        bags=tuple(
            _pool_jagged(bags) if place is None else place for bags, place in zip(of_features, columns, strict=True)
        ),
    )


def assemble(
    keys: Sequence[str], pieces: Sequence[tuple[SamplePool, Rows]], *, number: int, first_sample: int
) -> Batch:
    """The batch that holds the named rows of every piece, in order. It owns its memory; ids are feature-major."""
    ends = np.cumsum([_num_rows(pool, rows) for pool, rows in pieces]).tolist()
    batch_size = ends[-1]
    labels = np.empty(batch_size, np.float32)
    dense = np.empty((batch_size, pieces[0][0].dense.shape[1]), np.float32)
    gathered: list[tuple[Bags, ...]] = []
    begin = 0
    for (pool, rows), end in zip(pieces, ends, strict=True):
        labels[begin:end] = pool.labels[rows]
        _gather(pool.dense, rows, dense[begin:end])
        gathered.append(_gather_bags(pool, rows))
        begin = end
    values, offsets = _feature_major(gathered, ends)
    return Batch(
        number=number,
        first_sample=first_sample,
        dense=torch.from_numpy(dense),
        features=JaggedFeatures(keys, torch.from_numpy(values), torch.from_numpy(offsets)),
        labels=torch.from_numpy(labels),
    )


def _feature_major(
    pieces: Sequence[tuple[Bags, ...]], ends: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """values ``[num_ids]`` and offsets ``[num_features * batch_size + 1]`` as JaggedFeatures wants them.

    pieces: consecutive samples of the batch, the last one of each before ``ends``.
    """
    num_features, batch_size = len(pieces[0]), ends[-1]
    lengths = np.empty((num_features, batch_size), np.int64)
    begin = 0
    for piece, end in zip(pieces, ends, strict=True):
        for feature, bags in enumerate(piece):
            lengths[feature, begin:end] = bags.ids.shape[1] if isinstance(bags, FixedBags) else np.diff(bags.offsets)
        begin = end
    offsets = np.zeros(num_features * batch_size + 1, np.int64)
    np.cumsum(lengths.ravel(), out=offsets[1:])
    values = np.empty(offsets[-1], np.int64)
    begin = 0
    for piece, end in zip(pieces, ends, strict=True):
        for feature, bags in enumerate(piece):
            target = values[offsets[feature * batch_size + begin] : offsets[feature * batch_size + end]]
            target.reshape(bags.ids.shape)[...] = bags.ids
        begin = end
    return values, offsets


def _num_rows(pool: SamplePool, rows: Rows) -> int:
    return len(range(*rows.indices(pool.num_samples))) if isinstance(rows, slice) else rows.shape[0]


def _gather(source: NDArray[Any], rows: Rows, target: NDArray[Any]) -> None:
    if isinstance(rows, slice):
        target[...] = source[rows]
    else:
        # mode="clip" lets take write straight into `target`; rows are in range by construction
        np.take(source, rows, axis=0, out=target, mode="clip")


def _gather_bags(pool: SamplePool, rows: Rows) -> tuple[Bags, ...]:
    """Every feature's bags of the named rows. One gather for all features with fixed bags: a sample's ids lie together,
    which costs a few cache lines per sample, where a gather per feature costs one per id."""
    fixed_ids = pool.fixed_ids[rows] if isinstance(rows, slice) else np.take(pool.fixed_ids, rows, axis=0, mode="clip")
    return tuple(
        FixedBags(fixed_ids[:, bags]) if isinstance(bags, slice) else _gather_jagged(bags, rows) for bags in pool.bags
    )


def _gather_jagged(bags: JaggedBags, rows: Rows) -> JaggedBags:
    begins, ends = bags.offsets[:-1][rows], bags.offsets[1:][rows]
    offsets = np.zeros(begins.shape[0] + 1, np.int64)
    np.cumsum(ends - begins, out=offsets[1:])
    if isinstance(rows, slice):
        return JaggedBags(bags.ids[begins[0] : ends[-1]] if begins.size else bags.ids[:0], offsets)
    return JaggedBags(bags.ids[np.repeat(begins - offsets[:-1], ends - begins) + np.arange(offsets[-1])], offsets)


def _cut_bags(bags: Bags, begin: int, end: int) -> Bags:
    if isinstance(bags, FixedBags):
        return FixedBags(bags.ids[begin:end])
    first, last = bags.offsets[begin], bags.offsets[end]
    return JaggedBags(bags.ids[first:last], bags.offsets[begin : end + 1] - first)


def _common_width(of_blocks: Sequence[Bags]) -> int | None:
    """How many ids each bag of a feature has, in all blocks; None where bags differ: blocks of several files may."""
    widths = {bags.ids.shape[1] if isinstance(bags, FixedBags) else None for bags in of_blocks}
    return widths.pop() if len(widths) == 1 else None


def _pool_jagged(of_blocks: Sequence[Bags]) -> JaggedBags:
    parts = [_as_jagged(bags) for bags in of_blocks]
    begins = np.cumsum([0, *(part.ids.shape[0] for part in parts)])
    offsets = [part.offsets[:-1] + begin for part, begin in zip(parts, begins, strict=False)]
    return JaggedBags(np.concatenate([part.ids for part in parts]), np.concatenate([*offsets, begins[-1:]]))


def _as_jagged(bags: Bags) -> JaggedBags:
    if isinstance(bags, JaggedBags):
        return bags
    num_samples, width = bags.ids.shape
    return JaggedBags(bags.ids.ravel(), np.arange(num_samples + 1) * width)
