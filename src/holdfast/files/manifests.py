"""What the manifests of snapshots and of pools of several writers share: a table as JSON has it, and a checksum."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any, Self

import numpy as np

from holdfast import _core

# The most that a table has, or is numbered by: core/layout/superblock.cpp asks the same of its records.
_MOST = {"num_embeddings": 1 << 40, "embedding_dim": 4096, "dtype": 2, "optimizer": 4, "pooling": 1, "keys": 1}
_LEAST = {"num_embeddings": 1, "embedding_dim": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFields:
    """A table; dtype, optimizer and pooling by number, as in a table record."""

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: int
    optimizer: int
    pooling: int
    init_low: float
    init_high: float
    keys: int = 0
    ttl_steps: int = 0
    max_keys: int = 0
    admit_after: int = 0
    turned_away: tuple[int, ...] = ()
    stay: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("turned_away", "stay"):  # lists, as JSON and the core have them
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @classmethod
    def of(cls, spec: _core.TableSpec) -> Self:
        return cls(**{field.name: getattr(spec, field.name) for field in fields(cls)})

    def said(self) -> dict[str, Any]:
        """As a manifest has it; of a table without keys nothing is said of them, as before there were any."""
        of_keys = ("keys", "ttl_steps", "max_keys", "admit_after", "turned_away", "stay")
        return {name: value for name, value in asdict(self).items() if name not in of_keys or value}

    @property
    def spec(self) -> _core.TableSpec:
        return _core.TableSpec(**asdict(self))

    def check(self) -> None:
        """Raises ValueError where no table is so: a checksum says that a file was not damaged, not who wrote it."""
        try:
            _ = self.spec
        except TypeError:
            raise ValueError(f"table {self.name!r} with a field of another type, or beyond it") from None
        for name, most in _MOST.items():
            if not _LEAST.get(name, 0) <= getattr(self, name) <= most:
                raise ValueError(f"table {self.name!r} with {name} = {getattr(self, name)}")
        if not isfinite(self.init_low) or not isfinite(self.init_high):
            raise ValueError(f"table {self.name!r} with initial values that are no numbers")


def checksum_of(said: Mapping[str, Any]) -> int:
    """CRC-32C of a manifest without its checksum, however its fields are ordered or spaced."""
    canonical = json.dumps(said, sort_keys=True, separators=(",", ":")).encode()
    return _core.crc32c(0, np.frombuffer(canonical, np.uint8))
