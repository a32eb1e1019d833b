"""Trainers and memory expanders behind leaf and spine switches: what a batch asks of each level, and the bound of that.

scale.py simulates them; its text says what is meant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from holdfast.errors import DoesNotFit
from holdfast_lab.sim.capacity import size_words
from holdfast_lab.sim.device import Amounts, Compute, Memory
from holdfast_lab.sim.model import Workload

Level = Literal["trainer port", "leaf link", "spine", "expander port", "expander"]
LEVELS: tuple[Level, ...] = ("trainer port", "leaf link", "spine", "expander port", "expander")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Bandwidths in each direction. spine_bytes_per_s: of one spine switch, all that it passes on. hop_s: until a
    message's first bytes are through a port, a link or a switch. Raises ValueError."""

    trainers: int
    expanders: int
    devices_per_leaf: int = 32
    spines: int = 8
    port_bytes_per_s: float = 50e9
    leaf_link_bytes_per_s: float = 100e9
    spine_bytes_per_s: float = 3.2e12
    hop_s: float = 100e-9

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (value > 0 or (value == 0 and each.name == "hop_s")):
                raise ValueError(f"{each.name} = {value}; it must be more than 0")

    @property
    def leaves(self) -> int:
        return -(-(self.trainers + self.expanders) // self.devices_per_leaf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a trainer's batch asks for. index_bytes go to the expanders, pooled_bytes come back, and as many go there as
    gradients. lookup_s, update_s: of the memory of one expander, if it did all of the batch. Raises ValueError."""

    compute_s: float
    lookup_s: float
    update_s: float
    index_bytes: float = 0.0
    pooled_bytes: float = 0.0
    fan_out: int = 4
    arrivals: Literal["after_batch", "poisson", "jittered"] = "after_batch"
    jitter: float = 0.1

    def __post_init__(self) -> None:
        for name in ("compute_s", "lookup_s", "update_s", "index_bytes", "pooled_bytes", "jitter"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} = {getattr(self, name)}; it must be 0 or more")
        if self.fan_out < 1 or self.jitter > 1:
            raise ValueError(f"fan_out = {self.fan_out}, jitter = {self.jitter}; at least 1, and at most 1")
        if self.arrivals != "after_batch" and self.compute_s == 0:
            raise ValueError("compute_s = 0; batches that begin by the clock need a time between them")


def load_of(workload: Workload, compute: Compute, memory: Memory, *, fan_out: int = 4) -> Load:
    """A model's batch whose lookups and updates are done by expanders, each with one module of the memory. One call of
    software for each pass of the network."""
    accesses, row_bytes = workload.accesses, workload.row_bytes
    flops = 3 * (workload.bottom_flops + workload.top_flops + workload.interaction_flops)
    lookup = Amounts(rows_read=accesses, row_bytes=row_bytes)
    update = Amounts(rows_read=accesses, rows_written=accesses, row_bytes=row_bytes)
    return Load(
        compute_s=compute.seconds(Amounts(flops=flops, calls=3), recently_written=False, modules=1.0),
        lookup_s=memory.seconds(lookup, recently_written=False, modules=1.0),
        update_s=memory.seconds(update, recently_written=False, modules=1.0),
        index_bytes=workload.index_bytes,
        pooled_bytes=workload.pooled_bytes,
        fan_out=fan_out,
    )


def check_expanders(expanders: int, memory: Memory, workload: Workload, name: str) -> None:
    """That they hold the tables together. Raises DoesNotFit that says how many would."""
    needed = math.ceil(workload.table_bytes / (memory.capacity_bytes * memory.num_modules(workload)))
    if expanders < needed:
        raise DoesNotFit(
            f"the tables take {size_words(workload.table_bytes)}, and {expanders} expanders ({name}) have "
            f"{size_words(expanders * memory.capacity_bytes)}: it takes {needed:,} of them, or larger ones"
        )


def bounds_by_level(fabric: Fabric, load: Load) -> dict[str, float]:
    """Batches a second that each level could do alone, and "trainers": that they would do if they never waited."""
    to_bytes, from_bytes = load.index_bytes + load.pooled_bytes, load.pooled_bytes
    port_s = max(to_bytes, from_bytes) / fabric.port_bytes_per_s
    far = far_part(fabric)
    link_s = far * (to_bytes + from_bytes) / fabric.leaf_link_bytes_per_s
    spine_s = far * (to_bytes + from_bytes) / fabric.spine_bytes_per_s
    demands_s = {
        "trainer port": port_s / fabric.trainers,
        # Every byte takes a link up and a link down.
        "leaf link": link_s / (fabric.leaves * fabric.spines),
        "spine": spine_s / fabric.spines,
        "expander port": port_s / fabric.expanders,
        "expander": (load.lookup_s + load.update_s) / fabric.expanders,
    }
    bounds = {level: 1.0 / seconds if seconds > 0 else math.inf for level, seconds in demands_s.items()}
    own_s = load.compute_s + (least_latency_s(fabric, load) if load.arrivals == "after_batch" else 0.0)
    return {**bounds, "trainers": fabric.trainers / own_s if own_s > 0 else math.inf}


def far_part(fabric: Fabric) -> float:
    """The part of pairs of a trainer and an expander that are not on one leaf."""
    trainers, expanders = per_leaf(fabric)
    return 1.0 - float((trainers * expanders).sum()) / (fabric.trainers * fabric.expanders)


def least_latency_s(fabric: Fabric, load: Load) -> float:
    """Of lookups that meet no other message: the longest service of a message, or of what shares the trainer's port."""
    piece = 1.0 / load.fan_out
    services_s = [
        load.lookup_s * piece,
        load.index_bytes / fabric.port_bytes_per_s,
        load.pooled_bytes / fabric.port_bytes_per_s,
    ]
    return max(services_s)


def per_leaf(fabric: Fabric) -> tuple[np.ndarray, np.ndarray]:
    trainers, expanders = (
        np.bincount(leaf_of_device(count, fabric.leaves), minlength=fabric.leaves)
        for count in (fabric.trainers, fabric.expanders)
    )
    return trainers, expanders


def leaf_of_device(count: int, leaves: int) -> np.ndarray:
    return np.arange(count) * leaves // count
