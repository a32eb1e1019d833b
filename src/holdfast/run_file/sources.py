"""The data of a run, as [data] and [validation] describe them."""

from __future__ import annotations

from dataclasses import replace

from holdfast.data import CriteoTsvSource, ParquetSource, Source, SyntheticConfig, SyntheticSource
from holdfast.errors import ConfigError
from holdfast.run_file.sections import DataConfig, RunConfig


def open_source(data: DataConfig) -> Source:
    """The training data. Raises DataError, ConfigError."""
    if data.criteo is not None:
        return CriteoTsvSource(data.criteo)
    if data.parquet is not None:
        return ParquetSource(data.parquet)
    return SyntheticSource(_synthetic(data))


def open_validation(config: RunConfig) -> Source | None:
    """The validation data, or None where the configuration names none."""
    validation, data = config.validation, config.data
    if validation is None:
        return None
    files = data.criteo or data.parquet
    if files is not None:
        if not validation.paths or validation.num_samples:
            raise ConfigError(f"validation: where [data.{data.given[0]}] reads files, it is `paths` that is needed")
        if data.criteo is not None:
            return CriteoTsvSource(replace(data.criteo, paths=validation.paths))
        assert data.parquet is not None
        return ParquetSource(replace(data.parquet, paths=validation.paths))
    if validation.paths or validation.num_samples < 1:
        raise ConfigError(f"validation: where [data.{data.given[0]}] generates, it is `num_samples` that is needed")
    training = _synthetic(data)
    after = training.first_sample + training.num_samples
    return SyntheticSource(replace(training, first_sample=after, num_samples=validation.num_samples))


def _synthetic(data: DataConfig) -> SyntheticConfig:
    if data.criteo_shape is not None:
        return data.criteo_shape.synthetic()
    assert data.synthetic is not None
    return data.synthetic
