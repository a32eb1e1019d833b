"""Batches in a file on memory, made before anything is timed: those that fill a scratchpad, then the workload's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpu.shapes import Case
from larger.workload import FileOfBatches, IdDrawer

SCRATCHPADS = (10, 100)
"""How many times as large as the scratchpad the tables are."""

_SHARE_OF_SLOTS = 1 / 8  # of the smaller scratchpad: more rows in one batch, and a window of them would not fit


def write_batches(case: Case, path: Path, num_drawn: int) -> tuple[FileOfBatches, int]:
    """The source, and how many of its batches come before those that are drawn.

    The first ones hold the most popular rows of every table, as many as the larger scratchpad has slots, evenly mixed
    and each once: after them nothing comes for the first time that a long run would have had.
    """
    workload = case.workload("skewed")
    drawer = IdDrawer(workload)
    filling = list(_filling(case, drawer))
    with ThreadPoolExecutor(os.cpu_count()) as threads, path.open("wb") as file:
        for ids in filling:
            ids.astype(np.uint32).tofile(file)
        for ids in threads.map(drawer.draw, range(num_drawn)):
            ids.astype(np.uint32).tofile(file)
    return FileOfBatches(workload, path), len(filling)


def _filling(case: Case, drawer: IdDrawer) -> Iterator[NDArray[np.int64]]:
    shape = case.shape
    bag = (shape.batch_size, shape.lookups_per_bag)
    slots, fewest_slots = (shape.num_embeddings // ratio for ratio in SCRATCHPADS)
    of_batch = max(1, min(shape.batch_size * shape.lookups_per_bag, int(fewest_slots * _SHARE_OF_SLOTS)))
    count = min(case.fill_batches, -(-slots // of_batch))
    rows = [drawer.hottest(table, min(slots, count * of_batch)) for table in range(shape.num_tables)]
    for number in range(count):
        yield np.stack([np.resize(of_table[number::count], bag) for of_table in rows])
