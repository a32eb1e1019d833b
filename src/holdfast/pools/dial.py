"""A medium with a dial: a pool's medium, made as slow as another one that is declared in figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal

from holdfast.errors import ConfigError

DialFigures = tuple[float, float, float, float, float, float, int, float, float, bool]
"""What the core makes a dial of."""
Like = Literal["pmem", "cxl-dram", "cxl-pmem", "ssd"]

# The order is the core's (DialSpec).
_FIGURES = (
    "read_bandwidth_bytes_per_s",
    "write_bandwidth_bytes_per_s",
    "stream_write_bandwidth_bytes_per_s",
    "read_latency_s",
    "write_latency_s",
    "outstanding_requests",
    "granularity_bytes",
    "sync_latency_s",
    "cache_bytes",
)
_MAY_BE_ZERO = ("read_latency_s", "write_latency_s", "sync_latency_s", "cache_bytes")

# pmem: latencies 3 and 7 times DRAM's 81 and 86 ns (TrainingCXL, IEEE Micro 2023), a third of its 115 and a sixth of
# its 79 GB/s: six Optane modules (OpenEmbedding, ICDE 2023, Table I). 60 requests: ten line fill buffers of six cores.
# cxl-dram: an expander, Gen5 x8 (Intel, CacheLib wiki, OCP demo). cxl-pmem: that medium behind this link: latencies add
# up, of the bandwidths the lower one. ssd: 165 times DRAM's latency, a fiftieth of its bandwidth (TrainingCXL), seven
# requests at a time: 520,000 reads/s; syncs assumed to take two latencies.
PRESETS: Mapping[Like, Mapping[str, float]] = MappingProxyType(
    {
        "pmem": dict(zip(_FIGURES, (39e9, 14e9, 14e9, 243e-9, 602e-9, 60, 256, 0.0, math.inf), strict=True)),
        "cxl-dram": dict(zip(_FIGURES, (17.8e9, 17.8e9, 17.8e9, 250e-9, 250e-9, 240, 64, 0.0, math.inf), strict=True)),
        "cxl-pmem": dict(zip(_FIGURES, (17.8e9, 14e9, 14e9, 412e-9, 766e-9, 60, 256, 0.0, math.inf), strict=True)),
        "ssd": dict(zip(_FIGURES, (2.3e9, 1.6e9, 1.6e9, 13.4e-6, 14.2e-6, 7, 512, 28e-6, math.inf), strict=True)),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediumDial:
    """Makes a pool's medium as slow as a declared one. It waits, and does nothing else: bytes, bits and what a
    committed step survives are the real medium's. It makes nothing faster.

    like: a medium by name, from which what is not given is taken: ``pmem``, ``cxl-dram``, ``cxl-pmem``, ``ssd``.
    read_bandwidth_bytes_per_s, write_bandwidth_bytes_per_s: each as if the other did not happen; reads and writes take
        turns.
    stream_write_bandwidth_bytes_per_s: of logs and dense states, which are long runs; left out: as other writes.
    read_latency_s, write_latency_s: of one request. outstanding_requests: that the medium has under way at a time.
    granularity_bytes: what it moves at least. sync_latency_s: of a flush of a block medium.
    cache_bytes: of the processor beside mapped memory. A batch's rows are read once; the part that it has no room for
        is read again by every lookup and by the update. Left out: it has room for all.
    duplex: reads and writes do not take turns, as over a link, which has a way for each.
    stretch: all of it so many times as slow, where a whole run's clocks are stretched.

    Raises ConfigError that names the figure.
    """

    like: Like | None = None
    read_bandwidth_bytes_per_s: float | None = None
    write_bandwidth_bytes_per_s: float | None = None
    stream_write_bandwidth_bytes_per_s: float | None = None
    read_latency_s: float | None = None
    write_latency_s: float | None = None
    outstanding_requests: float | None = None
    granularity_bytes: int | None = None
    sync_latency_s: float | None = None
    cache_bytes: float | None = None
    duplex: bool = False
    stretch: float = 1.0

    def __post_init__(self) -> None:
        if self.like is not None and self.like not in PRESETS:
            raise ConfigError(f"dial.like = {self.like!r}; it must be one of {', '.join(PRESETS)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("like", "duplex"):
                continue
            if value is None:
                if self.like is None and field.name not in ("stream_write_bandwidth_bytes_per_s", "cache_bytes"):
                    raise ConfigError(f"dial.{field.name} is missing; give it, or a medium to take it from (like)")
                continue
            may_be_zero = field.name in _MAY_BE_ZERO
            if field.name == "cache_bytes" and value == math.inf:
                continue
            if not (math.isfinite(value) and (value > 0 or (value == 0 and may_be_zero))):
                raise ConfigError(
                    f"dial.{field.name} = {value}; it must be {'0 or more' if may_be_zero else 'positive'}"
                )

    def figure(self, name: str) -> float:
        """As it is declared, before it is stretched."""
        value = getattr(self, name)
        if value is not None:
            return float(value)
        if name == "stream_write_bandwidth_bytes_per_s" and self.write_bandwidth_bytes_per_s is not None:
            return self.write_bandwidth_bytes_per_s
        return math.inf if self.like is None else float(PRESETS[self.like][name])

    @property
    def figures(self) -> DialFigures:
        """What the core makes of it: stretched."""
        read, write, stream_write, read_s, write_s, outstanding, granularity, sync_s, cache = map(self.figure, _FIGURES)
        slower = self.stretch
        return (
            read / slower,
            write / slower,
            stream_write / slower,
            read_s * slower,
            write_s * slower,
            outstanding,
            int(granularity),
            sync_s * slower,
            cache,
            self.duplex,
        )

    def __str__(self) -> str:
        read_rate, write_rate, _, read_s, write_s, *_ = self.figures
        name = "" if self.like is None else f"{self.like}, "
        stretched = "" if self.stretch == 1.0 else f", clocks stretched {self.stretch:g} times"
        return (
            f"{name}{read_rate / 1e9:.3g} and {write_rate / 1e9:.3g} GB/s, {1e9 * read_s:,.0f} and "
            f"{1e9 * write_s:,.0f} ns{stretched}"
        )
