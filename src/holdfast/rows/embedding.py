"""EmbeddingBagCollection: embedding bags whose rows live in a pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from holdfast.data.batch import Bags, JaggedFeatures
from holdfast.device.options import DeviceConfig
from holdfast.pools.optim import RowOptimizerSpec
from holdfast.pools.pool import Pool
from holdfast.pools.tables import EmbeddingBagConfig, normalize_all
from holdfast.rows.collection import RowCollection
from holdfast.rows.features import KeyedJagged
from holdfast.rows.row_access import LookedUp, PlannedFeatures

Features: TypeAlias = "KeyedJagged | Mapping[str, Bags] | PlannedFeatures | LookedUp"


class PooledFeatures:
    """Pooled embeddings by feature, in the shape of TorchRec's ``KeyedTensor``.

    values: float32 ``[batch_size, sum of the features' dims]``, features in the order of ``keys``.
    """

    __slots__ = ("_keys", "_lengths", "_values")

    def __init__(self, keys: list[str], lengths: list[int], values: Tensor) -> None:
        self._keys = keys
        self._lengths = lengths
        self._values = values

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def length_per_key(self) -> list[int]:
        return self._lengths

    def to_dict(self) -> dict[str, Tensor]:
        return dict(zip(self._keys, torch.split(self._values, self._lengths, dim=1), strict=True))

    def __getitem__(self, key: str) -> Tensor:
        start = sum(self._lengths[: self._keys.index(key)])
        return self._values[:, start : start + self._lengths[self._keys.index(key)]]


class EmbeddingBagCollection(RowCollection):
    """Pooled embedding tables in a pool.

    pool: makes the pool's tables where it is new; where it is not, they must be the ones that are asked for.
    tables: ``EmbeddingBagConfig`` of holdfast or of TorchRec. Several features may read one table.
    optimizer: of the rows; see ``holdfast.pools.optim``.
    device: where pooled vectors are wanted, and how rows are reached from there; default: the processor.

    The tables are no parameters of the module: ``parameters()`` and ``state_dict()`` hold the dense part of a model
    alone, so any ``torch.optim`` optimizer takes it as it is.

    Raises ConfigError where a table differs from the pool's; names the field. OutOfDeviceMemory where the device has
    no room for the scratchpad.
    """

    def __init__(
        self,
        pool: Pool,
        tables: Iterable[Any],
        *,
        optimizer: RowOptimizerSpec | None = None,
        device: DeviceConfig | None = None,
    ) -> None:
        super().__init__(pool, normalize_all(tables), optimizer, device)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._tables

    @property
    def output_width(self) -> int:
        """Columns of the pooled output: the sum of the features' dims."""
        return sum(self._dims)

    def _bags_of(self, features: KeyedJagged | Mapping[str, Bags]) -> tuple[KeyedJagged, None]:
        """Of a mapping what the tables need: the rest may be labels, texts, anything."""
        if not isinstance(features, Mapping):
            return features, None
        return JaggedFeatures.from_bags({feature: features[feature] for feature in self._columns}), None

    def forward(self, features: Features) -> PooledFeatures:
        values = features.values if isinstance(features, LookedUp) else self._look_up(features)[0]
        return PooledFeatures(self._columns, self._dims, values)
