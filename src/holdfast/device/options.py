"""What a run may say about the device that it trains on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.errors import ConfigError

RowsWay = Literal["auto", "near_memory", "scratchpad", "direct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """The device, and how it reaches the rows of the pool.

    kind: ``cpu``, ``cuda`` or one of several, ``cuda:1``.
    rows: ``near_memory``: the processor beside the pool looks rows up and updates them, pooled vectors and their
        gradients cross over. ``scratchpad``: the rows of the coming batches lie in the device's memory, are looked up
        and updated there, and stream back to the pool. ``direct``: the same, but the device reads the rows that it
        lacks from the pool's own mapping, which is registered with it; for pools in memory. ``auto``: near_memory on
        the processor, scratchpad on an accelerator.
    scratchpad_bytes: device memory for rows and their optimizer state; None: half of what is free.
    relaxed_lookup: with near_memory, pool what the next batch reads of rows that this one does not update while this
        one computes, and add the others after its update: the same sums in another order.
    compile: torch.compile the dense part. graphs: replay its kernels as a CUDA graph.
    """

    kind: str = "cpu"
    rows: RowsWay = "auto"
    scratchpad_bytes: int | None = None
    relaxed_lookup: bool = False
    compile: bool = False
    graphs: bool = False

    def __post_init__(self) -> None:
        if self.scratchpad_bytes is not None and self.scratchpad_bytes < 1:
            raise ConfigError(f"device.scratchpad_bytes = {self.scratchpad_bytes}; it must be positive")
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
