"""A placement as a person asks for it: does it fit, what goes where, how fast, how much wear, at what cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import DoesNotFit
from holdfast_lab.placement.program import (
    Demand,
    Program,
    Range,
    build_program,
    capacities_for_rows,
    cut_ranges,
    growth_needed,
    log_tier,
    row_traffic,
    solve,
    stored_bytes,
)
from holdfast_lab.placement.tiers import DAYS_PER_YEAR, Tier

_SECONDS_PER_DAY = 86_400
_EXTENTS = (128, 2048)  # extents that all bytes make together; the second where the first leaves too much over


@dataclass(frozen=True, slots=True, kw_only=True)
class Allotment:
    """A run of a table's rows, counted from the hottest (0), and where it lives. access_share: of all accesses."""

    table: str
    tier: str
    first_row: int
    rows: int
    bytes: int
    access_share: float
    unique_rows_per_batch: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """What one tier holds and does. Rates are per batch; access_share is its hit rate: its part of all accesses.

    bytes: of rows; reserved_bytes: log and dense slots. random_reads_ms, cost_usd, the wear: None where the tier names
    no limit. drive_writes_per_day: at the plan's rate of batches; lifetime_years: until what the maker warrants is
    used up.
    """

    name: str
    kind: str
    capacity_bytes: int
    bytes: int
    reserved_bytes: int
    rows: int
    access_share: float
    unique_rows_per_batch: float
    read_bytes_per_batch: float
    written_bytes_per_batch: float
    bandwidth_ms: float
    random_reads_ms: float | None
    cost_usd: float | None
    drive_writes_per_day: float | None
    endurance_drive_writes_per_day: float | None
    lifetime_years: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesNeeded:
    """How many nodes the rows take with only the tiers that read at least as fast as `slowest_tier`."""

    slowest_tier: str
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement and what the model predicts of it.

    ms_per_batch: of the limiting stage. gap: how much better another placement could still be, relative. batch_ms: what
    rates per second and per day refer to: ms_per_batch, or what was measured.
    """

    ms_per_batch: float
    limiting_stage: str
    gap: float
    batch_ms: float
    bytes: int
    log_tier: str
    log_bytes_per_batch: float
    dense_bytes_per_batch: float
    log_bytes_per_s: float
    sync_ms: float
    tiers: tuple[TierUse, ...]
    nodes: tuple[NodesNeeded, ...]
    allotments: tuple[Allotment, ...]


@dataclass(frozen=True, slots=True)
class _Solution:
    demand: Demand
    tiers: Sequence[Tier]
    log: int
    ranges: Sequence[Range]
    program: Program
    counts: NDArray[np.int64]
    gap: float


def plan_placement(demand: Demand, tiers: Sequence[Tier], *, batch_ms: float | None = None) -> Plan:
    """The best placement. batch_ms: what a step was measured to take, for rates per second and per day.

    Raises DoesNotFit where the rows are more than the tiers hold, PlacementError where the solver finds none in time.
    """
    ordered = sorted(tiers, key=lambda tier: -tier.read_bandwidth_bytes_per_s)
    log = log_tier(ordered)
    missing = demand.reserved_bytes - ordered[log].capacity_bytes
    if missing > 0:
        raise DoesNotFit(
            f"{missing:,} bytes are missing on '{ordered[log].name}' for the log and the dense state alone, which need "
            f"{demand.reserved_bytes:,}: raise its capacity_bytes, or lower pool.dense_interval or pool.log_bytes"
        )
    program = None
    for num_extents in _EXTENTS:
        ranges = cut_ranges(demand, num_extents)
        program = build_program(demand, ranges, ordered, log)
        solved = solve(program)
        if solved is not None:
            return _describe(_Solution(demand, ordered, log, ranges, program, *solved), batch_ms)
    assert program is not None
    raise _does_not_fit(demand, ordered, log, program)


def _does_not_fit(demand: Demand, tiers: Sequence[Tier], log: int, program: Program) -> DoesNotFit:
    """The error; the bytes that are missing are those by which the tier with the most room must grow."""
    capacities = capacities_for_rows(demand, tiers, log)
    largest = int(capacities.argmax())
    missing = growth_needed(program, largest)
    packed = demand.table_bytes
    state = sum(table.rows * table.state_bytes for table in demand.tables)
    return DoesNotFit(
        f"{missing:,} bytes are missing on '{tiers[largest].name}': rows have {packed:,} bytes ({state:,} of them "
        "optimizer state; block tiers move whole granules, so rows may take more there), and beside the log and the "
        f"dense state ({demand.reserved_bytes:,} bytes) the tiers have {int(capacities.sum()):,}. Raise "
        "capacity_bytes, add a tier or nodes, or make rows smaller: embedding.dim, embedding.dtype, an "
        "embedding.optimizer with less state"
    )


def _describe(solution: _Solution, batch_ms: float | None) -> Plan:
    demand, tiers, log = solution.demand, solution.tiers, solution.log
    stages_ms = 1e3 * solution.program.stage_seconds(solution.counts)
    slowest = int(stages_ms.argmax())
    ms_per_batch = float(stages_ms[slowest])
    rate_ms = ms_per_batch if batch_ms is None else batch_ms
    allotments = _allotments(solution)
    record_bytes = {table.name: table.record_bytes for table in demand.tables}
    appending = {tier.name for tier in tiers if tier.kind == "block"}
    undo = appended = 0.0
    for part in allotments:
        part_bytes = part.unique_rows_per_batch * record_bytes[part.table]
        if part.tier in appending:
            appended += part_bytes
        else:
            undo += part_bytes
    undo += demand.record_overhead_bytes
    dense = demand.dense_bytes_per_batch
    uses = tuple(
        _use(
            solution,
            place,
            [part for part in allotments if part.tier == tier.name],
            stages_ms=stages_ms,
            log_bytes=undo + dense if place == log else 0.0,
            batch_ms=rate_ms,
        )
        for place, tier in enumerate(tiers)
    )
    names = [f"{tier.name}: {what}" for what in ("bandwidth", "random reads") for tier in tiers]
    return Plan(
        ms_per_batch=ms_per_batch,
        limiting_stage=[*names, f"{tiers[log].name}: sync"][slowest],
        gap=solution.gap,
        batch_ms=rate_ms,
        bytes=sum(use.bytes for use in uses),
        log_tier=tiers[log].name,
        log_bytes_per_batch=undo + appended,
        dense_bytes_per_batch=dense,
        log_bytes_per_s=(undo + appended + dense) / (rate_ms / 1e3),
        sync_ms=float(stages_ms[-1]),
        tiers=uses,
        nodes=_nodes_needed(demand, tiers, log),
        allotments=allotments,
    )


def _allotments(solution: _Solution) -> tuple[Allotment, ...]:
    """Runs of rows by table and hotness; within a range the faster tiers get the first rows."""
    all_accesses = sum(table.accesses_per_batch for table in solution.demand.tables) or 1.0
    runs: list[Allotment] = []
    for rows, on_tiers in zip(solution.ranges, solution.counts.tolist(), strict=True):
        first, end = rows.first_row, rows.first_row + rows.rows
        for tier, count in zip(solution.tiers, on_tiers, strict=True):
            run_rows = min(count * rows.extent_rows, end - first)
            if run_rows <= 0:
                continue
            begin = first
            first += run_rows
            part = run_rows / rows.rows
            share = part * rows.access_share * rows.table.accesses_per_batch / all_accesses
            unique = part * rows.unique_rows_per_batch
            if runs and (runs[-1].table, runs[-1].tier) == (rows.table.name, tier.name):
                before = runs.pop()
                begin = before.first_row
                share += before.access_share
                unique += before.unique_rows_per_batch
            runs.append(
                Allotment(
                    table=rows.table.name,
                    tier=tier.name,
                    first_row=begin,
                    rows=first - begin,
                    bytes=stored_bytes(rows.table, first - begin, tier),
                    access_share=share,
                    unique_rows_per_batch=unique,
                )
            )
    return tuple(runs)


def _use(
    solution: _Solution,
    place: int,
    parts: Sequence[Allotment],
    *,
    stages_ms: NDArray[np.float64],
    log_bytes: float,
    batch_ms: float,
) -> TierUse:
    """What the tier at `place` does with its parts; log_bytes: of undo records and dense state, a batch."""
    demand, tier = solution.demand, solution.tiers[place]
    tables = {table.name: table for table in demand.tables}
    traffic = [(part.unique_rows_per_batch, row_traffic(tables[part.table], tier)) for part in parts]
    written = log_bytes + sum(unique * row_written for unique, (_, row_written, _) in traffic)
    row_bytes = sum(part.bytes for part in parts)
    reserved = demand.reserved_bytes if place == solution.log else 0
    price, endurance = tier.price_usd_per_gb, tier.endurance_bytes
    per_day = written * _SECONDS_PER_DAY / (batch_ms / 1e3) if tier.kind == "block" else 0.0
    return TierUse(
        name=tier.name,
        kind=tier.kind,
        capacity_bytes=tier.capacity_bytes,
        bytes=row_bytes,
        reserved_bytes=reserved,
        rows=sum(part.rows for part in parts),
        access_share=sum(part.access_share for part in parts),
        unique_rows_per_batch=sum(part.unique_rows_per_batch for part in parts),
        read_bytes_per_batch=sum(unique * row_read for unique, (row_read, _, _) in traffic),
        written_bytes_per_batch=written,
        bandwidth_ms=float(stages_ms[place]),
        random_reads_ms=None if tier.random_reads_per_s is None else float(stages_ms[len(solution.tiers) + place]),
        cost_usd=None if price is None else price * (row_bytes + reserved) / 1e9,
        drive_writes_per_day=per_day / tier.capacity_bytes if tier.kind == "block" else None,
        endurance_drive_writes_per_day=tier.endurance_drive_writes_per_day,
        lifetime_years=None if endurance is None or not per_day else endurance / per_day / DAYS_PER_YEAR,
    )


def _nodes_needed(demand: Demand, tiers: Sequence[Tier], log: int) -> tuple[NodesNeeded, ...]:
    """For the fastest tier alone, the two fastest, and so on, as far as they have room for rows at all."""
    capacities = capacities_for_rows(demand, tiers, log)
    needed = []
    for last, tier in enumerate(tiers):
        kept = tiers[: last + 1]
        room = int(capacities[: last + 1].sum())
        rows = sum(min(stored_bytes(table, table.rows, kept_tier) for kept_tier in kept) for table in demand.tables)
        if room:
            needed.append(NodesNeeded(slowest_tier=tier.name, nodes=-(-rows // room)))
    return tuple(needed)
