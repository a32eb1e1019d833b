"""From raw Criteo text to Parquet, once: smaller, quicker to open, and bad lines are found before training.

    summary = convert_criteo(config, "train.parquet")
    source = ParquetSource(converted_config(config, ["train.parquet"]))   # the same samples in the same order

The Parquet file keeps the text's values, not ids: label int8; integer columns int64; categorical columns int64, the
category's value, or with ``keys`` its key (see hashing.py). Missing is null. So hash sizes and transforms may be chosen
anew when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.data.arrow_file import ParquetAppender
from holdfast.data.criteo import MISSING_KEY, BadRows, CriteoTsvConfig, CriteoTsvSource
from holdfast.data.output import whole_file
from holdfast.data.parquet import ParquetConfig, SparseColumn
from holdfast.data.tsv import ParsedLines
from holdfast.data.tsv_index import Progress
from holdfast.errors import ConfigError

LABEL_NAME = "label"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertSummary:
    """What ``convert_criteo`` did: samples written, and lines skipped."""

    num_samples: int
    bad_rows: BadRows


def convert_criteo(
    config: CriteoTsvConfig,
    out_path: Path | str,
    *,
    row_group_samples: int = 16_384,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ConvertSummary:
    """Write the samples of ``config``'s files, in order, into one Parquet file; memory is bounded by a row group.

    Of the config, paths, columns, categorical_encoding, keys and on_bad_row count. row_group_samples: rows of each row
    group (the last may be smaller), which is what shuffling moves as a whole. ``progress`` gets samples. The file
    appears when it is complete. Raises DataError (file and line) at a malformed line unless they are skipped,
    ConfigError if ``out_path`` exists and ``overwrite`` is not set.
    """
    if row_group_samples < 1:
        raise ConfigError(f"convert row_group_samples: must be at least 1, not {row_group_samples}")
    if LABEL_NAME in (*config.dense, *config.categorical):
        raise ConfigError(f"convert: a column is named {LABEL_NAME!r}, as the label is in the Parquet file")
    with whole_file(Path(out_path), overwrite=overwrite, inputs=config.paths) as partial_path:
        source = CriteoTsvSource(config)
        types = {LABEL_NAME: "int8", **dict.fromkeys((*config.dense, *config.categorical), "int64")}
        num_done = 0
        with ParquetAppender(partial_path, types) as out:
            pending: list[ParsedLines] = []
            num_pending = 0
            for index in range(source.num_blocks):
                pending.append(source.read_values(index))
                num_pending += pending[-1].num_samples
                is_last = index == source.num_blocks - 1
                while num_pending >= row_group_samples or (is_last and num_pending):
                    merged = _concatenate(pending)
                    size = min(row_group_samples, num_pending)
                    out.append(_columns(config, merged, slice(0, size)))
                    pending = [_cut(merged, slice(size, None))]
                    num_pending -= size
                    num_done += size
                    if progress is not None:
                        progress(num_done, source.num_samples)
    return ConvertSummary(num_samples=num_done, bad_rows=source.bad_rows)


def converted_config(config: CriteoTsvConfig, paths: Sequence[Path | str]) -> ParquetConfig:
    """How to read what ``convert_criteo`` wrote, with ``config``'s hash sizes and transforms: gives the same
    samples."""
    return ParquetConfig(
        paths=paths,
        label=LABEL_NAME,
        dense=config.dense,
        sparse={
            feature.name: SparseColumn(
                column=feature.name,
                num_embeddings=feature.num_embeddings,
                keys=feature.keys,
                missing_id=MISSING_KEY if feature.keys else None,
            )
            for feature in config.features
        },
        dense_transform=config.dense_transform,
        missing_dense_value=config.missing_dense_value,
    )


def _columns(
    config: CriteoTsvConfig, values: ParsedLines, rows: slice
) -> dict[str, tuple[NDArray[np.int64] | NDArray[np.uint8], NDArray[np.bool_] | None]]:
    columns: dict[str, tuple[NDArray[np.int64] | NDArray[np.uint8], NDArray[np.bool_] | None]] = {
        LABEL_NAME: (values.labels[rows], None)
    }
    for name, integers, missing in zip(config.dense, values.integers, values.integers_missing, strict=True):
        columns[name] = (integers[rows], missing[rows])
    for name, categories, missing in zip(config.categorical, values.categories, values.categories_missing, strict=True):
        columns[name] = (categories[rows], missing[rows])
    return columns


def _concatenate(parts: Sequence[ParsedLines]) -> ParsedLines:
    if len(parts) == 1:
        return parts[0]
    return ParsedLines(
        labels=np.concatenate([part.labels for part in parts]),
        integers=np.concatenate([part.integers for part in parts], axis=1),
        integers_missing=np.concatenate([part.integers_missing for part in parts], axis=1),
        categories=np.concatenate([part.categories for part in parts], axis=1),
        categories_missing=np.concatenate([part.categories_missing for part in parts], axis=1),
    )


def _cut(values: ParsedLines, rows: slice) -> ParsedLines:
    return ParsedLines(
        labels=values.labels[rows],
        integers=values.integers[:, rows],
        integers_missing=values.integers_missing[:, rows],
        categories=values.categories[:, rows],
        categories_missing=values.categories_missing[:, rows],
    )
