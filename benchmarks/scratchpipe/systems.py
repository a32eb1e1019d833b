"""The systems that are compared, as runs of holdfast: every difference between them is a public switch, and which rows
a static cache keeps.

- *DRAM-resident*, the ceiling: all rows in fast memory, in place; no dial on it.
- *no cache*: in place on the dialled medium, where each different row of a batch is read and written. (The paper's
  processor looks rows up beside its memory, and pooled vectors cross; here rows do.)
- *static*: the hottest rows, by a perfect profile, are kept in the scratchpad (`keep_rows`); beside them there is room
  for what two batches lack, so that some rows of the batch before are still there. The others are fetched when their
  batch asks for them and written in turn. (The paper's host updates those itself.)
- *static, written beside*: the same with its writes in the background: the least that a static cache can take.
- *LRU*: a window of 0. What a batch lacks is fetched when it asks, and written in the background. A victim is chosen in
  the manner of S3-FIFO, which is what the scratchpad has, and which misses about as many rows here as LRU does.
- *straw man*: as the paper's, one stage after another. A window of 1: the batch is announced as it begins, fetched,
  trained and written before the next. The same victims as LRU, so the same rows.
- *look forward*: the defaults: a window of 4 (the paper's: 6), fetched and written beside training.

Of a log store each batch's log has all of its rows: durable every batch. The paper writes a row back as it leaves its
cache: as many as are missed. `Log.WRITE_BACK` declares the log's bandwidth so that a batch's log takes as long as the
rows that it misses (sim/caches.py) would; `Log.EVERY_ROW` has all of it at the link's bandwidth. Nothing is merged
home while a run lasts: its log has room for all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dialled_steps import Accelerator
from scratchpipe.batches import BATCH, SCALE, TABLES, Drawn, Workload

LINK = 12e9  # bytes/s each way: PCIe 3.0 x16, effective; the host's DRAM behind it is ten times as fast
WINDOW = 4
_FREE = 1e15  # bytes/s: what costs nothing
_SLOT_BYTES = 39  # of the scratchpad, beside a row's own
ROW_OF_LOG_BYTES = 12  # its number and its tag, beside its own
_ENDLESS = 1_000_000
_LOG_BYTES = 2 << 30


class Log(Enum):
    WRITE_BACK = "write back"
    EVERY_ROW = "every row"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """in_place: rows lie on the medium, without a scratchpad. keeps: the hottest rows, for good."""

    name: str
    title: str
    in_place: bool = False
    dialled: bool = True
    window: int = 0
    synchronous: bool = False
    keeps: bool = False


MODES = {
    mode.name: mode
    for mode in (
        Mode(name="dram", title="DRAM-resident", in_place=True, dialled=False),
        Mode(name="none", title="no cache", in_place=True, synchronous=True),
        Mode(name="static", title="static", synchronous=True, keeps=True),
        Mode(name="static-beside", title="static, written beside", keeps=True),
        Mode(name="lru", title="LRU"),
        Mode(name="straw", title="straw man", window=1, synchronous=True),
        Mode(name="forward", title="look forward", window=WINDOW),
    )
}


def scratchpad_rows(workload: Workload, mode: Mode, source: Drawn) -> int:
    """Of all tables."""
    cached = TABLES * workload.cached_rows
    return cached + 2 * source.most_missed(workload.cached_rows) if mode.keeps else cached


def log_bandwidth(workload: Workload, log: Log, unique: float, missed: float) -> float:
    """Bytes/s of the full batch's log, which has `unique` rows of the batch."""
    if log is Log.EVERY_ROW:
        return LINK
    logged = unique * (workload.row_bytes + ROW_OF_LOG_BYTES)
    return LINK * logged / max(1.0, missed * workload.row_bytes)


def run_toml(
    workload: Workload,
    mode: Mode,
    accelerator: Accelerator,
    *,
    rows: int,
    log_bytes_per_s: float,
    stretch: float,
    fill: int,
    batches: int,
) -> str:
    """The run's file. `holdfast train` takes it, from benchmarks/, but for the rows that a static cache keeps.

    rows: of the scratchpad. log_bytes_per_s: of a full batch.
    """
    pool = [
        f'medium = "{"memory" if mode.in_place else "block"}"',
        f"dense_interval = {_ENDLESS}",
        f"synchronous = {str(mode.synchronous).lower()}",
    ]
    if not mode.in_place:
        pool += [f"scratchpad_bytes = {rows * (workload.row_bytes + _SLOT_BYTES)}", f"log_bytes = {_LOG_BYTES}"]
    row_s = SCALE * workload.row_bytes / LINK
    dial = f"""
[pool.dial]
read_bandwidth_bytes_per_s = {_FREE}
write_bandwidth_bytes_per_s = {_FREE}
stream_write_bandwidth_bytes_per_s = {_FREE if mode.in_place else log_bytes_per_s / SCALE}
read_latency_s = {row_s}
write_latency_s = {row_s}
outstanding_requests = 1.0
granularity_bytes = 64
sync_latency_s = 0.0
duplex = true
stretch = {stretch}
"""
    return f"""\
# ScratchPipe's comparison, {mode.title}, {workload.name}: timing only, nothing is learned.
[data]
source = "scratchpipe.batches:drawn"
lookups = {workload.lookups}
exponent = {workload.exponent}
fill = {fill}
batches = {batches}

[embedding]
dim = {workload.dim}
optimizer = "sgd"

[model]
bottom = [64, {workload.dim}]
top = [256, 64, 1]

[train]
batch_size = {BATCH}
steps = {fill + batches}
shuffle = false
window = {mode.window}

[pool]
{chr(10).join(pool)}
{dial if mode.dialled else ""}
{accelerator.device_dial("V100", link_bytes_per_s=_FREE, link_latency_s=0.0, copy_s=0.0, stretch=stretch)}"""
