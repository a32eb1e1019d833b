"""Devices: what a piece of work costs on them. Pure, from numbers to seconds.

A device's time for a piece of work is that of its slowest resource where they work at once, and a sum where they take
turns; the docstrings say which. All of a stage's devices are held until the slowest is done: they stream into one
another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from holdfast_lab.sim.model import Workload

Modules = Literal["fixed", "by_table", "by_capacity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """Of one stage and batch. rows_read, rows_written: at random places, row_bytes each; overlap: of the rows read, the
    part that the batch before has written, 0 to 1. stream_*: in long runs. moved_bytes: over a link. calls: of
    software."""

    flops: float = 0.0
    rows_read: float = 0.0
    rows_written: float = 0.0
    row_bytes: float = 0.0
    overlap: float = 0.0
    stream_read_bytes: float = 0.0
    stream_written_bytes: float = 0.0
    moved_bytes: float = 0.0
    calls: float = 1.0


_DIVISORS = ("_per_s", "efficiency", "outstanding_requests", "granularity_bytes", "capacity_bytes", "parallelism")
_ENDLESS = ("capacity_bytes", "modules_at_work")
_ROUNDING = 1e-12  # of a mean of whole numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """parallelism: stages that it serves at a time."""

    parallelism: int = 1
    idle_watts: float = 0.0
    busy_watts: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float)):
                continue
            is_finite = math.isfinite(value) or (field.name in _ENDLESS and value == math.inf)
            if not (is_finite and value >= 0):
                raise ValueError(f"{field.name} = {value}; it must be 0 or more")
            if value == 0 and (field.name.endswith(_DIVISORS) or field.name.startswith(("modules", "count"))):
                raise ValueError(f"{field.name} = 0; it must be more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(_Device):
    """A processor, or `count` of them that share all work evenly. flops_per_s: the peak of one; efficiency: the part
    of it that is reached. start_s: of every call of software, beside its work, on all of them at once; row_s: of work
    on a row beside its memory's. idle_watts, busy_watts: of one."""

    kind: Literal["compute"]
    flops_per_s: float
    count: int = 1
    efficiency: float = 1.0
    start_s: float = 0.0
    row_s: float = 0.0

    def seconds(self, work: Amounts, *, recently_written: bool, modules: float) -> float:
        rows = work.rows_read + work.rows_written
        shared_s = work.flops / (self.flops_per_s * self.efficiency) + rows * self.row_s
        return work.calls * self.start_s + shared_s / self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(_Device):
    """Memory of one module, or of `modules` of them, times the number of tables ("by_table"), or more of them where the
    tables need more ("by_capacity"). All of them take power, and work spreads over them evenly, but over no more than
    modules_at_work (a host reaches what its channels let it).

    Rows at random places: each as whole granules at the bandwidth, or at most outstanding_requests a latency, whichever
    takes longer. Reads and writes take turns. Rows that were written less than raw_window_s ago take raw_penalty times
    as long to read. Bandwidths, outstanding_requests, busy_watts, idle_watts, capacity_bytes: of a module.
    """

    kind: Literal["memory"]
    read_bandwidth_bytes_per_s: float
    write_bandwidth_bytes_per_s: float
    read_latency_s: float = 0.0
    write_latency_s: float = 0.0
    outstanding_requests: float = 64.0
    granularity_bytes: int = 64
    stream_write_efficiency: float = 1.0
    row_write_efficiency: float = 1.0
    raw_penalty: float = 1.0
    raw_window_s: float = 0.0
    modules: float = 1.0
    modules_by: Modules = "fixed"
    modules_at_work: float = math.inf
    capacity_bytes: float = math.inf

    def num_modules(self, workload: Workload) -> float:
        """That are there, and take power."""
        if self.modules_by == "by_table":
            return self.modules * workload.num_tables
        if self.modules_by == "by_capacity":
            return max(self.modules, math.ceil(workload.table_bytes / self.capacity_bytes))
        return self.modules

    def num_working(self, workload: Workload) -> float:
        """That share the work: never more than there are."""
        return min(self.num_modules(workload), self.modules_at_work)

    def seconds(self, work: Amounts, *, recently_written: bool, modules: float) -> float:
        granules = math.ceil(work.row_bytes / self.granularity_bytes * (1.0 - _ROUNDING))
        row_bytes = granules * self.granularity_bytes
        read_s = self._rows(work.rows_read, row_bytes, self.read_bandwidth_bytes_per_s, self.read_latency_s, modules)
        if recently_written:
            read_s *= 1.0 + (self.raw_penalty - 1.0) * work.overlap
        row_write_rate = self.write_bandwidth_bytes_per_s * self.row_write_efficiency
        write_s = self._rows(work.rows_written, row_bytes, row_write_rate, self.write_latency_s, modules)
        stream_rate = self.write_bandwidth_bytes_per_s * self.stream_write_efficiency
        read_s += work.stream_read_bytes / (self.read_bandwidth_bytes_per_s * modules)
        write_s += work.stream_written_bytes / (stream_rate * modules)
        return read_s + write_s

    def _rows(self, rows: float, row_bytes: float, bytes_per_s: float, latency_s: float, modules: float) -> float:
        if rows == 0:
            return 0.0
        return max(rows * row_bytes / (bytes_per_s * modules), rows * latency_s / (self.outstanding_requests * modules))


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(_Device):
    """A link. latency_s: of every transfer; start_s: of every call of software that begins or ends one."""

    kind: Literal["link"]
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    start_s: float = 0.0

    def seconds(self, work: Amounts, *, recently_written: bool, modules: float) -> float:
        return self.latency_s + work.calls * self.start_s + work.moved_bytes / self.bandwidth_bytes_per_s


Device = Compute | Memory | Link
