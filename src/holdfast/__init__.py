"""holdfast: recommendation models whose tables outgrow memory, every batch durable, every resume exact to the bit."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.admin.importing_tables import import_tables
    from holdfast.data.batch import Batch, JaggedFeatures
    from holdfast.data.text_keys import text_keys
    from holdfast.device.options import DeviceConfig
    from holdfast.errors import HoldfastError
    from holdfast.group.options import GroupOptions
    from holdfast.pools.dial import MediumDial
    from holdfast.pools.log_medium import LogMedium
    from holdfast.pools.optim import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
    from holdfast.pools.pool import Pool
    from holdfast.pools.tables import EmbeddingBagConfig
    from holdfast.pools.victim_cache import VictimCache
    from holdfast.rows.collection import clip_grad_norm_
    from holdfast.rows.embedding import EmbeddingBagCollection, PooledFeatures
    from holdfast.rows.look_ahead import prefetch
    from holdfast.rows.sequences import EmbeddingCollection, JaggedEmbeddings
    from holdfast.state.reproducibility import prepare_environment
    from holdfast.train.checkpoint import Checkpoint
    from holdfast.train.metrics import ScoreCollector

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Batch",
    "Checkpoint",
    "DeviceConfig",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "GroupOptions",
    "HoldfastError",
    "JaggedEmbeddings",
    "JaggedFeatures",
    "LogMedium",
    "MediumDial",
    "Pool",
    "PooledFeatures",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "ScoreCollector",
    "VictimCache",
    "clip_grad_norm_",
    "import_tables",
    "prefetch",
    "prepare_environment",
    "text_keys",
]

# Where each name lives. Imported when it is asked for: torch takes more than a second, and `holdfast --help` none.
_HOMES = {
    "admin.importing_tables": ("import_tables",),
    "data.batch": ("Batch", "JaggedFeatures"),
    "data.text_keys": ("text_keys",),
    "device.options": ("DeviceConfig",),
    "errors": ("HoldfastError",),
    "group.options": ("GroupOptions",),
    "pools.dial": ("MediumDial",),
    "pools.log_medium": ("LogMedium",),
    "pools.optim": ("SGD", "Adagrad", "Adam", "RowWiseAdagrad", "RowWiseAdam"),
    "pools.pool": ("Pool",),
    "pools.tables": ("EmbeddingBagConfig",),
    "pools.victim_cache": ("VictimCache",),
    "rows.collection": ("clip_grad_norm_",),
    "rows.embedding": ("EmbeddingBagCollection", "PooledFeatures"),
    "rows.look_ahead": ("prefetch",),
    "rows.sequences": ("EmbeddingCollection", "JaggedEmbeddings"),
    "state.reproducibility": ("prepare_environment",),
    "train.checkpoint": ("Checkpoint",),
    "train.metrics": ("ScoreCollector",),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("holdfast")
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"holdfast.{home}"), name)
            return value
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
