"""A source that says of every sample which one it is, and small helpers that the tests of this folder share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.data.batch import Batch
from holdfast.data.block import FixedBags, JaggedBags, SampleBlock
from holdfast.data.source import Feature


class NumberedSource:
    """Sample ``i`` has the dense value ``i``, and ids ``i``; ``i, i + 1``; and a jagged bag of ``i % 3`` times ``i``.

    It counts the blocks read, and fails on those named in ``bad_blocks``.
    """

    num_dense = 1
    sample_bytes = 100

    def __init__(self, sizes, bad_blocks=()):
        self.block_sizes = np.array(sizes, np.int64)
        self.num_samples = int(self.block_sizes.sum())
        self.features = tuple(Feature(name=name, num_embeddings=1 << 40) for name in ("one", "two", "jagged"))
        self.bad_blocks = set(bad_blocks)
        self.num_blocks_read = 0
        self._lock = threading.Lock()

    def read_block(self, index):
        with self._lock:
            self.num_blocks_read += 1
        if index in self.bad_blocks:
            raise FileNotFoundError(f"block {index}")
        begin = int(self.block_sizes[:index].sum())
        numbers = np.arange(begin, begin + int(self.block_sizes[index]))
        return SampleBlock(
            labels=(numbers % 2).astype(np.float32),
            dense=numbers[:, None].astype(np.float32),
            bags=(
                FixedBags(numbers[:, None]),
                FixedBags(np.stack([numbers, numbers + 1], axis=1)),
                JaggedBags(np.repeat(numbers, numbers % 3), np.concatenate([[0], np.cumsum(numbers % 3)])),
            ),
        )

    def fingerprint(self):
        return {"kind": "numbered", "sizes": repr(self.block_sizes.tolist())}


@pytest.fixture(scope="session")
def numbered() -> type[NumberedSource]:
    return NumberedSource


@pytest.fixture(scope="session")
def assert_same_batch() -> Callable[[Batch, Batch], None]:
    def check(left: Batch, right: Batch) -> None:
        assert (left.number, left.first_sample) == (right.number, right.first_sample)
        assert left.features.keys() == right.features.keys()
        for name, ours, theirs in (
            ("dense", left.dense, right.dense),
            ("labels", left.labels, right.labels),
            ("values", left.features.values(), right.features.values()),
            ("offsets", left.features.offsets(), right.features.offsets()),
        ):
            assert ours.dtype == theirs.dtype, name
            assert torch.equal(ours, theirs), name

    return check


@pytest.fixture(scope="session")
def criteo_dir() -> Path:
    """Real rows, which are not in the tree."""
    default = Path(__file__).parents[3] / "shared" / "data" / "criteo_8k"
    path = Path(os.environ.get("HOLDFAST_CRITEO", default))
    if not (path / "train.tsv").is_file():
        pytest.skip("no Criteo data; set HOLDFAST_CRITEO to a directory with train.tsv")
    return path
