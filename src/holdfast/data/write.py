"""Generated samples as files, for what reads files: benchmarks, the command line, other systems.

    write_synthetic(config, "train.tsv")          # Criteo's text form: counts, and ids as 8 hexadecimal digits
    write_synthetic(config, "train.parquet")      # counts and ids as int64, bags of several ids as lists
    write_synthetic(config, "train.parquet", texts=True)      # a text for each id, such as C1-0000000000000a3f

Read back through ``written_config`` Parquet gives the same samples as SyntheticSource. Text is read with
CriteoTsvConfig, which hashes the ids as it does any category.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.data.arrow_file import ParquetAppender
from holdfast.data.output import whole_file
from holdfast.data.parquet import ParquetConfig, SparseColumn
from holdfast.data.synthetic import SyntheticConfig, SyntheticSamples, SyntheticSource
from holdfast.data.tsv_index import Progress
from holdfast.errors import ConfigError

_LABEL_NAME = "label"
_TEXT_ROWS = 4096
_TAB, _NEWLINE, _ZERO = ord("\t"), ord("\n"), ord("0")
_HEX_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


def write_synthetic(
    config: SyntheticConfig,
    out_path: Path | str,
    num_samples: int | None = None,
    *,
    row_group_samples: int = 16_384,
    texts: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write the first ``num_samples`` samples (None: the config's own number) of ``config``; returns how many.

    The suffix of ``out_path`` says how: ``.tsv`` or ``.txt`` for text, ``.parquet`` (or ``.pq``). texts: in Parquet a
    text for each id, of which ``text_keys`` makes a key. ``progress`` gets samples. The file appears when it is
    complete. Raises ConfigError for another suffix, for bags of several ids in text, and if ``out_path`` exists and
    ``overwrite`` is not set.
    """
    path = Path(out_path)
    total = config.num_samples if num_samples is None else num_samples
    source = SyntheticSource(replace(config, num_samples=total))
    if path.suffix in (".tsv", ".txt"):
        if max(config.lookups_per_table) > 1:
            raise ConfigError("synthetic lookups: text holds one id per column; write .parquet for bags of several")
        if config.drift:
            raise ConfigError("synthetic drift: text holds ids of 8 hexadecimal digits; write .parquet for keys")
        if texts:
            raise ConfigError("synthetic texts: text holds ids of 8 hexadecimal digits; write .parquet for texts")
        if max(config.rows) > 1 << 32:
            raise ConfigError("synthetic rows: text holds ids of 8 hexadecimal digits, so at most 2**32 rows")
    elif path.suffix not in (".parquet", ".pq"):
        raise ConfigError(f"output: the suffix of {path} says neither text (.tsv) nor Parquet (.parquet)")
    with whole_file(path, overwrite=overwrite) as partial_path:
        if path.suffix in (".tsv", ".txt"):
            with partial_path.open("wb", buffering=0) as out:
                for samples, num_done in _draws(source, _TEXT_ROWS):
                    out.write(_text(samples).data)
                    if progress is not None:
                        progress(num_done, total)
        else:
            with ParquetAppender(partial_path, _column_types(config, texts)) as appender:
                for samples, num_done in _draws(source, row_group_samples):
                    appender.append(_columns(config, samples, texts))
                    if progress is not None:
                        progress(num_done, total)
    return total


def written_config(config: SyntheticConfig, paths: Sequence[Path | str], *, texts: bool = False) -> ParquetConfig:
    """How to read Parquet files that ``write_synthetic`` wrote, so that the samples are SyntheticSource's own; of texts
    the ids are their keys."""
    return ParquetConfig(
        paths=paths,
        label=_LABEL_NAME,
        dense=_dense_names(config),
        sparse={
            name: SparseColumn(column=name, keys=True)
            if config.drift or texts
            else SparseColumn(column=name, num_embeddings=num_rows, hashing="identity")
            for name, num_rows in zip(_table_names(config), config.rows, strict=True)
        },
        dense_transform="log1p",
    )


def _draws(source: SyntheticSource, step: int) -> Iterator[tuple[SyntheticSamples, int]]:
    """All samples of ``source``, ``step`` at a time, with how many there are up to then."""
    for begin in range(0, source.num_samples, step):
        end = min(begin + step, source.num_samples)
        yield source.draw(begin, end - begin), end


def _dense_names(config: SyntheticConfig) -> tuple[str, ...]:
    return tuple(f"I{number}" for number in range(1, config.num_dense + 1))


def _table_names(config: SyntheticConfig) -> tuple[str, ...]:
    return tuple(f"C{number}" for number in range(1, len(config.rows) + 1))


def _column_types(config: SyntheticConfig, texts: bool) -> dict[str, str]:
    one, several = ("text", "texts") if texts else ("int64", "list")
    kinds = [one if lookups == 1 else several for lookups in config.lookups_per_table]
    return {
        _LABEL_NAME: "int8",
        **dict.fromkeys(_dense_names(config), "int64"),
        **dict(zip(_table_names(config), kinds, strict=True)),
    }


def _columns(config: SyntheticConfig, samples: SyntheticSamples, texts: bool) -> dict[str, tuple[NDArray[Any], None]]:
    columns: dict[str, tuple[NDArray[Any], None]] = {_LABEL_NAME: (samples.labels.astype(np.int8), None)}
    for position, name in enumerate(_dense_names(config)):
        columns[name] = (samples.counts[:, position], None)
    for name, ids, lookups in zip(_table_names(config), samples.ids, config.lookups_per_table, strict=True):
        values = _texts(name, ids) if texts else ids
        columns[name] = (values if lookups > 1 else values[:, 0], None)
    return columns


def _texts(name: str, ids: NDArray[np.int64]) -> NDArray[np.bytes_]:
    """``name`` and 16 hexadecimal digits for each id; of the shape of ``ids``."""
    prefix = f"{name}-".encode()
    letters = np.empty((*ids.shape, len(prefix) + 16), np.uint8)
    letters[..., : len(prefix)] = np.frombuffer(prefix, np.uint8)
    letters[..., len(prefix) :] = _HEX_DIGITS[(ids[..., None] >> np.arange(60, -4, -4)) & 0xF]
    return letters.view(f"S{letters.shape[-1]}")[..., 0]


def _text(samples: SyntheticSamples) -> NDArray[np.uint8]:
    """Lines of text, uint8 ``[num_bytes]``: all fields side by side at full width, then the bytes that are not wanted
    left out."""
    num_samples = samples.labels.shape[0]
    num_digits = max(1, len(str(int(samples.counts.max(initial=0)))))
    powers = 10 ** np.arange(num_digits - 1, -1, -1)
    counts = np.full((num_samples, samples.counts.shape[1], num_digits + 1), _TAB, np.uint8)
    counts[:, :, 1:] = (samples.counts[:, :, None] // powers) % 10 + _ZERO
    is_wanted = np.ones(counts.shape, np.bool_)
    # a leading zero is left out, but for the last digit
    is_wanted[:, :, 1:-1] = samples.counts[:, :, None] >= powers[:-1]
    ids = np.full((num_samples, len(samples.ids), 9), _TAB, np.uint8)
    for table, table_ids in enumerate(samples.ids):
        ids[:, table, 1:] = _HEX_DIGITS[(table_ids >> np.arange(28, -4, -4)) & 0xF]
    labels = samples.labels[:, None].astype(np.uint8) + np.uint8(_ZERO)
    newlines = np.full((num_samples, 1), _NEWLINE, np.uint8)
    flat_ids = ids.reshape(num_samples, -1)
    lines = np.concatenate([labels, counts.reshape(num_samples, -1), flat_ids, newlines], axis=1)
    always = np.ones((num_samples, 1), np.bool_)
    wanted = np.concatenate(
        [always, is_wanted.reshape(num_samples, -1), np.ones_like(flat_ids, np.bool_), always], axis=1
    )
    return np.asarray(lines[wanted])
