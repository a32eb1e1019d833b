"""holdfast: recommendation models whose tables outgrow memory, every batch durable, every resume exact to the bit."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.batch import Batch, JaggedFeatures
    from holdfast.dense import Checkpoint
    from holdfast.device.options import DeviceConfig
    from holdfast.embedding import EmbeddingBagCollection, PooledFeatures, clip_grad_norm_
    from holdfast.errors import HoldfastError
    from holdfast.optim import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
    from holdfast.pool import Pool
    from holdfast.sharding.options import GroupOptions
    from holdfast.tables import EmbeddingBagConfig

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Batch",
    "Checkpoint",
    "DeviceConfig",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "GroupOptions",
    "HoldfastError",
    "JaggedFeatures",
    "Pool",
    "PooledFeatures",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "clip_grad_norm_",
]

# Where each name lives. Imported when it is asked for: torch takes more than a second, and `holdfast --help` none.
_HOMES = {
    "batch": ("Batch", "JaggedFeatures"),
    "dense": ("Checkpoint",),
    "device.options": ("DeviceConfig",),
    "embedding": ("EmbeddingBagCollection", "PooledFeatures", "clip_grad_norm_"),
    "errors": ("HoldfastError",),
    "optim": ("SGD", "Adagrad", "Adam", "RowWiseAdagrad", "RowWiseAdam"),
    "pool": ("Pool",),
    "sharding.options": ("GroupOptions",),
    "tables": ("EmbeddingBagConfig",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"holdfast.{home}"), name)
            return value
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
