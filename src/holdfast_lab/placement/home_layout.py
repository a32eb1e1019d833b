"""What lies where at home, where rows lie by first touch, and what a merge visits there. Pure, from numbers to numbers.

Rows get their places in the order in which they are first written, so those that are wanted about as often lie
together. The model cuts a table where its ladder does, into *classes* of rows by how often they are wanted, the hottest
first: each is a home of its own, in which the rows of a merge are anywhere. A row of a class of n rows, of which a
batch has u, is in a batch with the probability u/n, whatever the batches before had.

- A merge takes the rows of s steps that do not come again in the k steps behind them: of a class,
  n (1 - (1 - u/n)^s) (1 - u/n)^k; scaled, so that all classes together have as many as reuse.py counted.
- A scratchpad whose rows were used in the last t batches misses u (1 - u/n)^t of a class, scaled likewise.
- After t steps a class has n (1 - (1 - u/n)^t) rows at home. The others of a merge's are new: they are appended, in
  requests of a megabyte.
- k rows of N at home touch the part 1 - (1 - k/N)^r of the blocks that have a part of r rows (Yao, *Approximating Block
  Accesses in Database Organizations*, CACM 20(4), 1977; for k much smaller than N).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from holdfast_lab.placement.ladder import Rung
from holdfast_lab.placement.reuse import ReuseCurve

BLOCK_BYTES, TAG_BYTES, ADDRESS_BYTES = 4096, 4, 5  # docs/FORMAT.md: row images, addresses
_READ_GAP_BLOCKS = 2  # between two blocks that a merge reads in one request (core/log_store/sector_runs.h)
_WRITE_GAP_BLOCKS = 1  # and between two that it writes in one
_SECTOR_BYTES = 512
_FETCH_GAP_SECTORS = 7  # between two sectors that are read in one request, at most (core/log_store/log_store.cpp)
_RUN_BYTES = 1 << 20  # of rows that come new, in one request (core/log_store/sector_runs.h)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowClass:
    """num_rows, and how many different ones of them a batch has: alike within it."""

    num_rows: float
    unique_rows_per_batch: float

    def distinct(self, num_steps: float) -> float:
        """Different rows of so many steps."""
        return self.num_rows * (1.0 - self._missed(num_steps))

    def merged(self, num_steps: float, later_steps: float) -> float:
        """Those of `num_steps` steps that the `later_steps` behind them do not have."""
        return self.distinct(num_steps) * self._missed(later_steps)

    def fetched(self, last_used_steps: float) -> float:
        """Of a batch's rows, those that the batches so far back did not have."""
        return self.unique_rows_per_batch * self._missed(last_used_steps)

    def _missed(self, num_steps: float) -> float:
        return float((1.0 - min(1.0, self.unique_rows_per_batch / self.num_rows)) ** num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeLoad:
    """Of one table and one merge. read_bytes and written_bytes: of home, whole blocks, gaps included; new_rows: of
    `rows`, those that home did not have."""

    rows: float
    new_rows: float
    read_requests: float
    write_requests: float
    read_bytes: float
    written_bytes: float


def classes_of(ladder: Sequence[Rung]) -> list[RowClass]:
    """A ladder's rows by how often they are wanted."""
    hottest = RowClass(num_rows=ladder[0].rows, unique_rows_per_batch=ladder[0].unique_rows_per_batch)
    return [
        hottest,
        *(
            RowClass(
                num_rows=rung.rows - above.rows,
                unique_rows_per_batch=max(0.0, rung.unique_rows_per_batch - above.unique_rows_per_batch),
            )
            for above, rung in pairwise(ladder)
            if rung.rows > above.rows
        ),
    ]


def home_rows(curve: ReuseCurve, num_rows: int, num_steps: float | None) -> float:
    """How many rows of a table are at home after so many steps; all of them where `num_steps` is None."""
    return float(num_rows) if num_steps is None else curve.distinct(num_steps)


def fetch_requests(
    classes: Sequence[RowClass], row_bytes: int, missed: float, *, last_used_steps: float, steps_before: float | None
) -> float:
    """For so many missed rows of a batch. The others as in `merge_load`."""
    by_rates = [of_class.fetched(last_used_steps) for of_class in classes]
    scale = missed / sum(by_rates) if sum(by_rates) else 0.0
    requests = 0.0
    for of_class, rows in zip(classes, by_rates, strict=True):
        at_home = max(1.0, of_class.num_rows if steps_before is None else of_class.distinct(steps_before))
        requests += block_requests(
            at_home, min(at_home, rows * scale), row_bytes + TAG_BYTES, _SECTOR_BYTES, _FETCH_GAP_SECTORS
        )[0]
    return requests


def merge_load(
    classes: Sequence[RowClass],
    row_bytes: int,
    curve: ReuseCurve,
    *,
    num_steps: float,
    later_steps: float,
    steps_before: float | None,
) -> MergeLoad:
    """row_bytes: of weights and state. steps_before: since the table was new; None: home has all of its rows."""
    rows = curve.distinct(num_steps + later_steps) - curve.distinct(later_steps)
    taken = [of_class.merged(num_steps, later_steps) for of_class in classes]
    scale = rows / sum(taken) if sum(taken) else 0.0
    new = reads = writes = read_blocks = written_blocks = 0.0
    for of_class, by_rates in zip(classes, taken, strict=True):
        of_merge = min(of_class.num_rows, by_rates * scale)
        at_home = of_class.num_rows if steps_before is None else of_class.distinct(steps_before)
        known = of_merge * at_home / of_class.num_rows  # what home lacks is as likely in the merge as what it has
        new += of_merge - known
        if at_home < 1.0:
            continue
        requests, blocks = block_requests(at_home, known, row_bytes + TAG_BYTES, BLOCK_BYTES, _WRITE_GAP_BLOCKS)
        writes, written_blocks = writes + requests, written_blocks + blocks
        requests, blocks = block_requests(at_home, known, row_bytes + TAG_BYTES, BLOCK_BYTES, _READ_GAP_BLOCKS)
        reads, read_blocks = reads + requests, read_blocks + blocks
    new_bytes = new * (row_bytes + TAG_BYTES)
    return MergeLoad(
        rows=rows,
        new_rows=new,
        read_requests=reads,
        write_requests=writes + new_bytes / _RUN_BYTES,
        read_bytes=read_blocks * BLOCK_BYTES,
        written_bytes=written_blocks * BLOCK_BYTES + new_bytes,
    )


def block_requests(
    at_home: float, rows: float, image_bytes: int, unit_bytes: int, gap_units: int
) -> tuple[float, float]:
    """(requests, units moved) where `rows` of `at_home` rows, one behind another, are read or written in whole units,
    gaps of up to `gap_units` included."""
    units = max(1.0, at_home * image_bytes / unit_bytes)
    share = 1.0 - (1.0 - min(1.0, rows / at_home)) ** (1.0 + unit_bytes / image_bytes)
    gaps = sum(k * share * (1.0 - share) ** k for k in range(1, gap_units + 1))
    return units * share * (1.0 - share) ** (gap_units + 1), units * share * (1.0 + gaps)
