"""The data of a run, as [data] and [validation] describe them: holdfast's own sources, or one of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.data import CriteoTsvSource, Feature, ParquetSource, Source, SyntheticConfig, SyntheticSource
from holdfast.data.block import FixedBags, JaggedBags, SampleBlock
from holdfast.errors import ConfigError, DataError
from holdfast.files.config import OwnKeys
from holdfast.pools.directory import some_of
from holdfast.run.references import call
from holdfast.run.sections import DataConfig, RunConfig

_PROTOCOL = ("features", "num_dense", "num_samples", "block_sizes", "sample_bytes", "read_block", "fingerprint")


def open_source(data: DataConfig) -> Source:
    """The training data. Raises DataError, ConfigError."""
    if data.source is not None:
        return _open_own(data.source, OwnKeys.of(data.options, "data"))
    if data.criteo is not None:
        return _with_samples(CriteoTsvSource(data.criteo), "data.criteo.paths")
    if data.parquet is not None:
        return _with_samples(ParquetSource(data.parquet), "data.parquet.paths")
    return SyntheticSource(_synthetic(data))


def open_validation(config: RunConfig) -> Source | None:
    """The validation data, or None where the configuration names none."""
    validation, data = config.validation, config.data
    if validation is None:
        return None
    if validation.source is not None or data.source is not None:
        return _open_own_validation(config)
    files = data.criteo or data.parquet
    if files is not None:
        if not validation.paths or validation.num_samples:
            raise ConfigError(f"validation: where [data.{data.given[0]}] reads files, it is `paths` that is needed")
        if data.criteo is not None:
            return _with_samples(CriteoTsvSource(replace(data.criteo, paths=validation.paths)), "validation.paths")
        assert data.parquet is not None
        # an evaluation may do without the training data
        training_data = [path for path in data.parquet.paths if Path(path).is_file()]
        source = ParquetSource(replace(data.parquet, paths=validation.paths), beside=training_data[:1])
        # nobody keeps a state of it: without this a file that was touched meanwhile would be another one
        source.fingerprint()
        return _with_samples(source, "validation.paths")
    if validation.paths or validation.num_samples < 1:
        raise ConfigError(f"validation: where [data.{data.given[0]}] generates, it is `num_samples` that is needed")
    training = _synthetic(data)
    after = training.first_sample + training.num_samples
    return SyntheticSource(replace(training, first_sample=after, num_samples=validation.num_samples))


def _with_samples(source: CriteoTsvSource | ParquetSource, field: str) -> Source:
    """The same source. An evaluation may be days away, so that it has nothing to measure on is said before a pool is
    made."""
    if source.num_samples < 1:
        raise DataError(f"{field}: there is no sample in {some_of([str(path) for path in source.config.paths])}")
    return source


def _synthetic(data: DataConfig) -> SyntheticConfig:
    if data.criteo_shape is not None:
        return data.criteo_shape.synthetic()
    assert data.synthetic is not None
    return data.synthetic


def _open_own_validation(config: RunConfig) -> Source:
    validation, data = config.validation, config.data
    assert validation is not None
    given: dict[str, Any] = {}
    if validation.paths:
        given["paths"] = [str(path) for path in validation.paths]
    if validation.num_samples:
        given["num_samples"] = validation.num_samples
    keys = OwnKeys.of(validation.options, "validation")
    keys = keys.with_keys(OwnKeys(given, key=("validation",)))
    if validation.source is not None and validation.source != data.source:
        return _open_own(validation.source, keys)
    if not keys:
        raise ConfigError(
            "validation: it has no key, and would be the training data: give the arguments of data.source that differ"
        )
    assert data.source is not None
    return _open_own(data.source, OwnKeys.of(data.options, "data").with_keys(keys))


def _open_own(reference: str, keys: OwnKeys) -> Source:
    made = call(reference, "source", [], keys)
    missing = [name for name in _PROTOCOL if not hasattr(made, name)]
    if missing:
        raise keys.error(
            "source",
            f"{reference} returned a {type(made).__name__}, which has no {', '.join(missing)}: it must be a "
            "holdfast.data.Source",
        )
    source = CheckedSource(made, reference)
    if problem := source.problem():
        raise keys.error("source", f"{reference} returned a source whose {problem}")
    return source


class CheckedSource:
    """A source of the user's; what it gives is checked before it is used."""

    def __init__(self, source: Source, name: str) -> None:
        self._source = source
        self._name = name
        self._sizes = np.asarray(source.block_sizes)

    @property
    def features(self) -> tuple[Feature, ...]:
        return tuple(self._source.features)

    @property
    def num_dense(self) -> int:
        return self._source.num_dense

    @property
    def num_samples(self) -> int:
        return self._source.num_samples

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        return self._sizes

    @property
    def sample_bytes(self) -> int:
        return self._source.sample_bytes

    def fingerprint(self) -> Mapping[str, str | int]:
        return self._source.fingerprint()

    def problem(self) -> str:
        """What is wrong with it, in words that go on after "a source whose"; empty where nothing is."""
        features = self._source.features
        if not all(isinstance(getattr(f, "name", None), str) and _is_count(f.num_embeddings, 1) for f in features):
            return "features are not all holdfast.data.Feature: a name, and num_embeddings of 1 or more"
        if not features:
            return "features are none: a model of embeddings needs one at least"
        if len({feature.name for feature in features}) < len(features):
            return "features have one name twice"
        for name, least in (("num_dense", 0), ("num_samples", 1), ("sample_bytes", 1)):
            if not _is_count(value := getattr(self._source, name), least):
                return f"{name} is {value!r}, and no integer of {least} or more"
        if self._sizes.ndim != 1 or self._sizes.dtype != np.int64 or (self._sizes < 1).any():
            return "block_sizes are no array int64 [num_blocks] of numbers of 1 or more"
        if self._sizes.sum() != self.num_samples:
            return f"block_sizes add up to {self._sizes.sum()}, and num_samples is {self.num_samples}"
        return _problem_of_fingerprint(self.fingerprint())

    def read_block(self, index: int) -> SampleBlock:
        block: Any = self._source.read_block(index)
        if not isinstance(block, SampleBlock):
            problem = f"it is a {type(block).__name__}, and no holdfast.data.SampleBlock"
        else:
            problem = self._problem_of(block, int(self._sizes[index]))
        if problem:
            raise DataError(f"{self._name}: block {index}: {problem}")
        assert isinstance(block, SampleBlock)
        return block

    def _problem_of(self, block: SampleBlock, size: int) -> str:
        for name, shape in (("labels", (size,)), ("dense", (size, self.num_dense))):
            array = getattr(block, name)
            if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != np.float32:
                return f"{name} must be an array float32 of shape {shape}, and is {_described(array)}"
        if len(block.bags) != len(self.features):
            return f"it has bags of {len(block.bags)} features, and the source {len(self.features)} features"
        for feature, bags in zip(self.features, block.bags, strict=True):
            if problem := _problem_of_bags(bags, size):
                return f"feature {feature.name!r}: {problem}"
        return ""


def _problem_of_bags(bags: Any, size: int) -> str:
    if isinstance(bags, FixedBags):
        is_right = _is_int64(bags.ids, 2) and bags.ids.shape[0] == size
        return "" if is_right else f"ids must be an array int64 of shape ({size}, L), and are {_described(bags.ids)}"
    if not isinstance(bags, JaggedBags):
        return f"its bags are a {type(bags).__name__}, and neither FixedBags nor JaggedBags"
    if not _is_int64(bags.ids, 1) or not _is_int64(bags.offsets, 1) or bags.offsets.shape[0] != size + 1:
        return f"ids int64 [num_ids] and offsets int64 [{size + 1}] are needed"
    is_right = bags.offsets[0] == 0 and bags.offsets[-1] == bags.ids.shape[0] and (np.diff(bags.offsets) >= 0).all()
    return "" if is_right else "offsets must begin at 0, never go back, and end with the number of ids"


def _problem_of_fingerprint(fingerprint: Any) -> str:
    if not isinstance(fingerprint, Mapping) or not fingerprint:
        return f"fingerprint() is a {type(fingerprint).__name__}, and no mapping with what the samples depend on"
    for name, value in fingerprint.items():
        if not isinstance(name, str) or type(value) not in (str, int):
            return f"fingerprint() has {name!r}: {value!r}, where names are strings, and values strings or integers"
    return ""


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= least


def _is_int64(array: Any, dimensions: int) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == np.int64 and array.ndim == dimensions


def _described(value: Any) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
