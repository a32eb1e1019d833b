"""What a run may say about the device that it trains on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from holdfast.errors import ConfigError
from holdfast.files.config import UNRECORDED

RowsWay = Literal["auto", "near_memory", "scratchpad", "direct"]
AllReduce = Literal["auto", "nccl", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorDial:
    """A declared accelerator, for timing runs: the dense part waits for its times and computes nothing.

    The processor is free meanwhile, as it is beside a real one. Rows get a gradient, so that all of their way is real,
    and the dense state is written as it is; but it is never updated, so nothing that such a run trains means anything.

    name: of the accelerator, for reports. bottom_forward_s, bottom_backward_s: of the MLP over the dense features.
    top_s: of what follows pooled vectors, forward and backward. link_bandwidth_bytes_per_s, link_latency_s: for pooled
    vectors and their gradients. copy_s: of software, for each copy. stretch: all of it so many times as slow.
    """

    name: str
    bottom_forward_s: float
    top_s: float
    bottom_backward_s: float
    link_bandwidth_bytes_per_s: float
    link_latency_s: float = 0.0
    copy_s: float = 0.0
    stretch: float = 1.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "name":
                continue
            least_is_zero = each.name.endswith("_s") and not each.name.endswith("per_s")
            if not (math.isfinite(value) and (value > 0 or (value == 0 and least_is_zero))):
                wanted = "0 or more" if least_is_zero else "positive"
                raise ConfigError(f"device.dial.{each.name} = {value}; it must be {wanted}")

    def copy_seconds(self, num_bytes: int) -> float:
        """Of one copy over the link, stretched."""
        return self.stretch * (self.copy_s + self.link_latency_s + num_bytes / self.link_bandwidth_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """The device, and how it reaches the rows of the pool.

    kind: ``cpu``, ``cuda`` (under torchrun each rank's own) or one of several, ``cuda:1``.
    rows: ``near_memory``: the processor beside the pool looks rows up and updates them, pooled vectors and their
        gradients cross over. ``scratchpad``: the rows of the coming batches lie in the device's memory, are looked up
        and updated there, and stream back to the pool. ``direct``: the same, but the device reads the rows that it
        lacks from the pool's own mapping, which is registered with it; for pools in memory. ``auto``: near_memory on
        the processor and where memory ranks own the rows, scratchpad on an accelerator else. Of several ranks, those
        that own rows reach theirs so, for all; memory ranks near_memory alone.
    scratchpad_bytes: device memory for rows and their optimizer state; None: half of what is free.
    relaxed_lookup: with near_memory, pool what the next batch reads of rows that this one does not update while this
        one computes, and add the others after its update: the same sums in another order.
    compile: torch.compile the dense part. graphs: replay its kernels as a CUDA graph.
    all_reduce: how dense gradients of several trainers are added up: ``nccl``: on their GPUs, from one to the other;
        ``host``: from host to host; ``auto``: nccl where each trainer has a GPU of its own.
    dial: a declared accelerator whose times the dense part waits for instead of being computed: for timing alone, with
        kind cpu.

    relaxed_lookup, compile, graphs and dial are what the loop of ``holdfast train`` does; in a loop of one's own they
    have no effect: there call a collection's `lookup_ahead`, torch.compile.
    """

    kind: str = "cpu"
    rows: RowsWay = "auto"
    scratchpad_bytes: int | None = None
    relaxed_lookup: bool = False
    compile: bool = False
    graphs: bool = False
    all_reduce: AllReduce = "auto"
    dial: AcceleratorDial | None = field(default=None, metadata=UNRECORDED)

    def __post_init__(self) -> None:
        if self.scratchpad_bytes is not None and self.scratchpad_bytes < 1:
            raise ConfigError(f"device.scratchpad_bytes = {self.scratchpad_bytes}; it must be positive")
        if self.dial is not None and (self.kind != "cpu" or self.compile or self.graphs):
            raise ConfigError("device.dial goes with device.kind = 'cpu', without compile and graphs: leave them out")
        if self.graphs and self.kind == "cpu":
            raise ConfigError(
                "device.graphs: CUDA graphs need a CUDA device, and this run's is cpu; set device.graphs = false"
            )
        if self.relaxed_lookup and self.way != "near_memory":
            raise ConfigError(
                f"device.relaxed_lookup goes with device.rows = 'near_memory', not with {self.way!r}: leave it out"
            )

    @property
    def way(self) -> Literal["near_memory", "scratchpad", "direct"]:
        """`rows`, with auto decided."""
        if self.rows == "auto":
            return "near_memory" if self.kind == "cpu" else "scratchpad"
        return self.rows
