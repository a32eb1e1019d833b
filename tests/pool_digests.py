"""Digests of pools that are at rest."""

from __future__ import annotations

from pathlib import Path

from holdfast.admin.digest import digest_pool
from holdfast.pools.read_only import at_rest


def digest_of_tables(directory: Path) -> dict[str, str]:
    """Of a pool of one process or of a group, by the tables' names."""
    with at_rest(directory) as (reader, _):
        return digest_pool(reader).tables
