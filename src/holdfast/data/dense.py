"""From the values of dense columns to float32 features. The rule is fixed, because a trained model depends on it.

- A missing value (empty field, null, NaN) becomes ``missing_dense_value``, 0.0 unless said otherwise.
- ``"none"``: the value itself. ``"log1p"``: ``log(1 + max(value, 0))``, so negative values (Criteo has some) count as
  0. It is computed in float64 and rounded once.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ConfigError

DenseTransform = Literal["log1p", "none"]


def check_dense_transform(field: str, transform: str) -> None:
    """ConfigError that names ``field`` unless ``transform`` is one of the known ones."""
    if transform not in ("log1p", "none"):
        raise ConfigError(f"{field}: must be 'log1p' or 'none', not {transform!r}")


def check_missing_dense_value(field: str, value: float) -> None:
    """ConfigError that names ``field`` unless ``value`` is a number that a feature can be."""
    if not abs(value) <= float(np.finfo(np.float32).max):
        raise ConfigError(f"{field}: must be finite in float32, not {value}")


def dense_features(
    values: NDArray[np.int64] | NDArray[np.uint64] | NDArray[np.float64],
    missing: NDArray[np.bool_],
    *,
    transform: DenseTransform,
    missing_dense_value: float,
) -> NDArray[np.float32]:
    """float32 features of the same shape as ``values`` and ``missing``; infinite where a value is beyond float32."""
    numbers = values.astype(np.float64)
    numbers[missing] = 0.0
    if transform == "log1p":
        np.maximum(numbers, 0.0, out=numbers)
        np.log1p(numbers, out=numbers)
    with np.errstate(over="ignore"):
        features = numbers.astype(np.float32)
    if missing_dense_value != 0.0:
        features[missing] = missing_dense_value
    return features
