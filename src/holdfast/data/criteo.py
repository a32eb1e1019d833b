"""Raw Criteo text files as a source: a label, integer columns, categorical columns, between tabs, without a header.

    source = CriteoTsvSource(CriteoTsvConfig(paths=("train.tsv",), num_embeddings=100_000))

tsv.py says what a line may look like; hashing.py how categories become ids; dense.py how integers become features.
Opening reads the files once, for the index (tsv_index.py); with ``on_bad_row="skip"`` it also parses them once, because
what is skipped has to be known before a position in the stream means anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.data.block import FixedBags, SampleBlock
from holdfast.data.dense import DenseTransform, check_dense_transform, check_missing_dense_value, dense_features
from holdfast.data.hashing import hash_values
from holdfast.data.source import Feature
from holdfast.data.tsv import (
    FRONT_PAD_BYTES,
    BadLine,
    CategoryEncoding,
    ParsedLines,
    TsvLayout,
    padded_buffer,
    parse_lines,
)
from holdfast.data.tsv_index import Progress, TextBlock, index_files
from holdfast.errors import ConfigError, DataError
from holdfast.files.config import UNRECORDED

DENSE_NAMES = tuple(f"I{number}" for number in range(1, 14))
CATEGORICAL_NAMES = tuple(f"C{number}" for number in range(1, 27))

OnBadRow = Literal["error", "skip"]

_MAX_EXAMPLES = 10
MISSING_KEY = -1  # Criteo's own fields have 32 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class CriteoTsvConfig:
    """Which files, and what their columns mean.

    paths: one or more files; their samples follow each other. dense, categorical: names of the columns, in the files'
    order (a line has ``1 + len(dense) + len(categorical)`` fields); Criteo's are I1 to I13 and C1 to C26.
    num_embeddings: rows of every table, but for the columns that num_embeddings_by_column names.
    num_embeddings_by_column: rows of the tables of single columns. keys: each value has a row
    of its own, found by its key: a number is one, of a text it is what text_keys gives; num_embeddings is then how many
    rows a table can have. A missing value is the key -1. dense_transform:
    ``"log1p"`` or ``"none"``. missing_dense_value: what stands for a missing value. categorical_encoding: ``"hex"``
    (Criteo's own) or ``"text"``, any bytes. on_bad_row: ``"error"`` raises DataError at the first malformed line,
    ``"skip"`` counts it and goes on. block_lines: lines that are read together. Raises ConfigError that names the
    field.
    """

    paths: Sequence[Path | str]
    dense: tuple[str, ...] = DENSE_NAMES
    categorical: tuple[str, ...] = CATEGORICAL_NAMES
    num_embeddings: int = 1_000_000
    num_embeddings_by_column: Mapping[str, int] = field(default_factory=dict)
    dense_transform: DenseTransform = "log1p"
    missing_dense_value: float = 0.0
    categorical_encoding: CategoryEncoding = "hex"
    on_bad_row: OnBadRow = "error"
    block_lines: int = 4096
    keys: bool = field(default=False, metadata=UNRECORDED)

    def __post_init__(self) -> None:
        # a lone string would pass for a sequence of one-letter paths
        if isinstance(self.paths, str) or not self.paths:
            raise ConfigError(f"criteo paths: must be a sequence of one or more paths, not {self.paths!r}")
        if not self.dense and not self.categorical:
            raise ConfigError("criteo dense, categorical: a line needs at least one column beside the label")
        names = (*self.dense, *self.categorical)
        if len(set(names)) != len(names):
            raise ConfigError("criteo dense, categorical: two columns have one name")
        for name, num_embeddings in {"": self.num_embeddings, **self.num_embeddings_by_column}.items():
            if name and name not in self.categorical:
                raise ConfigError(f"criteo num_embeddings_by_column: there is no categorical column {name!r}")
            if num_embeddings < 1:
                raise ConfigError(f"criteo num_embeddings: must be at least 1, not {num_embeddings} {name}".rstrip())
        check_dense_transform("criteo dense_transform", self.dense_transform)
        check_missing_dense_value("criteo missing_dense_value", self.missing_dense_value)
        if self.categorical_encoding not in ("hex", "text"):
            raise ConfigError(f"criteo categorical_encoding: 'hex' or 'text', not {self.categorical_encoding!r}")
        if self.on_bad_row not in ("error", "skip"):
            raise ConfigError(f"criteo on_bad_row: must be 'error' or 'skip', not {self.on_bad_row!r}")
        if self.block_lines < 1:
            raise ConfigError(f"criteo block_lines: must be at least 1, not {self.block_lines}")

    @property
    def layout(self) -> TsvLayout:
        return TsvLayout(
            dense=self.dense,
            categorical=self.categorical,
            categorical_encoding=self.categorical_encoding,
            keys=self.keys,
        )

    @property
    def features(self) -> tuple[Feature, ...]:
        return tuple(
            Feature(
                name=name,
                num_embeddings=self.num_embeddings_by_column.get(name, self.num_embeddings),
                keys=self.keys,
            )
            for name in self.categorical
        )


@dataclass(frozen=True, slots=True)
class BadRows:
    """Malformed lines that were skipped: how many, and the first few as messages with file and line."""

    count: int = 0
    examples: tuple[str, ...] = ()

    def with_lines(self, path: Path, lines: list[BadLine]) -> BadRows:
        messages = [bad_line_message(path, line) for line in lines[: _MAX_EXAMPLES - len(self.examples)]]
        return BadRows(self.count + len(lines), (*self.examples, *messages))

    def summary(self) -> str:
        """A line for a person, and then one per example."""
        more = [f"... and {self.count - len(self.examples)} more"] if self.count > len(self.examples) else []
        return "\n".join([f"{self.count} malformed lines skipped", *self.examples, *more])


class CriteoTsvSource:
    """A source (see source.py) of the samples in text files. Opening reads the files; ``progress`` gets bytes."""

    def __init__(self, config: CriteoTsvConfig, *, progress: Progress | None = None) -> None:
        self._config = config
        self._layout = config.layout
        self._features = config.features
        self._paths = tuple(Path(path) for path in config.paths)
        self._index = index_files(self._paths, block_lines=config.block_lines, progress=progress)
        self._blocks = self._index.blocks
        self.bad_rows = BadRows()
        """The lines that were skipped, known in full once the source is open."""
        if config.on_bad_row == "skip":
            self._blocks, self.bad_rows = self._skip_bad_rows()

    @property
    def config(self) -> CriteoTsvConfig:
        return self._config

    @property
    def features(self) -> tuple[Feature, ...]:
        return self._features

    @property
    def num_dense(self) -> int:
        return len(self._config.dense)

    @property
    def num_samples(self) -> int:
        return sum(block.num_samples for block in self._blocks)

    @property
    def sample_bytes(self) -> int:
        return 8 * len(self._config.categorical) + 4 * len(self._config.dense) + 4

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        return np.array([block.num_samples for block in self._blocks], np.int64)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def read_values(self, index: int) -> ParsedLines:
        """Block ``index`` as the values in the text, neither hashed nor transformed. Raises DataError, file and
        line."""
        block = self._blocks[index]
        path = self._paths[block.file]
        parsed, bad_lines = self._parse(block)
        if bad_lines and self._config.on_bad_row == "error":
            raise DataError(bad_line_message(path, bad_lines[0]))
        if parsed.num_samples != block.num_samples:
            raise DataError(f"{path}, line {block.first_line} and after: the file has changed since it was opened")
        return parsed

    def read_block(self, index: int) -> SampleBlock:
        parsed = self.read_values(index)
        dense = dense_features(
            parsed.integers,
            parsed.integers_missing,
            transform=self._config.dense_transform,
            missing_dense_value=self._config.missing_dense_value,
        )
        return SampleBlock(
            labels=parsed.labels.astype(np.float32),
            dense=np.ascontiguousarray(dense.T),
            bags=tuple(
                FixedBags(_ids(feature, values, missing)[:, None])
                for feature, values, missing in zip(
                    self._features, parsed.categories, parsed.categories_missing, strict=True
                )
            ),
        )

    def fingerprint(self) -> Mapping[str, str | int]:
        config = self._config
        columns = (
            [(feature.name, feature.num_embeddings) for feature in self._features],
            config.dense,
            config.dense_transform,
            float(config.missing_dense_value),
            config.categorical_encoding,
            config.on_bad_row,
            config.block_lines,
            *(["keys"] if config.keys else []),
        )
        files = (self._index.file_sizes, self._index.file_checksums)
        return {"kind": "criteo_tsv", "columns": _digest(columns), "files": _digest(files)}

    def _parse(self, block: TextBlock) -> tuple[ParsedLines, list[BadLine]]:
        path = self._paths[block.file]
        num_bytes = block.end - block.begin
        buffer = padded_buffer(num_bytes)
        with path.open("rb", buffering=0) as stream:
            stream.seek(block.begin)
            view = buffer.data[FRONT_PAD_BYTES : FRONT_PAD_BYTES + num_bytes]
            num_read = 0
            while num_read < num_bytes and (part := stream.readinto(view[num_read:])):
                num_read += part
        if num_read < num_bytes:
            raise DataError(f"{path}, line {block.first_line} and after: the file is shorter than when it was opened")
        self._index.check_unchanged(block.file, path)
        return parse_lines(buffer, num_bytes, self._layout, first_line=block.first_line, ends_file=block.ends_file)

    def _skip_bad_rows(self) -> tuple[tuple[TextBlock, ...], BadRows]:
        bad_rows = BadRows()
        blocks: list[TextBlock] = []
        for block in self._blocks:
            parsed, bad_lines = self._parse(block)
            bad_rows = bad_rows.with_lines(self._paths[block.file], bad_lines)
            if parsed.num_samples:
                blocks.append(replace(block, num_samples=parsed.num_samples))
        return tuple(blocks), bad_rows


def _ids(feature: Feature, values: NDArray[np.int64], missing: NDArray[np.bool_]) -> NDArray[np.int64]:
    if feature.keys:
        return np.where(missing, MISSING_KEY, values)
    return hash_values(values, feature.num_embeddings, missing)


def bad_line_message(path: Path, bad: BadLine) -> str:
    """How an error and a summary name a malformed line."""
    return f"{path}, line {bad.line}: {bad.reason}"


def _digest(described: object) -> str:
    return hashlib.blake2b(repr(described).encode(), digest_size=16).hexdigest()
