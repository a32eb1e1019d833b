"""How much memory training takes, against what it should: pages of the rows touched + 3 working sets + dense state."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np

from ours.measure import Training
from ours.systems import Holdfast
from peers.batches import make_batches
from peers.shapes import SHAPES

_NUM_WORKING_SETS = 3
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)$")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _mapped_bytes(directory: Path) -> dict[str, int]:
    """Resident bytes of the mappings of files under ``directory``: of the rows, the log, the dense slots, the rest."""
    sizes = {"rows": 0, "log": 0, "dense": 0, "other": 0}
    kind = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := _MAPPING.match(line):
            path = found[1]
            kind = ""
            if path.startswith(str(directory)):
                name = path[len(str(directory)) + 1 :]
                kinds = {"shard": "rows", "log": "log", "dense": "dense"}
                kind = next((kinds[prefix] for prefix in kinds if name.startswith(prefix)), "other")
        elif kind and line.startswith("Rss:"):
            sizes[kind] += int(line.split()[1]) * 1024
    return sizes


class _TouchedPages:
    """Which pages of weights, state and touched bits the rows of the plans lie on."""

    def __init__(self, num_tables: int, num_rows: int, row_bytes: tuple[float, ...]) -> None:
        self._row_bytes = row_bytes
        pages = [int(num_rows * size) // mmap.PAGESIZE + 1 for size in row_bytes]
        self._seen = [[np.zeros(count, dtype=np.bool_) for count in pages] for _ in range(num_tables)]

    def add(self, table: int, rows: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        for size, seen in zip(self._row_bytes, self._seen[table], strict=True):
            seen[(rows * size).astype(np.int64) // mmap.PAGESIZE] = True

    @property
    def bytes(self) -> int:
        return sum(int(seen.sum()) for table in self._seen for seen in table) * mmap.PAGESIZE


def measure(shape_name: str, optimizer: str, directory: Path, steps: int, num_batches: int) -> dict[str, Any]:
    """Trains in a new pool whose rows nobody has touched; ``ratio`` is the pool's resident pages over the formula."""
    shape = SHAPES[shape_name]
    batches = make_batches(shape, num_batches)
    system = Holdfast(shape, optimizer, directory, batches, dense_interval=1)
    training = Training(system, shape, batches, bf16=False)
    before_bytes = _status_bytes("VmRSS")
    touched = _TouchedPages(
        shape.num_tables,
        shape.num_embeddings,
        (shape.embedding_dim * 4, *(() if optimizer == "sgd" else (4,)), 1 / 8),
    )
    for number in range(steps):
        training.step()
        if number < num_batches:
            ids = batches[number].ids.view(shape.num_tables, -1).numpy()
            for table in range(shape.num_tables):
                touched.add(table, ids[table])
    mapped = _mapped_bytes(directory)
    working_set_bytes = int(str(system.facts()["largest_capture_bytes"]))
    dense_bytes = sum(tensor.nbytes for tensor in training.model.state_dict().values())
    formula_bytes = touched.bytes + _NUM_WORKING_SETS * working_set_bytes + dense_bytes
    result = {
        "steps": steps,
        "pages_of_touched_rows_bytes": touched.bytes,
        "working_set_bytes": working_set_bytes,
        "dense_state_bytes": dense_bytes,
        "formula_bytes": formula_bytes,
        "pool_resident_bytes": mapped,
        "pool_resident_total_bytes": sum(mapped.values()),
        "ratio": sum(mapped.values()) / formula_bytes,
        "process_before_training_bytes": before_bytes,
        "process_peak_bytes": _status_bytes("VmHWM"),
        "log_bytes": system.pool.core.log_bytes,
    }
    system.close()
    return result
