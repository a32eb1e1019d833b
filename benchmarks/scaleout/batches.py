"""The peers' batches, ready in memory, as our trainers take them: no loader is part of it, on either side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from holdfast.data.batch import Batch, JaggedFeatures
from holdfast.data.block import FixedBags, SampleBlock
from holdfast.data.source import Feature
from holdfast.group.roles import slice_of
from holdfast.train.step_report import Span
from peers.batches import Batch as PeerBatch
from peers.shapes import Shape

Item = TypeVar("Item")


class PreparedSource:
    """The batches as samples, in order; for what is measured before training (load), and for runs with the loader."""

    def __init__(self, shape: Shape, batches: list[PeerBatch]) -> None:
        self._shape = shape
        self._batches = batches
        self.features = tuple(
            Feature(name=f"f{number}", num_embeddings=shape.num_embeddings) for number in range(shape.num_tables)
        )
        self.num_dense = shape.num_dense
        self.num_samples = shape.batch_size * len(batches)
        self.sample_bytes = 4 * shape.num_dense + 8 * shape.num_tables * shape.lookups_per_bag
        self.block_sizes: NDArray[np.int64] = np.full(len(batches), shape.batch_size, np.int64)

    def read_block(self, index: int) -> SampleBlock:
        batch, shape = self._batches[index], self._shape
        ids = batch.ids.numpy().reshape(shape.num_tables, shape.batch_size, shape.lookups_per_bag)
        return SampleBlock(
            labels=batch.labels.numpy(), dense=batch.dense.numpy(), bags=tuple(FixedBags(bags) for bags in ids)
        )

    def fingerprint(self) -> Mapping[str, str | int]:
        return {"kind": "prepared", "shape": self._shape.name, "batches": len(self._batches)}


def part_of(batch: PeerBatch, shape: Shape, part: int, num_parts: int) -> tuple[Batch, JaggedFeatures]:
    """Part `part` of a batch: what one of `num_parts` trainers takes."""
    begin, end = slice_of(shape.batch_size, part, num_parts)
    ids = batch.ids.view(shape.num_tables, shape.batch_size, shape.lookups_per_bag)[:, begin:end].contiguous().view(-1)
    bags = shape.num_tables * (end - begin)
    features = JaggedFeatures(
        [f"f{number}" for number in range(shape.num_tables)],
        ids,
        batch.offsets[: bags + 1].contiguous(),
    )
    cut = Batch(
        number=1,
        first_sample=0,
        dense=batch.dense[begin:end].contiguous(),
        features=features,
        labels=batch.labels[begin:end].contiguous(),
    )
    return cut, features


class PreparedLoader(Generic[Item]):
    """What a trainer asks of its Loader, over batches in memory, round and round. The transform runs when a batch is
    asked for, on the thread that trains."""

    def __init__(
        self, source: PreparedSource, parts: list[Batch], batch_size: int, transform: Callable[[Batch], Item]
    ) -> None:
        self.source = source
        self.samples_per_epoch = source.num_samples
        self.origin = 0  # of its first epoch: nothing was trained on other data before
        self.samples = 0
        self._parts = parts
        self._batch_size = batch_size
        self._transform = transform

    def __iter__(self) -> Iterator[tuple[Batch, tuple[Item, Span]]]:
        return self

    def __next__(self) -> tuple[Batch, tuple[Item, Span]]:
        batch = self._parts[self.samples // self._batch_size % len(self._parts)]
        began = time.perf_counter()
        item = self._transform(batch)
        whole = Batch(
            number=1, first_sample=self.samples, dense=batch.dense, features=batch.features, labels=batch.labels
        )
        self.samples += self._batch_size
        return whole, (item, Span("main", began, time.perf_counter()))

    def seek(self, num_samples: int) -> None:
        self.samples = num_samples

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.samples = state["samples"]

    def close(self) -> None: ...
