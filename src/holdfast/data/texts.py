"""Which text has which key: the texts of a run's Parquet files, each once, and those that share a key.

Written are row groups of ``feature``, ``key`` and ``text``, in the order in which the texts come. In memory are 16
bytes a text: its key, and the FNV-1a of its bytes, by which another text of the same key is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.data.arrow_file import ListColumn, NumberColumn, ParquetAppender, ParquetReader, TextColumn
from holdfast.data.hashing import key_values, text_values
from holdfast.data.output import whole_file
from holdfast.data.parquet import ParquetConfig, ParquetSource
from holdfast.errors import ConfigError

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsSummary:
    """What `write_texts` found. counts: per feature its different texts. shared: per feature and key the texts that
    have it, where there are several."""

    counts: Mapping[str, int]
    shared: Mapping[tuple[str, int], tuple[bytes, ...]]


def write_texts(
    config: ParquetConfig, out_path: Path, *, overwrite: bool = False, progress: Progress | None = None
) -> TextsSummary:
    """Writes each text of the columns with keys once, beside its key. ``progress`` gets samples. The file appears when
    it is complete. Raises ConfigError where no column with keys holds texts."""
    ParquetSource(config)  # says what is wrong with the columns
    readers = [ParquetReader(Path(path)) for path in config.paths]
    columns = {
        name: sparse.column
        for name, sparse in config.sparse.items()
        if sparse.keys and readers[0].item_kind(sparse.column) == "text"
    }
    if not columns:
        raise ConfigError("data.parquet.sparse: no column with keys = true holds texts")
    is_utf8 = all(reader.is_utf8(column) for reader in readers for column in columns.values())
    total, done = sum(sum(reader.row_group_sizes) for reader in readers), 0
    known = {name: _KnownTexts() for name in columns}
    kinds = {"feature": "text", "key": "int64", "text": "text" if is_utf8 else "binary"}
    with whole_file(out_path, overwrite=overwrite, inputs=config.paths) as partial:
        with ParquetAppender(partial, kinds) as out:
            for reader, index in _row_groups(readers):
                found = reader.read_row_group(index, list(dict.fromkeys(columns.values())))
                for name, column in columns.items():
                    values = found[column]
                    texts = values.items if isinstance(values, ListColumn) else values
                    assert isinstance(texts, TextColumn), "what the kind says"
                    keys, new = known[name].add(texts)
                    if len(new):
                        out.append(
                            {
                                "feature": (np.full(len(new), name.encode(), object), None),
                                "key": (keys, None),
                                "text": (_bytes_of(texts, new), None),
                            }
                        )
                done += reader.row_group_sizes[index]
                if progress is not None:
                    progress(done, total)
        shared = _texts_of(partial, {name: texts.shared for name, texts in known.items()})
    return TextsSummary(counts={name: texts.count for name, texts in known.items()}, shared=shared)


@dataclass(slots=True)
class _KnownTexts:
    """The texts of one feature that came, by key and check. runs: of both, ascending by key, each longer than the next.
    shared: keys that came with several texts."""

    runs: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = field(default_factory=list)
    shared: set[int] = field(default_factory=set)
    count: int = 0

    def add(self, texts: TextColumn) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
        """The keys of texts that did not come before, and their places in the column; each once, as they come."""
        places = np.flatnonzero(~texts.missing)
        starts, lengths = texts.starts[places], texts.lengths[places]
        keys, checks = key_values(texts.data, starts, lengths), text_values(texts.data, starts, lengths)
        order = np.lexsort((checks, keys))  # stable: of equal texts the first stays first
        is_first = np.ones(len(order), np.bool_)
        is_first[1:] = np.diff(keys[order]).astype(np.bool_) | np.diff(checks[order]).astype(np.bool_)
        order = order[is_first]
        is_new = np.ones(len(order), np.bool_)
        for run in self.runs:
            is_new &= ~self._are_in(run, keys[order], checks[order])
        order = order[is_new]
        new_keys = keys[order]
        self.shared.update(new_keys[1:][new_keys[1:] == new_keys[:-1]].tolist())
        self.count += len(order)
        self._merge(new_keys, checks[order])
        order.sort()
        return keys[order], places[order]

    def _are_in(
        self, run: tuple[NDArray[np.int64], NDArray[np.int64]], keys: NDArray[np.int64], checks: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        known_keys, known_checks = run
        places = np.minimum(np.searchsorted(known_keys, keys), len(known_keys) - 1)
        has_key = known_keys[places] == keys
        found: NDArray[np.bool_] = has_key & (known_checks[places] == checks)
        for other in np.flatnonzero(has_key & ~found).tolist():
            self.shared.add(int(keys[other]))
            end = int(np.searchsorted(known_keys, keys[other], side="right"))
            found[other] = bool((known_checks[places[other] : end] == checks[other]).any())
        return found

    def _merge(self, keys: NDArray[np.int64], checks: NDArray[np.int64]) -> None:
        if not len(keys):
            return
        while self.runs and len(self.runs[-1][0]) <= len(keys):
            earlier_keys, earlier_checks = self.runs.pop()
            keys, checks = np.concatenate((earlier_keys, keys)), np.concatenate((earlier_checks, checks))
            order = np.argsort(keys, kind="stable")
            keys, checks = keys[order], checks[order]
        self.runs.append((keys, checks))


def _row_groups(readers: list[ParquetReader]) -> Iterator[tuple[ParquetReader, int]]:
    for reader in readers:
        yield from ((reader, index) for index in range(len(reader.row_group_sizes)))


def _bytes_of(texts: TextColumn, places: NDArray[np.intp]) -> NDArray[np.object_]:
    found = np.empty(len(places), object)
    for number, (start, length) in enumerate(zip(texts.starts[places], texts.lengths[places], strict=True)):
        found[number] = texts.data[start : start + length].tobytes()
    return found


def _texts_of(path: Path, shared: Mapping[str, set[int]]) -> dict[tuple[str, int], tuple[bytes, ...]]:
    """The texts of keys that several have, from the file that was written."""
    found: dict[tuple[str, int], tuple[bytes, ...]] = {}
    if not any(shared.values()):
        return found
    reader = ParquetReader(path)
    for _, index in _row_groups([reader]):
        columns = reader.read_row_group(index, ["feature", "key", "text"])
        features, keys, texts = columns["feature"], columns["key"], columns["text"]
        assert isinstance(features, TextColumn) and isinstance(keys, NumberColumn) and isinstance(texts, TextColumn)
        name = _bytes_of(features, np.array([0]))[0].decode()
        places = np.flatnonzero(np.isin(keys.values, list(shared[name])))
        for key, text in zip(keys.values[places].tolist(), _bytes_of(texts, places), strict=True):
            found[name, key] = (*found.get((name, key), ()), text)
    return found
