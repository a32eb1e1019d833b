"""How long a step takes, and what limits it: the model. Pure, from numbers to numbers.

**Stages run side by side**, over several batches, so the slowest one sets the pace:
- *compute*: the network, then the training thread's work on rows, each as if alone on the machine, and on top what work
  of other threads displaces: planning and reading of later batches, committing, collecting, fetching, merging. Where
  the network keeps all CPUs busy, a second of theirs costs it `displaced` seconds (`network_time.py` measures that), of
  planning one at most.
- *loader*: reading and planning a batch, on `workers` threads.
- *disk*, of a log store: its requests at the rates that it reaches, and what they move beyond the 4 KiB that these
  rates were measured with, at the medium's bandwidths. All on one device, so times add up.
- *victims*: the scratchpad's thread that has rows come in: copies between scratchpad and victim cache, at the rates of
  its tier, and behind them, for it waits, the disk's reads.
- *log*: what a step makes durable, one write and one sync behind another. Where the row log is on a tier of its own,
  what merges and fetches read of it, too, and the disk has nothing of it.

**What a log store does in a step** follows from how soon rows come again (`reuse.py`):
- The scratchpad has room for C rows. It forgets in about the order of last use, so it misses m(T), where w(T) = C.
  (S3-FIFO keeps a little more than that: an upper bound.) Announced rows come in early, but not more of them.
- A victim cache of V rows has what the scratchpad forgot last, and nothing of what it has: together they forget as a
  scratchpad of C + V rows would. So of m(T) rows, m(T) - m(U) come from there, where w(U) = C + V, and m(U) from below;
  and as many rows go there as leave the scratchpad, which is as many as come in. What says where they are counts
  towards the scratchpad's memory: C is the smaller for it.
- The log holds n steps when the merge takes them. Their w(n) different rows go home together, but for those that come
  again in the k steps that are durable by then, in the mean over tables: so a step moves (w(n + k) - w(k)) / n.
- In the mean the log holds h steps, so of the rows that come from below it has m(T) - m(h), where h > T (with a victim
  cache U in place of T): it is a cache that forgets the row that was unused for longest, and holds a row as often as it
  was updated.
- What a merge and what fetches visit at home, home_layout.py says. Where units are touched with probability p, a
  request ends where the next g are not: a part (1 - p)^g of the touched units begins one, and gaps of k < g units, of
  which each touched unit begins a part p (1 - p)^k, are moved with them. Gaps that cost less than a request decide g: 2
  blocks for merges, 8 sectors for fetches.
- After s steps home has w(s) rows. A row that no step had before is not read: m(s) of a batch's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from holdfast.errors import ConfigError
from holdfast_lab.placement.home_layout import (
    ADDRESS_BYTES,
    BLOCK_BYTES,
    TAG_BYTES,
    classes_of,
    fetch_requests,
    home_rows,
    merge_load,
)
from holdfast_lab.placement.host import Host
from holdfast_lab.placement.network_time import NetworkTime
from holdfast_lab.placement.program import Demand, TableDemand
from holdfast_lab.placement.reuse import ReuseCurve, characteristic_time
from holdfast_lab.placement.row_costs import RowAmounts
from holdfast_lab.placement.tiers import Tier

_SLOT_BYTES = 39  # of the scratchpad beside a row (core/scratchpad/scratchpad.cpp)
_TAG_BYTES_OF_VICTIM = 65 / 8  # DRAM for each row of the victim cache (core/scratchpad/victim_cache.h)
_SWAP_ROW_NS = 250.0  # of the processor: a row out of the victim cache, and one into it
_MERGED_PART = 0.65  # of the log, at a time: between 0.5 and 0.8, as its pace allows (core/log_store/log_merger.cpp)
_HELD_PART = 0.6  # of the log: what it has, in the mean over time, between a merge's end and the next one's
_STANDING_PART = 0.15  # of the log: half of what comes in while it is being merged, until 0.95 are full


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStoreWork:
    """What a log store does in a step, in means. Rows, requests and bytes; hit_rate: of unique rows, 0 to 1.
    victim_rows: that the scratchpad misses and the victim cache has; missed_rows: that come from below both; log_rows:
    of these, those that the row log has. record_bytes: of the step in the row log. room_rows: of the scratchpad, at any
    time. new_rows: of moved_rows, those that home did not have. fetch_requests, read_bytes
    and written_bytes: of home; bytes beyond a block for each request, all_written_bytes: with it. home_bytes: what
    rows and addresses take on the disk by then; the log is beside them."""

    hit_rate: float
    victim_rows: float
    missed_rows: float
    log_rows: float
    fetch_requests: float
    merge_requests: float
    moved_rows: float
    read_bytes: float
    written_bytes: float
    record_bytes: float
    room_rows: float
    new_rows: float
    all_written_bytes: float
    home_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A predicted step, in milliseconds. ms: of the slowest of compute_ms, loader_ms, disk_ms, victims_ms and log_ms,
    which `limited_by` names ("compute", "loader", "disk", "victims", "log"). compute_ms is the sum of network_ms,
    rows_ms and displaced_ms. store_work: None where rows are overwritten in place."""

    ms: float
    limited_by: str
    compute_ms: float
    network_ms: float
    rows_ms: float
    displaced_ms: float
    loader_ms: float
    disk_ms: float
    victims_ms: float
    log_ms: float
    store_work: LogStoreWork | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Of the run: scratchpad_bytes, log_bytes and victim_bytes of its pool (of a log store alone), workers of its
    loader. steps_before: of a log store, how many steps there were since its tables were new; None: every row was
    written."""

    scratchpad_bytes: int
    log_bytes: int
    workers: int = 1
    victim_bytes: int = 0
    steps_before: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "victim_bytes" else 1
            if value is not None and value < least:
                raise ConfigError(f"{field.name} = {value}; it must be at least {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What a step follows from. curves: one for each of the demand's tables. medium: the tier that the pool lies on.
    log_medium: that of its row log, where it is another. victim_medium: that of the victim cache.

    Raises ConfigError where the numbers of tables and curves differ, and where a log store has victims on no medium.
    """

    demand: Demand
    curves: Sequence[ReuseCurve]
    network: NetworkTime
    host: Host
    medium: Tier
    options: StepOptions
    log_medium: Tier | None = None
    victim_medium: Tier | None = None

    def __post_init__(self) -> None:
        if len(self.curves) != len(self.demand.tables):
            raise ConfigError(f"{len(self.curves)} reuse curves for {len(self.demand.tables)} tables; each needs one")
        if self.host.store == "log" and self.options.victim_bytes and self.victim_medium is None:
            raise ConfigError(
                f"the pool has {self.options.victim_bytes} bytes for victims, and nothing says how fast they are: "
                "no tier of kind byte names a directory"
            )

    def with_options(self, **changes: Any) -> StepInputs:
        return replace(self, options=replace(self.options, **changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What a step asks of each device, in seconds; nothing of it waits for another.

    cpu: of threads beside the training thread, by what they do: "plan" (reading included) of the loader, "record" of
    the one that makes steps durable, and of a log store's own "collect", "swap" (of victims), "fetch" and "merge".
    disk: of a log store, by what moves: "fetch", "merge", "record". victims_s: between scratchpad and victim cache.
    log_s: until what was written is durable. work: None where rows are overwritten in place.
    """

    network_s: float
    rows_s: float
    cpu: Mapping[str, float]
    disk: Mapping[str, float]
    victims_s: float
    log_s: float
    amounts: RowAmounts
    work: LogStoreWork | None


def step_costs(inputs: StepInputs) -> StepCosts:
    demand, host, log_medium = inputs.demand, inputs.host, inputs.log_medium
    amounts = _amounts(demand)
    work = _log_store_work(demand, inputs.curves, inputs.options) if host.store == "log" else None
    row_log_bytes = sum(_record_bytes(table, _unique(table)) for table in demand.tables)
    logged = amounts.dense_bytes + (demand.log_bytes_per_batch if work is None else row_log_bytes)
    commit_ns = amounts.rows * host.commit_row_ns + amounts.dense_bytes * host.commit_dense_byte_ns
    plan_ns = amounts.ids * host.plan_id_ns + amounts.rows * host.plan_row_ns
    cpu = {"plan": inputs.network.reading_s + 1e-9 * plan_ns, "record": 1e-6 * host.commit_step_us + 1e-9 * commit_ns}
    on = log_medium or inputs.medium
    log_s = on.sync_latency_ns * 1e-9 + logged / on.write_bandwidth_bytes_per_s
    if work is not None and log_medium is not None:
        log_s += work.record_bytes / log_medium.read_bandwidth_bytes_per_s  # by merges
        log_s += work.log_rows / (log_medium.random_reads_per_s or math.inf)
    return StepCosts(
        network_s=inputs.network.network_s,
        rows_s=host.row_costs.seconds(amounts),
        cpu=cpu if work is None else cpu | _store_cpu_s(host, amounts.rows, work),
        disk={} if work is None else _disk_s(host, inputs.medium, work, logged, log_is_apart=log_medium is not None),
        victims_s=0.0 if work is None else _victims_s(demand, inputs.victim_medium, work),
        log_s=log_s,
        amounts=amounts,
        work=work,
    )


def predict_step(inputs: StepInputs) -> StepTime:
    costs = step_costs(inputs)
    network, options = inputs.network, inputs.options
    displaced_s = sum(network.displaced_by(what) * cpu_s for what, cpu_s in costs.cpu.items())
    compute_s = costs.network_s + costs.rows_s + displaced_s
    stages = {
        "compute": compute_s,
        "loader": costs.cpu["plan"] / options.workers,
        "disk": sum(costs.disk.values()),
        "victims": costs.victims_s + costs.disk.get("fetch", 0.0) if costs.victims_s else 0.0,
        "log": costs.log_s,
    }
    limited_by = max(stages, key=lambda name: stages[name])
    return StepTime(
        ms=1e3 * stages[limited_by],
        limited_by=limited_by,
        compute_ms=1e3 * compute_s,
        network_ms=1e3 * costs.network_s,
        rows_ms=1e3 * costs.rows_s,
        displaced_ms=1e3 * displaced_s,
        loader_ms=1e3 * stages["loader"],
        disk_ms=1e3 * stages["disk"],
        victims_ms=1e3 * stages["victims"],
        log_ms=1e3 * costs.log_s,
        store_work=costs.work,
    )


def _amounts(demand: Demand) -> RowAmounts:
    return RowAmounts(
        rows=sum(_unique(table) for table in demand.tables),
        row_bytes=sum(_unique(table) * table.row_bytes for table in demand.tables),
        ids=sum(table.accesses_per_batch for table in demand.tables),
        id_bytes=sum(table.accesses_per_batch * table.weight_bytes for table in demand.tables),
        dense_bytes=demand.dense_bytes_per_batch,
    )


def _unique(table: TableDemand) -> float:
    return table.ladder[-1].unique_rows_per_batch


def _store_cpu_s(host: Host, rows: float, work: LogStoreWork) -> dict[str, float]:
    """CPU seconds of the log store's own threads."""
    assert host.collect_row_ns is not None and host.fetch_row_ns is not None
    assert host.merge_row_ns is not None and host.merge_request_ns is not None
    return {
        "collect": 1e-9 * rows * host.collect_row_ns,
        "swap": 1e-9 * work.victim_rows * _SWAP_ROW_NS,
        "fetch": 1e-9 * work.missed_rows * host.fetch_row_ns,
        "merge": 1e-9 * (rows * host.merge_row_ns + work.merge_requests * host.merge_request_ns),
    }


def _victims_s(demand: Demand, tier: Tier | None, work: LogStoreWork) -> float:
    """Rows of the tables' mean size out of the victim cache, and as many into it as come in from anywhere."""
    if not work.victim_rows:
        return 0.0
    assert tier is not None  # StepInputs
    granule = tier.access_granularity_bytes
    moved_bytes = math.ceil(_mean_row_bytes(demand.tables) / granule) * granule
    reads_s = max(
        work.victim_rows * moved_bytes / tier.read_bandwidth_bytes_per_s,
        work.victim_rows / (tier.random_reads_per_s or math.inf),
    )
    writes_s = (work.victim_rows + work.missed_rows) * moved_bytes / tier.write_bandwidth_bytes_per_s
    return reads_s + writes_s + 1e-9 * work.victim_rows * _SWAP_ROW_NS


def _disk_s(host: Host, medium: Tier, work: LogStoreWork, logged: float, *, log_is_apart: bool) -> dict[str, float]:
    assert host.fetches_per_s is not None and host.merge_requests_per_s is not None
    of_log = 0.0 if log_is_apart else 1.0
    merged_s = (work.read_bytes + of_log * work.record_bytes) / medium.read_bandwidth_bytes_per_s
    merged_s += work.written_bytes / medium.write_bandwidth_bytes_per_s
    return {
        "fetch": (work.fetch_requests + of_log * work.log_rows) / host.fetches_per_s,
        "merge": work.merge_requests / host.merge_requests_per_s + merged_s,
        "record": of_log * logged / medium.write_bandwidth_bytes_per_s,
    }


def _log_store_work(demand: Demand, curves: Sequence[ReuseCurve], options: StepOptions) -> LogStoreWork:
    rows = sum(_unique(table) for table in demand.tables)
    in_victims = min(sum(table.rows for table in demand.tables), options.victim_bytes / _mean_row_bytes(demand.tables))
    room = _scratchpad_rows(demand.tables, options.scratchpad_bytes - in_victims * _TAG_BYTES_OF_VICTIM)
    time = characteristic_time(curves, room + in_victims)
    before = options.steps_before
    missed = _missed(curves, time, before)
    not_in_scratchpad = sum(_missed(curves, characteristic_time(curves, room), before))
    record_bytes = sum(_record_bytes(table, _unique(table)) for table in demand.tables)
    num_steps = max(1.0, _MERGED_PART * options.log_bytes / record_bytes) if record_bytes else 1.0
    later_steps = _STANDING_PART / _MERGED_PART * num_steps
    held_steps = _HELD_PART / _MERGED_PART * num_steps
    num_fetches = log_rows = merge_requests = moved_rows = new_rows = read_bytes = written_bytes = all_written_bytes = (
        home_bytes
    ) = 0.0
    for table, curve, missed_rows in zip(demand.tables, curves, missed, strict=True):
        of_log = min(missed_rows, max(0.0, curve.touches(time) - curve.touches(held_steps))) if missed_rows else 0.0
        log_rows += of_log
        image_bytes = table.row_bytes + TAG_BYTES
        at_home = home_rows(curve, table.rows, before)
        home_bytes += at_home * (image_bytes + ADDRESS_BYTES)
        num_fetches += fetch_requests(
            classes_of(table.ladder),
            table.row_bytes,
            missed_rows - of_log,
            last_used_steps=max(time, held_steps) if of_log else time,
            steps_before=before,
        )
        load = merge_load(
            classes_of(table.ladder),
            table.row_bytes,
            curve,
            num_steps=num_steps,
            later_steps=later_steps,
            steps_before=before,
        )
        moved_rows += load.rows / num_steps
        new_rows += load.new_rows / num_steps
        all_written_bytes += load.written_bytes / num_steps
        merge_requests += (load.read_requests + load.write_requests) / num_steps
        written_bytes += max(0.0, load.written_bytes - load.write_requests * BLOCK_BYTES) / num_steps
        read_bytes += max(0.0, load.read_bytes - load.read_requests * BLOCK_BYTES) / num_steps
    return LogStoreWork(
        hit_rate=1.0 - not_in_scratchpad / rows if rows else 1.0,
        victim_rows=not_in_scratchpad - sum(missed),
        missed_rows=sum(missed),
        log_rows=log_rows,
        fetch_requests=num_fetches,
        merge_requests=merge_requests,
        moved_rows=moved_rows,
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        record_bytes=record_bytes,
        room_rows=room,
        new_rows=new_rows,
        all_written_bytes=all_written_bytes,
        home_bytes=home_bytes,
    )


def _missed(curves: Sequence[ReuseCurve], time: float, steps_before: float | None) -> list[float]:
    """Of each table, rows of a step that none of the last `time` steps had, and that are at home by then."""
    new = [0.0 if steps_before is None else curve.touches(steps_before) for curve in curves]
    return [
        0.0 if math.isinf(time) else max(0.0, curve.touches(time) - not_there)
        for curve, not_there in zip(curves, new, strict=True)
    ]


def _mean_row_bytes(tables: Sequence[TableDemand]) -> float:
    return sum(table.rows * table.row_bytes for table in tables) / sum(table.rows for table in tables)


def _scratchpad_rows(tables: Sequence[TableDemand], scratchpad_bytes: float) -> float:
    """Rows that there is room for, of the tables' mean size."""
    all_rows = sum(table.rows for table in tables)
    return min(all_rows, max(1.0, scratchpad_bytes / (_SLOT_BYTES + _mean_row_bytes(tables))))


def _record_bytes(table: TableDemand, rows: float) -> float:
    """What so many rows take in the row log: their numbers, and their images."""
    return rows * (table.record_bytes + TAG_BYTES)
