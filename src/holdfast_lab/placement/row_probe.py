"""Measures what rows cost this machine's CPU, with a pool of the real kind on the medium: `Host`. About 15 seconds.

Small runs without a network, each of which is heavy in something else: few rows, narrow rows, wide rows, many ids a
row, a large dense state, rows that must be fetched, rows that must be merged. In the quiet ones the next step begins
when nothing goes on in the background, so that the training thread is timed alone, and its caches hold something else
before each verb, as the network and the other verbs leave them. Costs are the non-negative ones
that explain all of them best (relative least squares). Other threads are timed by their own CPU clocks.

The pool lies in a directory of its own within the one that is probed, which is removed, however this ends.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from holdfast.data.batch import JaggedFeatures
from holdfast.pools.pool import Pool
from holdfast.pools.tables import EmbeddingBagConfig
from holdfast.rows.embedding import EmbeddingBagCollection
from holdfast.rows.row_access import PlannedFeatures
from holdfast.train.checkpoint import Checkpoint
from holdfast.train.observe import Advance
from holdfast_lab.placement.cold_caches import OtherWork
from holdfast_lab.placement.host import Host, StoreKind
from holdfast_lab.placement.row_costs import VERBS, RowCosts
from holdfast_lab.placement.thread_time import thread_seconds

T = TypeVar("T")

_NUM_TABLES = 8
_HOT_SHARE, _HOT_ROWS = 0.97, 0.01  # of the skewed runs: so much of the ids falls on that part of the rows
_WINDOW = 4  # batches announced ahead
_FILL_ROWS = 50_000
_SLOT_BYTES = 64  # more than a scratchpad keeps beside a row
_QUIET_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """One run. batches: distinct ones, which come again and again; lookups: ids per bag."""

    dim: int = 16
    rows: int = 100_000  # of each table
    bags: int = 2048
    lookups: int = 1
    skewed: bool = False
    batches: int = 6
    steps: int = 20
    quiet: bool = True
    scratchpad_rows: int | None = None  # None: all
    log_bytes: int = 512 << 20
    dense_bytes: int = 1 << 10

    @property
    def row_bytes(self) -> int:
        """Weights and the state of row-wise Adagrad."""
        return 4 * (self.dim + 1)


_LARGE_STATE_BYTES = 8 << 20
_QUIET = (
    _Shape(bags=16),
    _Shape(),
    _Shape(dim=64),
    _Shape(bags=1024, lookups=80, skewed=True, batches=3, steps=10),
    _Shape(dim=64, bags=1024, lookups=80, skewed=True, batches=3, steps=10),
    _Shape(bags=16, dense_bytes=_LARGE_STATE_BYTES),
)
_LARGE_STATE = _Shape(bags=16, quiet=False, dense_bytes=_LARGE_STATE_BYTES)
# Rows that nobody has fetched yet; rows that are merged far apart and close together.
_COLD = _Shape(rows=250_000, batches=16, steps=14, quiet=False, scratchpad_rows=8 * _NUM_TABLES * 2048)
_SPARSE = _Shape(rows=250_000, bags=256, batches=82, steps=80, quiet=False, log_bytes=2 << 20)
_DENSE = _Shape(rows=20_000, batches=12, steps=40, quiet=False, log_bytes=16 << 20)

POOL_BYTES = 1 << 30
"""What a pool takes at most."""

NUM_STEPS = len(_QUIET) + 6
"""How often the progress is told 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """Means per step of a run, in seconds. rows: unique; wall: of the whole step. main: of the training thread's verbs,
    of each of them, and plan: medians."""

    shape: _Shape
    ids: float
    rows: float
    wall: float
    main: float
    verbs: dict[str, float]
    plan: float
    threads: dict[str, float]
    traffic: dict[str, float]


def probe_rows(directory: Path, store: StoreKind, *, on_step: Advance) -> Host:
    """The costs of a pool in `directory`. Raises what a pool raises, PoolFull among it."""

    def run(shape: _Shape) -> _Seen:
        seen = _run(directory, store, shape)
        on_step(1)
        return seen

    quiet = [run(shape) for shape in _QUIET]
    # Where the training thread waits for the background it does that work, too: it is timed where it does not wait.
    cold, sparse = (min((run(shape) for _ in range(2)), key=lambda seen: seen.wall) for shape in (_COLD, _SPARSE))
    large_state = run(_LARGE_STATE)
    costs = _row_costs(quiet, [s.main for s in quiet])
    plan = _fit([[s.ids, s.rows] for s in quiet], [s.plan for s in quiet])
    unhindered = (cold, sparse, large_state)
    commit = _fit([[1, s.rows, s.shape.dense_bytes] for s in unhindered], [s.threads["hf-commit"] for s in unhindered])
    host = Host(
        store="in_place",
        step_us=costs.step_us,
        row_ns=costs.row_ns,
        row_byte_ns=costs.row_byte_ns,
        id_ns=costs.id_ns,
        id_byte_ns=costs.id_byte_ns,
        dense_byte_ns=costs.dense_byte_ns,
        plan_id_ns=_rounded(plan[0] * 1e9),
        plan_row_ns=_rounded(plan[1] * 1e9),
        commit_step_us=_rounded(commit[0] * 1e6),
        commit_row_ns=_rounded(commit[1] * 1e9),
        commit_dense_byte_ns=_rounded(commit[2] * 1e9),
        verbs={verb: _row_costs(quiet, [s.verbs[verb] for s in quiet]) for verb in VERBS},
    )
    if store == "log":
        return _with_log_store(host, quiet, cold, [sparse, run(_DENSE)])
    on_step(1)
    return host


def _row_costs(seen: Sequence[_Seen], seconds: Sequence[float]) -> RowCosts:
    """What explains these seconds of the runs that were seen."""
    found = _fit(
        [[1, s.rows, s.rows * s.shape.row_bytes, s.ids, s.ids * 4 * s.shape.dim, s.shape.dense_bytes] for s in seen],
        seconds,
    )
    return RowCosts(
        step_us=_rounded(found[0] * 1e6),
        row_ns=_rounded(found[1] * 1e9),
        row_byte_ns=_rounded(found[2] * 1e9),
        id_ns=_rounded(found[3] * 1e9),
        id_byte_ns=_rounded(found[4] * 1e9),
        dense_byte_ns=_rounded(found[5] * 1e9),
    )


def _with_log_store(host: Host, quiet: Sequence[_Seen], cold: _Seen, merging: Sequence[_Seen]) -> Host:
    (collect_row,) = _fit([[s.rows] for s in quiet], [s.threads["hf-collect"] for s in quiet])
    fetching = cold.threads["hf-exchange"] + max(0.0, cold.threads["hf-collect"] - collect_row * cold.rows)
    merge_row, merge_request = _fit(
        [[s.rows, _merge_requests(s)] for s in merging], [s.threads["hf-merge"] for s in merging]
    )
    fetches_per_s = max(1.0, cold.traffic["fetch_reads"]) / cold.wall
    sparse = merging[0]
    merging_s = sparse.wall - sparse.traffic["fetch_reads"] / fetches_per_s
    return replace(
        host,
        store="log",
        collect_row_ns=_rounded(collect_row * 1e9),
        fetch_row_ns=_rounded(fetching / max(1.0, cold.traffic["rows_missed"]) * 1e9),
        merge_row_ns=_rounded(merge_row * 1e9),
        merge_request_ns=_rounded(merge_request * 1e9),
        fetches_per_s=_rounded(fetches_per_s),
        merge_requests_per_s=_rounded(max(1.0, _merge_requests(sparse)) / max(merging_s, sparse.wall / 10)),
    )


def _merge_requests(seen: _Seen) -> float:
    return seen.traffic["merge_reads"] + seen.traffic["merge_writes"]


def _fit(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Non-negative seconds per count that explain all measurements best, each in proportion to itself."""
    from scipy.optimize import nnls

    measured = np.maximum(seconds, 1e-9)  # what took no time at all costs nothing
    matrix = np.array(counts, dtype=np.float64) / measured[:, None]
    scale = matrix.max(axis=0)
    scale[scale == 0.0] = 1.0
    found, _ = nnls(matrix / scale, np.ones(len(measured)))
    return [float(value) for value in found / scale]


def _rounded(value: float) -> float:
    """To four digits: more would say more than was measured."""
    return float(f"{value:.4g}")


def _run(directory: Path, store: StoreKind, shape: _Shape) -> _Seen:
    with tempfile.TemporaryDirectory(prefix=".holdfast-probe-", dir=directory) as name:
        all_rows = shape.scratchpad_rows or _NUM_TABLES * shape.rows
        log_options = {
            "medium": "block",
            "log_bytes": shape.log_bytes,
            "scratchpad_bytes": all_rows * (shape.row_bytes + _SLOT_BYTES),
        }
        with Pool(name, **(log_options if store == "log" else {"medium": "memory"})) as pool:
            return _Run(pool, shape).measure()


class _Run:
    """A pool in training without a network."""

    def __init__(self, pool: Pool, shape: _Shape) -> None:
        self._pool, self._shape = pool, shape
        self._rows = EmbeddingBagCollection(
            pool,
            [
                EmbeddingBagConfig(
                    name=f"t{t}", num_embeddings=shape.rows, embedding_dim=shape.dim, feature_names=[f"t{t}"]
                )
                for t in range(_NUM_TABLES)
            ],
        )
        self._fill()
        dense = nn.Linear(shape.dense_bytes // 4, 1, bias=False)
        self._checkpoint = Checkpoint(pool, model=dense, optimizer=torch.optim.SGD(dense.parameters(), lr=0.0))
        self._checkpoint.resume()
        self._gradient = torch.full((shape.bags, self._rows.output_width), 1e-3)
        self._batches = [_batch(shape, number) for number in range(shape.batches)]
        self._coming: deque[PlannedFeatures] = deque()
        self._num_planned = 0
        self._plan_s: list[float] = []
        self._others = OtherWork()
        self._seconds: dict[str, float] = {}

    def measure(self) -> _Seen:
        """Batches that come again are trained on once before anything counts."""
        shape, core = self._shape, self._pool.core
        for _ in range(shape.batches if shape.batches < shape.steps else 2):
            self._step()
        self._plan_s.clear()
        traffic_before, threads_before = dict(core.traffic() or {}), thread_seconds()
        begin = time.perf_counter()
        steps = [self._step() for _ in range(shape.steps)]
        self._pool.flush()
        wall = time.perf_counter() - begin
        threads_after, traffic_after = thread_seconds(), dict(core.traffic() or {})
        return _Seen(
            shape=shape,
            ids=float(_NUM_TABLES * shape.bags * shape.lookups),
            rows=statistics.mean(rows for _, rows in steps),
            wall=wall / shape.steps,
            main=statistics.median(sum(seconds.values()) for seconds, _ in steps),
            verbs={verb: statistics.median(seconds[verb] for seconds, _ in steps) for verb in VERBS},
            plan=statistics.median(self._plan_s),
            threads=_per_name(threads_before, threads_after, shape.steps),
            traffic={name: (count - traffic_before[name]) / shape.steps for name, count in traffic_after.items()},
        )

    def _step(self) -> tuple[dict[str, float], int]:
        """Seconds of each of the training thread's verbs, unique rows."""
        while len(self._coming) < _WINDOW:
            self._plan()
        if self._shape.quiet:
            self._pool.flush()
            time.sleep(_QUIET_S)
        planned = self._coming.popleft()
        capture = self._timed("capture", lambda: self._rows.capture(planned))
        pooled = self._timed("lookup", lambda: self._rows.lookup(capture, planned))
        self._timed("train", lambda: pooled.backward(self._gradient))  # type: ignore[no-untyped-call]
        self._timed("update", lambda: self._rows.optimizer.step())
        self._timed("commit", lambda: self._checkpoint.commit(self._num_planned))
        return dict(self._seconds), capture.plan.num_unique

    def _timed(self, verb: str, work: Callable[[], T]) -> T:
        if self._shape.quiet:
            self._others.fill_caches()
        begin = time.perf_counter()
        done = work()
        self._seconds[verb] = time.perf_counter() - begin
        return done

    def _plan(self) -> None:
        batch = self._batches[self._num_planned % len(self._batches)]
        self._num_planned += 1
        begin = time.thread_time()
        planned = self._rows.plan(batch)
        self._plan_s.append(time.thread_time() - begin)
        if self._pool.looks_forward:
            self._rows.announce(planned)
        self._coming.append(planned)

    def _fill(self) -> None:
        """Every row is written: a row that never was is a hole, which costs a disk nothing to read."""
        weights = np.random.default_rng(0).random((_FILL_ROWS, self._shape.dim), dtype=np.float32)
        for table in range(_NUM_TABLES):
            for first in range(0, self._shape.rows, _FILL_ROWS):
                part = weights[: self._shape.rows - first]
                self._pool.core.import_rows(
                    table, first, part.view(np.uint8).reshape(-1), np.zeros(len(part), np.float32)
                )


def _batch(shape: _Shape, number: int) -> JaggedFeatures:
    generator = np.random.default_rng((1, number))
    count = shape.bags * shape.lookups
    ids = generator.integers(0, shape.rows, _NUM_TABLES * count)
    if shape.skewed:
        hot = generator.random(len(ids)) < _HOT_SHARE
        ids[hot] = _scattered(ids[hot] % int(_HOT_ROWS * shape.rows), shape.rows)
    offsets = torch.arange(_NUM_TABLES * shape.bags + 1) * shape.lookups
    return JaggedFeatures([f"t{t}" for t in range(_NUM_TABLES)], torch.from_numpy(ids), offsets)


def _scattered(ranks: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    """Hot rows on pages all over."""
    return ranks * 99_991 % num_rows


def _per_name(
    before: dict[tuple[int, str], float], after: dict[tuple[int, str], float], num_steps: int
) -> dict[str, float]:
    """Of the threads that are still there; those of an earlier run may end in between."""
    seconds: dict[str, float] = {}
    for (number, name), then in after.items():
        seconds[name] = seconds.get(name, 0.0) + (then - before.get((number, name), 0.0)) / num_steps
    return seconds
