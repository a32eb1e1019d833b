"""How fast the device reads scattered rows out of a pool's own memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu.shapes import Case
from gpu.timing import recorded_seconds_of
from holdfast import Pool
from holdfast.device import kernels
from holdfast.slots.home_mapping import HomeMapping
from larger.workload import IdDrawer


def measure_gather(case: Case, law: str, directory: Path, device: torch.device, *, smoke: bool) -> dict[str, Any]:
    """Of all unique rows of a batch, weights and state, none of which is in a slot. Raises RuntimeError where the
    device does not register the pool in `directory`."""
    ids = IdDrawer(case.workload(law))
    batches = [_rows_of(ids.draw(number), device) for number in range(case.kernel_batches)]
    with Pool(directory) as pool:
        seconds = _seconds(case, pool, batches, device, 2 if smoke else 20)
    num_rows = fmean(rows.numel() for _, rows in batches)
    return {"ms": 1e3 * seconds, "num_rows": num_rows, "bytes_per_s": num_rows * case.row_bytes / seconds}


def _seconds(case: Case, pool: Pool, batches: list[tuple[Tensor, Tensor]], device: torch.device, rounds: int) -> float:
    """Of a batch. The registration ends here, before the pool is closed."""
    mapping = HomeMapping(pool, range(case.shape.num_tables), device)
    if mapping.refusal:
        raise RuntimeError(mapping.refusal)
    bases = mapping.bases()
    num_slots = max(rows.numel() for _, rows in batches)
    weights = torch.empty(num_slots, case.shape.embedding_dim, device=device)
    state = torch.empty(num_slots, 1, device=device)
    slots = torch.arange(num_slots, dtype=torch.int32, device=device)

    def gather(tables: Tensor, rows: Tensor) -> None:
        places = slots[: rows.numel()]
        kernels.gather_home(bases, tables, rows, places, places, weights, state)

    return recorded_seconds_of(device, [partial(gather, *batch) for batch in batches], rounds)


def _rows_of(ids: np.ndarray[Any, np.dtype[np.int64]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The unique rows of a batch: their tables (int32) and numbers (int64), table by table, ascending."""
    rows = [np.unique(of_table) for of_table in ids]
    tables = np.repeat(np.arange(len(rows), dtype=np.int32), [of_table.size for of_table in rows])
    return torch.from_numpy(tables).to(device), torch.from_numpy(np.concatenate(rows)).to(device)
