"""Which rows live in which memory tier: the model of a batch's time, and the integer program that minimises it. Pure:
from numbers to numbers, nothing is measured or allocated.

The question and the shape of the answer are MTrainS's (Kassa et al., *MTrainS: Improving DLRM Training Efficiency using
Heterogeneous Memories*, 2023, arXiv 2305.01515): tables differ in the bandwidth that they need, so tables, and the hot
and cold parts of a table, are placed over HBM, DRAM, byte-addressable and block memory; the slower tiers save the nodes
that only capacity would have asked for. MTrainS holds the hot rows in caches; here they are placed.

**Demand.** The ladder of an access profile cuts a table into ranges of rows, hottest first. In a range all rows are
taken to be alike; it is cut into extents of as many rows each, and what is decided is how many of a range's extents
each tier holds. A batch reads each of its rows once, into the working set, and writes it once.

**Bytes.** A row takes weights + optimizer state. Byte-addressable tiers (hbm, dram, byte) keep the two in arrays of
their own: a range takes its bytes rounded up to the access granularity, a read or a write moves the granules that
weights and state lie in. Block tiers pack as many rows into a granule as fit whole, and move whole granules.

**Time per batch.** Stages run side by side, over several batches, so the slowest one sets the pace:
- *bandwidth* of tier t: bytes read / read bandwidth + bytes written / write bandwidth + a read latency if t is used;
- *random reads* of tier t, where it has a limit: rows read / random reads per second + a read latency if t is used;
- *sync* of the log's tier: one per batch.
Reads of one batch are issued together, so latency counts once. Compute, links between tiers, and what the CPU does are
not in it: the prediction is a lower bound that memory sets. (`step_time.py` predicts a step of the pools that there
are, with all of that.)

**Writes.** Rows on byte-addressable tiers are overwritten in place, and their before-images go to the log (row number,
weights, state). Rows on block tiers are appended to a row log on that tier, and merged into their home later, where the
granules around them are read and written once more, at most (merging coalesces versions, so this is an upper bound for
time and wear). The log lies on the byte or block tier that writes fastest (on DRAM or HBM only where there is no
other), and takes every step's share of the dense state. Reserved there: two dense slots, and `log_bytes`, or the
records of 2 × `dense_interval` + 2 batches.

**Objective.** The time of the slowest stage, plus a thousandth of the sum of all stages: among placements alike in the
first, the one that moves less through slow tiers. Solved to a relative gap that the result states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import PlacementError
from holdfast_lab.placement.ladder import Rung
from holdfast_lab.placement.tiers import Tier

if TYPE_CHECKING:
    from scipy.optimize import LinearConstraint

_RECORD_BYTES, _SECTION_BYTES, _ROW_NUMBER_BYTES = 128, 64, 8  # docs/FORMAT.md: the log
_SUM_WEIGHT = 1e-3
_SMALLEST_RANGE = 1 / 10_000  # of all bytes; a smaller one joins the next
_RELATIVE_GAP = 1e-3
_TIME_LIMIT_S = 30.0
_CAPACITY_MARGIN = 1e-5  # relative; what the solver's tolerance may cost
_INFEASIBLE = 2  # a status of scipy.optimize.milp


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDemand:
    """What a batch asks of one table. ladder: its last rung is the whole table; weight_bytes, state_bytes: of a row."""

    name: str
    weight_bytes: int
    state_bytes: int
    accesses_per_batch: float
    ladder: tuple[Rung, ...]

    @property
    def rows(self) -> int:
        return self.ladder[-1].rows

    @property
    def row_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes

    @property
    def record_bytes(self) -> int:
        """What a row takes in the log: its number, weights and state."""
        return _ROW_NUMBER_BYTES + self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a run asks of memory. dense_bytes: parameters and their optimizer state. log_bytes: None where it grows."""

    tables: tuple[TableDemand, ...]
    dense_bytes: int
    dense_interval: int = 1
    log_bytes: int | None = None

    @property
    def table_bytes(self) -> int:
        return sum(table.rows * table.row_bytes for table in self.tables)

    @property
    def log_bytes_per_batch(self) -> float:
        """Records of before-images, if all rows are overwritten in place."""
        rows = sum(table.ladder[-1].unique_rows_per_batch * table.record_bytes for table in self.tables)
        return rows + self.record_overhead_bytes

    @property
    def record_overhead_bytes(self) -> int:
        """What a batch's log record takes besides rows."""
        return _RECORD_BYTES + _SECTION_BYTES * len(self.tables)

    @property
    def dense_bytes_per_batch(self) -> float:
        return self.dense_bytes / self.dense_interval

    @property
    def reserved_bytes(self) -> int:
        """What the log's tier must have besides rows."""
        log = (2 * self.dense_interval + 2) * self.log_bytes_per_batch if self.log_bytes is None else self.log_bytes
        return 2 * self.dense_bytes + math.ceil(log)


@dataclass(frozen=True, slots=True)
class Range:
    """Rows of one table that are taken to be alike: `extents` extents of at most `extent_rows` rows."""

    table: TableDemand
    first_row: int
    rows: int
    access_share: float  # of the table's accesses
    unique_rows_per_batch: float
    extents: int

    @property
    def extent_rows(self) -> int:
        return -(-self.rows // self.extents)


@dataclass(frozen=True, slots=True)
class Program:
    """The integer program, R ranges over T tiers with S stages, times in seconds.

    extents: int64 [R]; extent_bytes: int64 [R, T], what an extent takes; capacities: int64 [T]; costs: float64
    [S, R, T], what an extent of range r on tier t adds to stage s; bases: float64 [S], what the stage takes anyhow;
    latencies: float64 [S, T], what it takes as soon as tier t holds anything.
    """

    extents: NDArray[np.int64]
    extent_bytes: NDArray[np.int64]
    capacities: NDArray[np.int64]
    costs: NDArray[np.float64]
    bases: NDArray[np.float64]
    latencies: NDArray[np.float64]

    def stage_seconds(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Time of each stage, [S], where tier t holds ``counts[r, t]`` extents of range r."""
        is_used = (counts.sum(axis=0) > 0).astype(np.float64)
        times = self.bases + np.einsum("srt,rt->s", self.costs, counts) + self.latencies @ is_used
        return np.asarray(times)

    def objective(self, counts: NDArray[np.int64]) -> float:
        times = self.stage_seconds(counts)
        return float(times.max() + _SUM_WEIGHT * times.sum())

    def fits(self, counts: NDArray[np.int64]) -> bool:
        return bool(((counts * self.extent_bytes).sum(axis=0) <= self.capacities).all())


def log_tier(tiers: Sequence[Tier]) -> int:
    """Which of the tiers takes the log; see the module's text."""
    durable = [number for number, tier in enumerate(tiers) if tier.kind in ("byte", "block")]
    dram = [number for number, tier in enumerate(tiers) if tier.kind == "dram"]
    choice = durable or dram or range(len(tiers))
    return max(choice, key=lambda number: tiers[number].write_bandwidth_bytes_per_s)


def cut_ranges(demand: Demand, num_extents: int) -> list[Range]:
    """The tables' ranges, hottest first within each; ranges of next to no bytes are joined with the next."""
    total_bytes = demand.table_bytes
    ranges = []
    for table in demand.tables:
        smallest_rows = total_bytes * _SMALLEST_RANGE / table.row_bytes
        first, share, unique = 0, 0.0, 0.0
        for rung in table.ladder:
            rows = rung.rows - first
            if rows < smallest_rows and rung is not table.ladder[-1]:
                continue
            extents = math.ceil(rows * table.row_bytes * num_extents / total_bytes)
            extents = min(rows, max(1, extents))
            ranges.append(
                Range(
                    table=table,
                    first_row=first,
                    rows=rows,
                    access_share=rung.access_share - share,
                    unique_rows_per_batch=rung.unique_rows_per_batch - unique,
                    extents=-(-rows // -(-rows // extents)),  # none is left empty
                )
            )
            first, share, unique = rung.rows, rung.access_share, rung.unique_rows_per_batch
    return ranges


def stored_bytes(table: TableDemand, rows: int, tier: Tier) -> int:
    """What rows of a table take on a tier."""
    granule = tier.access_granularity_bytes
    if tier.kind != "block":
        return _round_up(rows * table.row_bytes, granule)
    if table.row_bytes > granule:
        return rows * _round_up(table.row_bytes, granule)
    return -(-rows // (granule // table.row_bytes)) * granule


def moved_bytes(table: TableDemand, tier: Tier) -> int:
    """What reading, or writing, one row moves."""
    granule = tier.access_granularity_bytes
    if tier.kind == "block":
        return _round_up(table.row_bytes, granule)
    return _round_up(table.weight_bytes, granule) + _round_up(table.state_bytes, granule)


def build_program(demand: Demand, ranges: Sequence[Range], tiers: Sequence[Tier], log: int) -> Program:
    """Stages: bandwidth of every tier, random reads of every tier, sync."""
    num_tiers, num_ranges = len(tiers), len(ranges)
    extent_bytes = np.zeros((num_ranges, num_tiers), np.int64)
    costs = np.zeros((2 * num_tiers + 1, num_ranges, num_tiers))
    bases = np.zeros(2 * num_tiers + 1)
    latencies = np.zeros((2 * num_tiers + 1, num_tiers))
    for t, tier in enumerate(tiers):
        latencies[t, t] = tier.read_latency_ns / 1e9
        if tier.random_reads_per_s is not None:
            latencies[num_tiers + t, t] = tier.read_latency_ns / 1e9
        for r, rows in enumerate(ranges):
            unique = rows.unique_rows_per_batch / rows.extents
            extent_bytes[r, t] = stored_bytes(rows.table, rows.extent_rows, tier)
            read, written, logged = row_traffic(rows.table, tier)
            costs[t, r, t] += unique * read / tier.read_bandwidth_bytes_per_s
            costs[t, r, t] += unique * written / tier.write_bandwidth_bytes_per_s
            costs[log, r, t] += unique * logged / tiers[log].write_bandwidth_bytes_per_s
            if tier.random_reads_per_s is not None:
                costs[num_tiers + t, r, t] = unique / tier.random_reads_per_s
    overhead_bytes = demand.record_overhead_bytes + demand.dense_bytes_per_batch
    bases[log] = overhead_bytes / tiers[log].write_bandwidth_bytes_per_s
    bases[-1] = tiers[log].sync_latency_ns / 1e9
    return Program(
        extents=np.array([rows.extents for rows in ranges], np.int64),
        extent_bytes=extent_bytes,
        capacities=capacities_for_rows(demand, tiers, log),
        costs=costs,
        bases=bases,
        latencies=latencies,
    )


def solve(program: Program, *, relative_gap: float = _RELATIVE_GAP) -> tuple[NDArray[np.int64], float] | None:
    """Extents of every range on every tier, int64 [R, T], and the relative gap that is left; None where nothing fits.

    Raises PlacementError where the solver finds none in time.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    num_stages, num_ranges, num_tiers = program.costs.shape
    num_counts = num_ranges * num_tiers
    # Variables: counts[r, t], is_used[t], and the slowest stage's time, in a unit in which it is about 1.
    num_variables = num_counts + num_tiers + 1
    unit = min(float(program.stage_seconds(_all_on(program, tier)).max()) for tier in range(num_tiers)) or 1.0
    stages = np.hstack([program.costs.reshape(num_stages, num_counts) / unit, program.latencies / unit])
    objective = np.append(_SUM_WEIGHT * stages.sum(axis=0), 1.0)
    slowest = np.hstack([stages, -np.ones((num_stages, 1))])
    used = np.zeros((num_tiers, num_variables))
    for tier in range(num_tiers):
        used[tier, tier:num_counts:num_tiers] = 1.0
        used[tier, num_counts + tier] = -float(program.extents.sum())
    room = np.maximum(program.capacities, 1).astype(np.float64)
    taken = _taken(program, room, num_variables)
    upper = np.concatenate([np.repeat(program.extents, num_tiers), np.ones(num_tiers), [np.inf]])
    limits = program.capacities / room
    # The solver's tolerance may exceed a capacity by a millionth: then it is asked again with that much less.
    for _ in range(4):
        found = milp(
            objective,
            integrality=np.append(np.ones(num_variables - 1), 0),
            bounds=Bounds(np.zeros(num_variables), upper),
            constraints=[
                LinearConstraint(slowest, ub=-program.bases / unit),
                LinearConstraint(used, ub=np.zeros(num_tiers)),
                _all_placed(program, num_variables),
                LinearConstraint(taken, ub=limits),
            ],
            options={"mip_rel_gap": relative_gap, "time_limit": _TIME_LIMIT_S},
        )
        if found.status == _INFEASIBLE:
            return None
        if found.x is None:
            raise PlacementError(f"the solver found no placement in {_TIME_LIMIT_S:.0f} s: {found.message}")
        counts = np.rint(found.x[:num_counts]).astype(np.int64).reshape(num_ranges, num_tiers)
        if program.fits(counts):
            return counts, max(0.0, float(found.mip_gap))
        limits = limits * (1 - 2e-6)
    return None


def growth_needed(program: Program, tier: int) -> int:
    """Bytes by which the capacity of `tier` must grow for everything to fit: enough, and little more."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    num_counts = program.extent_bytes.size
    num_tiers = program.capacities.size
    # Variables: counts[r, t], and the growth as a part of what all rows would take on that tier.
    all_bytes = float((program.extents * program.extent_bytes[:, tier]).sum())
    room = np.maximum(program.capacities, 1).astype(np.float64)
    room[tier] = all_bytes
    taken = _taken(program, room, num_counts + 1)
    taken[tier, -1] = -1.0
    found = milp(
        np.append(np.zeros(num_counts), 1.0),
        integrality=np.append(np.ones(num_counts), 0),
        bounds=Bounds(np.zeros(num_counts + 1), np.append(np.repeat(program.extents, num_tiers), 1.0)),
        constraints=[
            _all_placed(program, num_counts + 1),
            LinearConstraint(taken, ub=program.capacities / room),
        ],
        options={"mip_rel_gap": _RELATIVE_GAP, "time_limit": _TIME_LIMIT_S},
    )
    if found.x is None:
        raise PlacementError(f"the solver did not find what is missing in {_TIME_LIMIT_S:.0f} s: {found.message}")
    return math.ceil((float(found.x[-1]) + _CAPACITY_MARGIN) * all_bytes)


def _all_placed(program: Program, num_variables: int) -> LinearConstraint:
    """Every range's extents are on some tier. Counts are the first variables; sparse, for it has a row a range."""
    from scipy.optimize import LinearConstraint
    from scipy.sparse import csr_array, eye_array, kron

    num_ranges, num_tiers = program.extent_bytes.shape
    placed = kron(eye_array(num_ranges), np.ones((1, num_tiers)), format="csr")
    placed = csr_array((placed.data, placed.indices, placed.indptr), shape=(num_ranges, num_variables))
    return LinearConstraint(placed, lb=program.extents, ub=program.extents)


def _taken(program: Program, room: NDArray[np.float64], num_variables: int) -> NDArray[np.float64]:
    """What an extent takes of each tier's room, [T, num_variables]."""
    num_ranges, num_tiers = program.extent_bytes.shape
    taken = np.zeros((num_tiers, num_variables))
    for tier in range(num_tiers):
        taken[tier, tier : num_ranges * num_tiers : num_tiers] = program.extent_bytes[:, tier] / room[tier]
    return taken


def _all_on(program: Program, tier: int) -> NDArray[np.int64]:
    counts = np.zeros(program.extent_bytes.shape, np.int64)
    counts[:, tier] = program.extents
    return counts


def row_traffic(table: TableDemand, tier: Tier) -> tuple[int, int, int]:
    """Bytes that a unique row of a batch makes its tier read and write, and the log's tier write."""
    moved = moved_bytes(table, tier)
    if tier.kind == "block":
        # fetched, and read again to be merged; appended, and merged
        return 2 * moved, table.record_bytes + moved, 0
    return moved, moved, table.record_bytes


def capacities_for_rows(demand: Demand, tiers: Sequence[Tier], log: int) -> NDArray[np.int64]:
    """What is left for rows."""
    capacities = np.array([tier.capacity_bytes for tier in tiers], np.int64)
    capacities[log] = max(0, int(capacities[log]) - demand.reserved_bytes)
    return capacities


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
