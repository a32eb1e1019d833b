"""Tables over the GPUs of a system.

- *table*: whole tables, those with most to look up first, each to the GPU with least to do, and of these to the one
  with most room. A table that no GPU holds is cut by columns, into as few parts as fit.
- *row*: the rows of every table, spread evenly. What is pooled from several rows comes as partial sums, from every GPU
  that has one of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import replace

from holdfast_lab.sim.device import Device, Processor
from holdfast_lab.sim.model import Model, Workload
from holdfast_lab.sim.system import System


def sharded(workload: Workload, model: Model, system: System, devices: Mapping[str, Device]) -> Workload:
    """The workload of the system's GPUs."""
    gpus = system.gpus
    if gpus == 1:
        return workload
    if system.sharding == "row":
        return replace(workload, gpus=gpus, partial_vectors=_partial_vectors(model, gpus))
    room = min((each.capacity_bytes for each in devices.values() if isinstance(each, Processor)), default=math.inf)
    return replace(workload, gpus=gpus, skew=_skew(model, gpus, room))


def _skew(model: Model, gpus: int, room_bytes: float) -> float:
    shards = []
    for group in model.tables:
        row_bytes = group.dim * model.weight_bytes + model.state_bytes
        parts = max(1, math.ceil(group.rows * row_bytes / room_bytes))
        shards += [(group.lookups * row_bytes / parts, group.rows * row_bytes / parts)] * (group.count * parts)
    loads: list[tuple[float, float]] = [(0.0, 0.0)] * gpus
    for work, size in sorted(shards, reverse=True):
        least = loads[0]
        heapq.heapreplace(loads, (least[0] + work, least[1] + size))
    works = [work for work, _ in loads]
    return max(works) * gpus / math.fsum(works)


def _partial_vectors(model: Model, gpus: int) -> float:
    """From how many GPUs a vector's parts come, in the mean over vectors' bytes."""
    widths = [group.count * group.dim for group in model.tables]
    parts = [gpus * (1.0 - math.pow(1.0 - 1.0 / gpus, group.lookups)) for group in model.tables]
    return sum(width * part for width, part in zip(widths, parts, strict=True)) / sum(widths)
