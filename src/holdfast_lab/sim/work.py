"""How much a stage computes and moves: kinds of work, as functions of the workload."""

from __future__ import annotations

from dataclasses import replace

from holdfast_lab.sim.device import Amounts
from holdfast_lab.sim.kernels import network_kernels, row_kernels
from holdfast_lab.sim.model import Workload
from holdfast_lab.sim.system import RowScope, Stage


def amounts_of(stage: Stage, workload: Workload, missed_rows: float | None = None) -> Amounts:
    """missed_rows: of a batch, where the system has a cache. Raises ValueError where the stage needs it."""
    part = stage.part
    if stage.does == "given":
        return Amounts()
    if stage.does in ("bottom_forward", "interaction_top", "bottom_backward"):
        return Amounts(
            flops=part * _network_flops(stage, workload),
            calls=stage.calls,
            kernels=network_kernels(stage.does, workload),
            precision=workload.precision,
        )
    if stage.does == "log_network":
        volume = part * workload.network_bytes
        return Amounts(moved_bytes=volume, stream_written_bytes=volume, calls=stage.calls)
    if stage.does == "all_reduce":
        return Amounts(reduced_bytes=part * workload.network_bytes, calls=stage.calls)
    if stage.does in ("move_pooled", "move_gradients"):
        volume = part * workload.pooled_bytes * workload.partial_vectors
        return Amounts(moved_bytes=volume, skew=workload.skew, calls=stage.calls)
    if stage.does == "move_indices":
        return Amounts(moved_bytes=part * workload.index_bytes, calls=stage.calls)
    rows = part * _rows(stage.rows, workload, missed_rows)
    volume = rows * workload.row_bytes
    overlap = workload.repeated_rows / workload.unique_rows if stage.rows == "unique" else workload.overlap
    if stage.does in ("move_rows", "move_row_gradients"):
        return Amounts(moved_bytes=volume, calls=stage.calls)
    of_rows = {
        "lookup": Amounts(rows_read=rows, flops=volume / 4),
        "update": Amounts(rows_read=rows, rows_written=rows, flops=2 * volume / 4),
        "log_rows": Amounts(rows_read=rows, stream_written_bytes=volume, moved_bytes=volume),
        "append_rows": Amounts(stream_written_bytes=volume, moved_bytes=volume),
        "fetch": Amounts(rows_read=rows, moved_bytes=volume),
        "evict": Amounts(rows_written=rows, moved_bytes=volume),
    }[stage.does]
    # An update and a log read rows that this batch's lookup has read: what was written lately is no news to them.
    overlap = overlap if stage.does in ("lookup", "fetch") else 0.0
    return replace(
        of_rows,
        row_bytes=workload.row_bytes,
        overlap=overlap,
        calls=stage.calls,
        kernels=row_kernels(stage.does, workload, part),
        skew=workload.skew,
    )


def _network_flops(stage: Stage, workload: Workload) -> float:
    """A backward pass takes twice its forward pass."""
    if stage.does == "bottom_forward":
        return workload.bottom_flops
    if stage.does == "bottom_backward":
        return 2 * workload.bottom_flops
    return 3 * (workload.top_flops + workload.interaction_flops)


def _rows(scope: RowScope, workload: Workload, missed_rows: float | None) -> float:
    if scope == "accesses":
        return workload.accesses
    if scope == "unique":
        return workload.unique_rows
    if missed_rows is None:
        raise ValueError('a stage has rows = "missed", and the system has no cache')
    return missed_rows
