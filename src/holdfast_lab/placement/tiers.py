"""The memory tiers that a run may keep its rows in, as a TOML file declares them: one ``[[tiers]]`` for each, and a
``[host]`` where it is known what rows cost the CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from holdfast.files.config import read_config
from holdfast_lab.placement.host import Host
from holdfast_lab.placement.row_costs import RowCosts

TierKind = Literal["hbm", "dram", "byte", "block"]

DAYS_PER_YEAR = 365
_LEAST = 1e-6
MOST_FIGURE = 1e30  # what is computed of them stays finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One tier of one node.

    kind: hbm and dram are volatile; byte (PMEM, CXL memory, tmpfs) and block (NVMe) can hold a pool.
    capacity_bytes: what rows, and the log, may take. read_bandwidth, write_bandwidth: each as if the other did not
    happen; a tier that does both takes the sum of both times. read_latency_ns: of one read alone.
    access_granularity_bytes: what the medium moves at least (a cache line, 256 B of PMEM, a sector).
    random_reads_per_s: how many reads of one granule it answers with many outstanding (IOPS); block tiers need it.
    sync_latency_ns: until a small write is durable. price_usd_per_gb: of 10^9 bytes.
    endurance_drive_writes_per_day, endurance_years: what the maker of a block device warrants. directory: on it, where
    a log would lie that is to be there alone; in a file relative to the file, as every path of a configuration.

    Raises ValueError that names the field.
    """

    name: str
    kind: TierKind
    capacity_bytes: int
    read_bandwidth_bytes_per_s: float
    write_bandwidth_bytes_per_s: float
    read_latency_ns: float
    access_granularity_bytes: int
    random_reads_per_s: float | None = None
    sync_latency_ns: float = 0.0
    price_usd_per_gb: float | None = None
    endurance_drive_writes_per_day: float | None = None
    endurance_years: float | None = None
    directory: Path | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name is empty; every tier needs one")
        may_be_zero = ("read_latency_ns", "sync_latency_ns", "price_usd_per_gb")
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or isinstance(value, str | Path):
                continue
            if not (_LEAST <= value <= MOST_FIGURE or (value == 0 and field.name in may_be_zero)):
                wanted = "0 or more" if field.name in may_be_zero else "more than 0"
                raise ValueError(f"{field.name} = {value}; it must be {wanted}, from {_LEAST:g} to {MOST_FIGURE:g}")
        if self.kind == "block" and self.random_reads_per_s is None:
            raise ValueError("random_reads_per_s is missing; a block tier needs it")
        if (self.endurance_drive_writes_per_day is None) != (self.endurance_years is None):
            raise ValueError("endurance_drive_writes_per_day and endurance_years mean something only together")
        if self.kind != "block" and self.endurance_years is not None:
            raise ValueError(f"endurance_years belongs to block tiers, and this one is of kind {self.kind}")

    @property
    def endurance_bytes(self) -> float | None:
        """What may be written before the warranty ends; None where it is not told."""
        if self.endurance_drive_writes_per_day is None or self.endurance_years is None:
            return None
        return self.endurance_drive_writes_per_day * self.endurance_years * DAYS_PER_YEAR * self.capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """A node's tiers, in any order, and its costs; host: of a pool on the tier that takes the log. Raises ValueError
    where there is no tier, or a name is there twice."""

    tiers: tuple[Tier, ...]
    host: Host | None = None

    def __post_init__(self) -> None:
        names = [tier.name for tier in self.tiers]
        if not names:
            raise ValueError("tiers is empty; at least one is needed")
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ValueError(f"tiers: the name {doubles[0]!r} is there more than once")


def read_tiers(path: Path) -> Tiers:
    """Raises ConfigError that names file and key."""
    return read_config(Tiers, path)


def tiers_toml(tiers: Sequence[Tier], notes: Sequence[str], host: Host | None = None) -> str:
    """The text of a TOML file that `read_tiers` reads; notes come first, as comments."""
    lines = [f"# {note}" for note in notes]
    for head, table in [*(("[[tiers]]", tier) for tier in tiers), ("[host]", host)]:
        if table is None:
            continue
        lines += ["", head]
        lines += _toml_values(table)
    if host is not None:
        for verb, costs in (host.verbs or {}).items():
            lines += ["", f"[host.verbs.{verb}]", *_toml_values(costs)]
    return "\n".join(lines) + "\n"


def _toml_values(table: Tier | Host | RowCosts) -> list[str]:
    """What is there of numbers and words."""
    values = {field.name: getattr(table, field.name) for field in fields(table)}
    return [
        f"{name} = {json.dumps(str(value) if isinstance(value, Path) else value)}"
        for name, value in values.items()
        if value is not None and not isinstance(value, Mapping)
    ]
