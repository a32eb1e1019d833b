"""A batch whose rows have slots, and its updated rows on their way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from holdfast import _core
from holdfast.device.arrivals import Arriving
from holdfast.device.queues import Mark, Queue, Work
from holdfast.errors import NonFiniteLoss
from holdfast.rows.row_access import PlannedFeatures
from holdfast.slots.slot_group import SlotGroup

_ARRAY_DTYPES = {
    "rows": torch.int64,
    "places": torch.int64,
    "keys": torch.int64,
    "gradient_scale": torch.float32,
    "lookup_scale": torch.float32,
}  # of what an Admission packs; any other is int32


@dataclass(frozen=True, slots=True)
class Part:
    """What a batch reads of one group. arrays: see _core.Admission.pack."""

    group: SlotGroup
    admission: _core.Admission
    arrays: dict[str, Tensor]


@dataclass(slots=True, eq=False)
class SlotBatch:
    """A batch whose rows have slots. arrived: when what was missing is there."""

    planned: PlannedFeatures
    parts: list[Part]
    arrived: Mark
    work: list[Work]
    step: int = 0
    bytes: int = 0  # of log, once the pool has captured them

    @property
    def plan(self) -> _core.Plan:
        plan: _core.Plan = self.planned.plan
        return plan

    def release(self) -> None:
        for part in self.parts:
            part.group.directory.release(part.admission)


@dataclass(slots=True)
class Returning:
    """A batch's updated rows, on their way back. See write_behind.UpdatedRows.

    factor: of their gradients.
    """

    batch: SlotBatch
    factor: Arriving
    back: Mark | None = None  # when all of them are there, and so all work of the batch is over
    _rows: list[tuple[Arriving, Arriving | None]] = field(default_factory=list)

    @property
    def plan(self) -> _core.Plan:
        return self.batch.plan

    def add(self, weights: Tensor, state: Tensor | None, queue: Queue) -> None:
        self._rows.append((Arriving(weights, queue), None if state is None else Arriving(state, queue)))

    def wait(self) -> list[tuple[Sequence[int], Any, Any]]:
        assert self.back is not None
        self.back.wait()
        NonFiniteLoss.check_gradient(float(self.factor.wait()), self.batch.step)
        return [
            (
                part.group.tables,
                bytes_of(weights.wait()),
                floats_of(None if state is None else state.wait()),
            )
            for part, (weights, state) in zip(self.batch.parts, self._rows, strict=True)
        ]

    def logged(self, num_bytes: int) -> None:
        self.batch.bytes = num_bytes

    def release(self) -> None:
        self.batch.release()


def unpack(packed: Tensor, places: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    """The arrays that an Admission packed, as views. places: byte offset and number of elements, by name."""
    arrays = {}
    for name, (offset, count) in places.items():
        dtype = _ARRAY_DTYPES.get(name, torch.int32)
        arrays[name] = packed[offset : offset + count * dtype.itemsize].view(dtype)
    return arrays


def bytes_of(weights: Tensor) -> Any:
    """As the core takes them."""
    return weights.view(torch.uint8).view(-1).numpy()


def floats_of(state: Tensor | None) -> Any:
    """As the core takes them; none where there is no state."""
    return (torch.empty(0, dtype=torch.float32, device="cpu") if state is None else state.view(-1)).numpy()
