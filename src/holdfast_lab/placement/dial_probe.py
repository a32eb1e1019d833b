"""Reads a dialled medium's figures back: real reads and writes of a file there, timed from outside.

A dial waits, so it makes nothing faster: where the real medium is slower than the declared one, its own figure comes
back, and a note says so.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast import _core
from holdfast.errors import ConfigError
from holdfast.pools.dial import PRESETS, MediumDial
from holdfast.train.observe import Advance
from holdfast_lab.placement.tiers import Tier

NUM_STEPS = 6
"""How often the progress is told 1."""

_TURNS = 15
_FILE_BYTES = 32 << 20
_NUM_RANDOM = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """A figure as it is declared, stretched, and as it was measured."""

    name: str
    declared: float
    measured: float

    @property
    def deviation(self) -> float:
        return self.measured / self.declared - 1

    def __str__(self) -> str:
        return f"{self.name}: declared {self.declared:.4g}, measured {self.measured:.4g} ({self.deviation:+.1%})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DialProbe:
    tier: Tier
    figures: tuple[ReadBack, ...]


def dial_of(text: str) -> MediumDial:
    """A preset by name, or a TOML file of a dial's keys. Raises ConfigError."""
    from holdfast.files.config import read_config

    for like in PRESETS:
        if text == like:
            return MediumDial(like=like)
    if not Path(text).exists():
        raise ConfigError(f"{text}: no such file, and no medium with that name: {', '.join(PRESETS)}")
    return read_config(MediumDial, text)


def probe_dialled(directory: Path, dial: MediumDial, *, on_step: Advance) -> DialProbe:
    """Measures the medium of `directory` under the dial: as block files where the dial's granularity is a sector or
    more, else as mapped memory. Raises ConfigError where there is no such directory or no room in it."""
    if not directory.is_dir():
        raise ConfigError(f"{directory}: there is no such directory")
    free_bytes = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    if free_bytes < 4 * _FILE_BYTES:
        raise ConfigError(f"{directory}: {free_bytes:,} bytes are free, and a probe wants {4 * _FILE_BYTES:,}")
    read_rate, _, write_rate, read_s, _, outstanding, granularity, sync_s, *_ = dial.figures
    is_block = granularity >= 512
    kind: Literal["byte", "block"] = "block" if is_block else "byte"
    with tempfile.TemporaryDirectory(prefix=".holdfast-probe-", dir=directory) as folder:
        medium = _core.DialProbe(folder, "probe", _FILE_BYTES, block=is_block, dial=dial.figures)
        on_step(1)
        each = max(granularity, medium.unit_bytes)
        read_bandwidth = _FILE_BYTES / _seconds(medium.read_all)
        on_step(1)
        write_bandwidth = _FILE_BYTES / _seconds(medium.write_all)
        on_step(1)
        # Some hundreds, or milliseconds of them.
        count = min(_NUM_RANDOM, max(50, int(1e-3 / max(read_s, 1e-9))))
        latency_s = _seconds(lambda: medium.read_one_by_one(count, each)) / count
        on_step(1)
        reads_per_s = _NUM_RANDOM / _seconds(lambda: medium.read_at_random(_NUM_RANDOM, each))
        on_step(1)
        sync_latency_s = _seconds(medium.sync) if is_block else 0.0
        on_step(1)
    of_reads = min(read_rate / each, outstanding / read_s if read_s > 0 else float("inf"))
    figures = [
        ReadBack(name="read_bandwidth_bytes_per_s", declared=read_rate, measured=read_bandwidth),
        ReadBack(name="write_bandwidth_bytes_per_s", declared=write_rate, measured=write_bandwidth),
        ReadBack(name="random_reads_per_s", declared=of_reads, measured=reads_per_s),
    ]
    if read_s > 0:
        figures.append(ReadBack(name="read_latency_s", declared=read_s, measured=latency_s))
    if is_block and sync_s > 0:
        figures.append(ReadBack(name="sync_latency_s", declared=sync_s, measured=sync_latency_s))
    tier = Tier(
        name=dial.like or "dialled",
        kind=kind,
        capacity_bytes=free_bytes,
        read_bandwidth_bytes_per_s=float(round(read_bandwidth)),
        write_bandwidth_bytes_per_s=float(round(write_bandwidth)),
        read_latency_ns=round(1e9 * latency_s, 1),
        access_granularity_bytes=each,
        random_reads_per_s=float(round(reads_per_s)),
        sync_latency_ns=float(round(1e9 * sync_latency_s)),
    )
    return DialProbe(tier=tier, figures=tuple(figures))


def _seconds(work: Callable[[], object]) -> float:
    """The best of some turns, after one that does not count: whatever else the machine does only adds to it."""
    work()
    times = []
    for _ in range(_TURNS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)
