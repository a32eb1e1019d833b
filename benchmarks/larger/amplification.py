"""How many bytes go to the device for every byte of updated rows, by the log store's own arithmetic.

A step appends one record: a header, eight bytes and an image a row. A merge takes all records up to the newest dense
state, table by table, but for rows that have come again by then, and writes every block of home that one of the others
lies in, or that lies alone between two such blocks. So what a merge costs depends on how many steps it takes at a time:
hot rows are written once for all of them, or not at all, and cold rows share blocks. How many bytes of the log that is,
and how many came in meanwhile, follows from how fast disk and training are (core/log_store/log_merger.h), so both are
taken from the run; all else follows from the ids alone, which are replayed here; see core/rows/row_image.h and
core/base/format.h for the sizes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from larger.workload import FileOfBatches

_SECTOR_BYTES, _BLOCK_BYTES = 512, 4096
_TAG_BYTES, _ROW_NUMBER_BYTES, _HEADER_BYTES, _SECTION_BYTES = 4, 8, 128, 64
_SAMPLE_BATCHES = 16


def _whole(num_bytes: int, unit_bytes: int) -> int:
    return -(-num_bytes // unit_bytes) * unit_bytes


def _image_bytes(source: FileOfBatches) -> int:
    """Of a row as the log and home keep it: weights, state, tag."""
    return source.workload.row_bytes + _TAG_BYTES


def record_bytes(source: FileOfBatches, rows_per_table: list[int]) -> int:
    """Of a step's record in the log, given its unique rows."""
    images_per_sector = _SECTOR_BYTES // _image_bytes(source)
    head = _HEADER_BYTES + _SECTION_BYTES * len(rows_per_table) + _ROW_NUMBER_BYTES * sum(rows_per_table)
    images = sum(-(-rows // images_per_sector) * _SECTOR_BYTES for rows in rows_per_table)
    return _whole(_whole(head, _SECTOR_BYTES) + images, _BLOCK_BYTES)


def step_sizes(source: FileOfBatches) -> tuple[float, float]:
    """Means over a few batches: (bytes of a step's record, bytes of its updated rows' images)."""
    records, rows = 0, 0
    num_batches = min(_SAMPLE_BATCHES, source.num_batches)
    for number in range(num_batches):
        unique = [len(np.unique(ids)) for ids in source.read_ids(number)]
        records += record_bytes(source, unique)
        rows += sum(unique)
    return records / num_batches, rows * _image_bytes(source) / num_batches


def predicted(source: FileOfBatches, bytes_per_merge: float, standing_bytes: float) -> float:
    """Write amplification: (appended + written home) / updated row bytes. bytes_per_merge: of the log. standing_bytes:
    of later records that stood when a merge chose its rows, the mean over its tables; they grow while it is at work."""
    appended_bytes, updated_bytes = step_sizes(source)
    num_steps = max(1, round(bytes_per_merge / appended_bytes))
    num_tables = source.workload.shape.num_tables
    later_steps = [
        round(2.0 * (table + 0.5) / num_tables * standing_bytes / appended_bytes) for table in range(num_tables)
    ]
    home_bytes = _home_blocks(source, num_steps, later_steps) * _BLOCK_BYTES / num_steps
    return (appended_bytes + home_bytes) / updated_bytes


def _home_blocks(source: FileOfBatches, num_steps: int, later_steps: list[int]) -> int:
    """Distinct blocks of home that the rows of ``num_steps`` batches lie in or enclose, over all tables. Rows that are
    in one of the batches after these, as many as ``later_steps`` says of the table, do not count."""
    shape = source.workload.shape
    rows_per_block = _SECTOR_BYTES // _image_bytes(source) * (_BLOCK_BYTES // _SECTOR_BYTES)
    num_blocks = -(-shape.num_embeddings // rows_per_block)
    merged = np.zeros((shape.num_tables, num_blocks * rows_per_block), dtype=np.bool_)
    for number in range(num_steps + max(later_steps)):
        for table, ids in enumerate(source.read_ids(number % source.num_batches)):
            if number < num_steps + later_steps[table]:
                merged[table, ids.ravel()] = number < num_steps
    of_blocks = merged.reshape(shape.num_tables, num_blocks, rows_per_block)
    written: NDArray[np.bool_] = np.logical_or.reduce(of_blocks, axis=2)
    written[:, 1:-1] |= written[:, :-2] & written[:, 2:]  # one block between two: moved with them
    return int(written.sum())
