"""Where training data comes from: sources of samples, and the loader that makes an endless stream of batches of one.

    source = SyntheticSource(criteo_shape(num_samples=1_000_000, scale=0.1))
    with Loader(source, batch_size=2048, seed=7) as loader:
        for batch in loader: ...

source.py says what a source is, loader.py what the stream promises. Every name below is explained where it is defined.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.data.criteo import BadRows, CriteoTsvConfig, CriteoTsvSource
from holdfast.data.loader import Loader
from holdfast.data.source import Feature, Source
from holdfast.data.synthetic import SyntheticConfig, SyntheticSource, bayes_auc, criteo_shape, uniform_shape

if TYPE_CHECKING:
    from holdfast.data.convert import ConvertSummary, convert_criteo, converted_config
    from holdfast.data.parquet import ParquetConfig, ParquetSource, SparseColumn
    from holdfast.data.write import write_synthetic, written_config

# pyarrow takes its time to load and starts a thread: it is imported by what reads or writes Parquet, on first use.
_NEEDS_PYARROW = {
    "ConvertSummary": "convert",
    "ParquetConfig": "parquet",
    "ParquetSource": "parquet",
    "SparseColumn": "parquet",
    "convert_criteo": "convert",
    "converted_config": "convert",
    "write_synthetic": "write",
    "written_config": "write",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_PYARROW:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"holdfast.data.{_NEEDS_PYARROW[name]}"), name)


__all__ = [
    "BadRows",
    "ConvertSummary",
    "CriteoTsvConfig",
    "CriteoTsvSource",
    "Feature",
    "Loader",
    "ParquetConfig",
    "ParquetSource",
    "Source",
    "SparseColumn",
    "SyntheticConfig",
    "SyntheticSource",
    "bayes_auc",
    "convert_criteo",
    "converted_config",
    "criteo_shape",
    "uniform_shape",
    "write_synthetic",
    "written_config",
]
