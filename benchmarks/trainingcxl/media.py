"""The declared media, links and accelerator: the paper's own figures and data sheets', none of them fitted to a run.

- CXL-MEM: modules of PMEM by the paper's media table: 3 times DRAM's latency to read, 7 times to write, 0.6 of its
  bandwidth to read, 0.1 to write. A module has the channel of the paper's host, DDR4-2666. How many there are the paper
  does not say; its bars fit 0.8 a table and no fixed number (docs/SIMULATOR.md).
- PMEM of the host, in three ways, as nobody says what it reached: six Optane modules as they were measured
  (OpenEmbedding, ICDE 2023, Table I); a third of the bandwidth of the DRAM of the paper's host (Core i5-9600K, two
  channels); the media table on these two channels. Latencies as above.
- Six cores with ten outstanding lines each reach the host's PMEM. The cache is the host's last level; the logic near
  memory is given as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainingcxl.models import Shape

_CHANNEL = 21.33e9  # DDR4-2666, bytes/s
_READ_SHARE, _WRITE_SHARE = 0.6, 0.1
_READ_S, _WRITE_S = 3 * 81e-9, 7 * 86e-9
_MODULES_A_TABLE = 0.8
_REQUESTS_OF_A_MODULE = 64
_CACHE_BYTES = 9e6

HostPmem = Literal["modules", "third", "table"]

FREE = 1e15  # bytes/s: what costs nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredMedium:
    """Of the whole of it. modules: that take power."""

    modules: int
    read: float
    write: float
    read_s: float
    write_s: float
    outstanding: float
    granularity: int
    stream_write: float
    sync_s: float = 0.0
    cache_bytes: float = _CACHE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredLink:
    """copy_s: of software, for each copy: a cudaMemcpyAsync (6 µs) and a stream synchronisation (20 µs)."""

    bandwidth: float
    latency_s: float
    copy_s: float


def pmem_of_host(way: HostPmem) -> DeclaredMedium:
    """modules: as measured; third: of two channels' DRAM; table: the media table on these."""
    rates = {
        "modules": (39e9, 14e9),
        "third": (2 * _CHANNEL / 3, 2 * _CHANNEL / 3),
        "table": _by_media_table(2),
    }
    read, write = rates[way]
    return DeclaredMedium(
        modules=6 if way == "modules" else 2,
        read=read,
        write=write,
        stream_write=write,
        read_s=_READ_S,
        write_s=_WRITE_S,
        outstanding=60,
        granularity=256,
    )


def _by_media_table(modules: int) -> tuple[float, float]:
    """Bytes/s read and written."""
    return modules * _CHANNEL * _READ_SHARE, modules * _CHANNEL * _WRITE_SHARE


def cxl_mem(shape: Shape, *, free_log: bool = False) -> DeclaredMedium:
    """free_log: logs and dense states cost nothing there, as if there were none."""
    modules = round(_MODULES_A_TABLE * shape.tables)
    read, write = _by_media_table(modules)
    return DeclaredMedium(
        modules=modules,
        read=read,
        write=write,
        stream_write=FREE if free_log else write,
        read_s=_READ_S,
        write_s=_WRITE_S,
        outstanding=_REQUESTS_OF_A_MODULE * modules,
        granularity=256,
    )


def ssd() -> DeclaredMedium:
    """165 times DRAM's latency, a fiftieth of the bandwidth of a server's 115 and 79 GB/s; seven requests at a time."""
    return DeclaredMedium(
        modules=1,
        read=2.3e9,
        write=1.6e9,
        stream_write=1.6e9,
        read_s=165 * 81e-9,
        write_s=165 * 86e-9,
        outstanding=7,
        granularity=512,
        sync_s=28e-6,
    )


PCIE = DeclaredLink(bandwidth=12e9, latency_s=0.0, copy_s=26e-6)  # Gen3 x16
CXL = DeclaredLink(bandwidth=50e9, latency_s=400e-9, copy_s=0.0)  # Gen5 x16: a load, and a switch
