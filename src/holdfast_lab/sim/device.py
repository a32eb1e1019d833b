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
Topology = Literal["switch", "mesh", "cube_mesh", "ring", "shared"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """Work that a processor launches at once: `copies` matrix products of [rows, inner] by [inner, columns], and what
    it moves to and from memory."""

    moved_bytes: float
    rows: float = 0.0
    columns: float = 0.0
    inner: float = 0.0
    copies: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """Of one stage and batch. rows_read, rows_written: at random places, row_bytes each; overlap: of the rows read, the
    part that the batch before has written, 0 to 1. stream_*: in long runs. moved_bytes: over a link; reduced_bytes: a
    sum over all processors, of what each of them has. calls: of software. kernels: of one processor, in `precision`.
    skew: of rows and vectors over processors, the most over the mean."""

    flops: float = 0.0
    rows_read: float = 0.0
    rows_written: float = 0.0
    row_bytes: float = 0.0
    overlap: float = 0.0
    stream_read_bytes: float = 0.0
    stream_written_bytes: float = 0.0
    moved_bytes: float = 0.0
    reduced_bytes: float = 0.0
    calls: float = 1.0
    kernels: tuple[Kernel, ...] = ()
    precision: str = "fp32"
    skew: float = 1.0


_DIVISORS = (
    "_per_s", "efficiency", "outstanding_requests", "granularity_bytes", "line_bytes", "capacity_bytes", "parallelism",
)  # fmt: skip
_COUNTS = ("modules", "count", "units")
_ENDLESS = ("capacity_bytes", "modules_at_work", "outstanding_requests")
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
            if value == 0 and (field.name.endswith(_DIVISORS) or field.name.startswith(_COUNTS)):
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
    takes longer. Reads and writes take turns, or go at once, at mixed_bandwidth_bytes_per_s together where there is
    one. Rows that were written less than raw_window_s ago take raw_penalty times as long to read. shared: stages that
    need it at once share its bandwidth fairly, instead of taking turns. Bandwidths, outstanding_requests, busy_watts,
    idle_watts, capacity_bytes: of a module.
    """

    kind: Literal["memory"]
    read_bandwidth_bytes_per_s: float
    write_bandwidth_bytes_per_s: float
    mixed_bandwidth_bytes_per_s: float | None = None
    shared: bool = False
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
        if self.mixed_bandwidth_bytes_per_s is None:
            return read_s + write_s
        moved_bytes = (work.rows_read + work.rows_written) * row_bytes
        moved_bytes += work.stream_read_bytes + work.stream_written_bytes
        return max(read_s, write_s, moved_bytes / (self.mixed_bandwidth_bytes_per_s * modules))

    def _rows(self, rows: float, row_bytes: float, bytes_per_s: float, latency_s: float, modules: float) -> float:
        if rows == 0:
            return 0.0
        return max(rows * row_bytes / (bytes_per_s * modules), rows * latency_s / (self.outstanding_requests * modules))


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(_Device):
    """A link. latency_s: of every transfer; start_s: of every call of software that begins or ends one. It has at most
    outstanding_requests lines of line_bytes under way: so many a latency, if that is less than its bandwidth."""

    kind: Literal["link"]
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    start_s: float = 0.0
    outstanding_requests: float = math.inf
    line_bytes: int = 64

    def seconds(self, work: Amounts, *, recently_written: bool, modules: float) -> float:
        moved_bytes = work.moved_bytes + work.reduced_bytes
        waiting_s = moved_bytes / self.line_bytes * self.latency_s / self.outstanding_requests
        moved_s = max(moved_bytes / self.bandwidth_bytes_per_s, waiting_s)
        return self.latency_s + work.calls * self.start_s + moved_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Of matrix products in one precision. flops_per_s: the published peak; efficiency: what large ones reach of it."""

    flops_per_s: float
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.flops_per_s < math.inf and 0 < self.efficiency <= 1):
            raise ValueError(f"a rate of {self.flops_per_s} flop/s, {self.efficiency} of it: neither is more than 0")


_TILES = (128, 64, 32)
_WIDEST_TILE = max(_TILES)
_INNER_OF_A_SPLIT = 256  # a product that has few tiles is split along its inner dimension, into parts no shorter
_INNER_STEP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor(_Device):
    """A GPU (or CPU) with memory of its own, kernel by kernel; a system has `gpus` of them, which share a batch's
    samples evenly, and its tables as the system says.

    A kernel takes launch_s, and the longest of its products and its memory traffic (a roofline). Products are cut into
    square tiles, which `units` work on at a time: what a tile sticks out beyond the matrix, and units that the last
    turn leaves idle, are lost. Tiles of half the width move twice as much for each product, and reach half the rate;
    the width that is quickest is taken. Rows are whole granules at the same memory's bandwidth. rates: by precision,
    "fp32", "tf32", "half" (fp16 or bf16). All figures are of one.
    """

    kind: Literal["processor"]
    rates: dict[str, Rate]
    units: int
    memory_bandwidth_bytes_per_s: float
    memory_efficiency: float = 1.0
    granularity_bytes: int = 32
    capacity_bytes: float = math.inf
    launch_s: float = 0.0

    def seconds(self, work: Amounts, *, recently_written: bool, modules: float) -> float:
        """Raises ValueError where it has no rate in that precision."""
        rows = work.rows_read + work.rows_written
        granules = math.ceil(work.row_bytes / self.granularity_bytes * (1.0 - _ROUNDING))
        rows_s = self._moving_s(rows * granules * self.granularity_bytes * work.skew / modules)
        return work.calls * self.launch_s + rows_s + sum(self.kernel_s(each, work.precision) for each in work.kernels)

    def kernel_s(self, kernel: Kernel, precision: str) -> float:
        moving_s = self._moving_s(kernel.moved_bytes)
        if not kernel.inner:
            return self.launch_s + moving_s
        if precision not in self.rates:
            raise ValueError(f"precision {precision!r}: the processor has rates of {', '.join(self.rates)}")
        unit_rate = self.rates[precision].flops_per_s * self.rates[precision].efficiency / self.units
        return self.launch_s + max(moving_s, min(self._product_s(kernel, tile, unit_rate) for tile in _TILES))

    def _product_s(self, kernel: Kernel, tile: int, unit_rate: float) -> float:
        tiles = kernel.copies * math.ceil(kernel.rows / tile) * math.ceil(kernel.columns / tile)
        inner = math.ceil(kernel.inner / _INNER_STEP) * _INNER_STEP
        splits = max(1, min(self.units // math.ceil(tiles), inner // _INNER_OF_A_SPLIT))
        turns = math.ceil(tiles * splits / self.units)
        return turns * 2 * tile * tile * inner / splits / (unit_rate * tile / _WIDEST_TILE)

    def _moving_s(self, moved_bytes: float) -> float:
        return moved_bytes / (self.memory_bandwidth_bytes_per_s * self.memory_efficiency)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric(_Device):
    """What connects a system's processors: collectives over a topology. bandwidth_bytes_per_s: out of one processor,
    over all its links; as much goes in; "shared": of all together. efficiency: what collectives reach of it. latency_s:
    of a step; start_s: of a call. idle_watts, busy_watts: of one processor's links.

    All-to-all: a processor sends what others need of its share, over as many links as the topology has on the way.
    All-reduce: a ring, which every topology has, moves 2 (n - 1) / n of what is summed out of each.
    """

    kind: Literal["fabric"]
    bandwidth_bytes_per_s: float
    topology: Topology = "switch"
    efficiency: float = 1.0
    latency_s: float = 0.0
    start_s: float = 0.0

    def seconds(self, work: Amounts, *, recently_written: bool, modules: float) -> float:
        if modules <= 1:
            return 0.0
        others = modules - 1
        sent_bytes = work.moved_bytes * work.skew / modules * others / modules * self.hops(modules)
        sent_bytes += 2 * others / modules * work.reduced_bytes
        sharers = modules if self.topology == "shared" else 1
        steps = 2 * others if work.reduced_bytes else 1
        rate = self.bandwidth_bytes_per_s * self.efficiency / sharers
        return work.calls * self.start_s + steps * self.latency_s + sent_bytes / rate

    def hops(self, processors: float) -> float:
        """Links that a message crosses, in the mean over all pairs."""
        if self.topology == "cube_mesh":  # of eight: each reaches four directly, three over one of these
            return 1.0 if processors <= 4 else 10 / 7
        if self.topology == "ring":
            return processors**2 // 4 / (processors - 1)
        return 1.0


Device = Compute | Memory | Link | Processor | Fabric
