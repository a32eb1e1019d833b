"""What the loader asks of anything that holds samples.

A source is a fixed sequence of ``num_samples`` samples, cut into blocks: runs of consecutive samples that are read and
decoded together (lines of a text file, a Parquet row group). It holds no position and no random state, and
``read_block`` may be called from several threads at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.data.block import SampleBlock
from holdfast.errors import ConfigError

DEFAULT_CAPACITY = 1 << 26
"""Rows that a table with keys can have, where nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A categorical feature: its ids lie in ``[0, num_embeddings)``; or, with keys, they are any 64 bits, and its table
    can have rows for so many of them."""

    name: str
    num_embeddings: int
    keys: bool = False


class Source(Protocol):
    """A fixed sequence of samples; see the module's text."""

    @property
    def features(self) -> tuple[Feature, ...]:
        """The categorical features, in the order of the batches' keys."""

    @property
    def num_dense(self) -> int:
        """Columns of ``Batch.dense``."""

    @property
    def num_samples(self) -> int:
        """Samples in one epoch."""

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        """Samples in each block, int64 ``[num_blocks]``, each at least 1; they sum to ``num_samples``."""

    @property
    def sample_bytes(self) -> int:
        """About how many bytes a decoded sample takes; sets how many samples are shuffled together."""

    def read_block(self, index: int) -> SampleBlock:
        """Block ``index``, decoded. Raises DataError that names file and line (or row)."""

    def fingerprint(self) -> Mapping[str, str | int]:
        """What the samples depend on, by field; equal fingerprints mean equal samples. A loader's state carries it."""


def check_columns(validation: Source | None, training: Source) -> None:
    """Raises ConfigError where there are validation data that have other columns than the training data."""
    if validation is None:
        return
    for what, theirs, ours in (
        ("num_dense", validation.num_dense, training.num_dense),
        ("features", _sizes(validation), _sizes(training)),
    ):
        if theirs != ours:
            raise ConfigError(f"validation: {what}: {theirs}, where the training data have {ours}")


def _sizes(source: Source) -> list[tuple[str, int | str]]:
    return [(feature.name, "keys" if feature.keys else feature.num_embeddings) for feature in source.features]
