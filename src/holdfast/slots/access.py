"""Which way a collection reaches its rows: what DeviceConfig asks for, as far as pool and device allow it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from holdfast import _core
from holdfast.device.faults import open_device
from holdfast.device.options import DeviceConfig
from holdfast.errors import ConfigError
from holdfast.pools.machine import default_scratchpad_bytes
from holdfast.pools.pool import Pool
from holdfast.rows.near_memory import NearMemoryRows
from holdfast.rows.row_access import RowAccess

if TYPE_CHECKING:
    from holdfast.slots.home_mapping import HomeMapping
    from holdfast.slots.slot_pool import SlotPool
    from holdfast.slots.slot_rows import SlotRows

_SHARE_OF_FREE = 0.5  # the rest is for batches on their way, the dense part and its activations


def open_access(
    pool: Pool,
    collection: _core.Collection,
    numbers: Sequence[int],
    features: Sequence[tuple[str, int]],
    config: DeviceConfig,
) -> RowAccess:
    """numbers, features: of the collection's tables, as _core.Pool.collection takes them.

    Raises ConfigError, OutOfDeviceMemory.
    """
    device = open_device(config.kind)
    check_same_way(pool, config)
    if config.way == "near_memory":
        return NearMemoryRows(pool, collection, device)
    return open_slots(pool, collection, numbers, features, config, device=device)


def check_same_way(pool: Pool, config: DeviceConfig) -> None:
    """Raises ConfigError where the pool's collections have their rows updated elsewhere."""
    if pool.collections and pool.commits_behind != (config.way != "near_memory"):
        raise ConfigError(
            f"device.rows = {config.way!r}: another collection of {pool.directory} has its rows updated "
            f"{'on a device' if pool.commits_behind else 'near memory'}, and a pool commits all of them in one way; "
            "give all of its collections the same device.rows"
        )


def open_slots(
    pool: SlotPool,
    collection: _core.Collection,
    numbers: Sequence[int],
    features: Sequence[tuple[str, int]],
    config: DeviceConfig,
    *,
    device: torch.device,
    most_rows: Sequence[int] | None = None,
) -> SlotRows:
    """most_rows: see SlotRows.

    Raises ConfigError, OutOfDeviceMemory.
    """
    # Kernels and their compiler are imported by those who use them.
    from holdfast.slots.slot_rows import SlotRows

    _refuse_rules(pool, numbers, config.way)
    return SlotRows(
        pool,
        collection,
        numbers,
        features,
        device=device,
        num_bytes=config.scratchpad_bytes or _default_bytes(device),
        mapping=_mapping(pool, numbers, device) if config.way == "direct" else None,
        most_rows=most_rows,
    )


def _mapping(pool: SlotPool, numbers: Sequence[int], device: torch.device) -> HomeMapping | None:
    from holdfast.slots.home_mapping import HomeMapping

    mapping = HomeMapping(pool, numbers, device)
    if not mapping.refusal:
        return mapping
    warnings.warn(
        f"device.rows = 'direct': {pool.directory}: {mapping.refusal}; rows go through staging instead, as with "
        "'scratchpad'",
        RuntimeWarning,
        stacklevel=5,  # who makes the collection
    )
    return None


def _refuse_rules(pool: SlotPool, numbers: Sequence[int], way: str) -> None:
    """Of keys, that a device does not know."""
    for table in (pool.core.tables[number] for number in numbers):
        for rule, is_set in (("admit_probability or admit", table.turned_away), ("stay", table.stay)):
            if is_set:
                raise ConfigError(
                    f"device.rows = {way!r}: table '{table.name}' has {rule}, which slots of a device do not know; "
                    "set device.rows = 'near_memory', or leave it out"
                )


def _default_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return default_scratchpad_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    given_back = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # and kept by torch
    return int((free + given_back) * _SHARE_OF_FREE)
