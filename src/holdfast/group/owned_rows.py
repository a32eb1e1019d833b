"""An owner's half of a step: it pools and updates its rows for all trainers, in one of two ways.

Pooled vectors, and gradients as they come, are on the host: float32, one after the other as the routed plan lays them
out (core/routing/routed_plan.h).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast import _core
from holdfast.device.arrivals import Arriving
from holdfast.device.queues import Work, new_queue, sent
from holdfast.rows.row_access import PlannedFeatures

if TYPE_CHECKING:
    from holdfast.slots.slot_batch import SlotBatch
    from holdfast.slots.slot_rows import SlotRows

Arrived = Sequence[tuple[Any, Tensor]]
"""Captures of the step that is under way, and the gradients of what was pooled from each."""


class OwnedRows(Protocol):
    """captured: what `capture` gave. See row_access.RowAccess for what the calls do."""

    @property
    def description(self) -> str:
        """How, in words; empty where that is the processor beside the part."""

    @property
    def takes_one_pass(self) -> bool:
        """Whether a step has one forward pass, whose gradients are all that its rows are updated from."""

    def announce(self, plan: _core.Plan) -> None: ...
    def capture(self, plan: _core.Plan) -> Any: ...
    def capture_ahead(self, plan: _core.Plan) -> bool: ...
    def lookup(self, captured: Any) -> Tensor: ...
    def lookup_ahead(self, plan: _core.Plan, before: _core.Plan) -> None: ...
    def evaluate(self, plan: _core.Plan) -> Tensor: ...
    def weight_gradients(self, captured: Any, grad: Tensor, num_ids: NDArray[np.int64]) -> Tensor:
        """Of each id, trainer by trainer, and of each feature by feature. num_ids: int64 ``[trainers, features]``."""

    def sum_of_squares(self, arrived: Arrived) -> float: ...
    def update(self, arrived: Arrived, *, gradient_scale: float, **hyperparameters: float) -> None: ...
    def forget(self) -> None:
        """What was summed, and pooled ahead."""

    def drop(self) -> None:
        """The gradients of the step."""

    def traffic(self) -> dict[str, float]: ...
    def work_of(self, captured: Any) -> list[Work]: ...


@dataclass(frozen=True, slots=True)
class _Partial:
    """What a batch reads of rows that the batch before it does not update, pooled."""

    following: _core.Plan
    before: _core.Plan
    sums: Tensor


class OwnedNearMemory:
    """By the processor beside the part."""

    description = ""
    takes_one_pass = False

    def __init__(self, part: _core.Pool, *, looks_forward: bool) -> None:
        self._part = part
        self._looks_forward = looks_forward
        self._summed: _core.SummedGradients | None = None
        self._partial: _Partial | None = None

    def announce(self, plan: _core.Plan) -> None:
        if self._looks_forward:
            self._part.announce(plan)

    def capture(self, plan: _core.Plan) -> _core.Capture:
        self._summed = None
        return self._part.capture(plan)

    def capture_ahead(self, plan: _core.Plan) -> bool:
        return self._part.capture_ahead(plan)

    def lookup(self, captured: _core.Capture) -> Tensor:
        partial, self._partial = self._partial, None
        if partial is not None and partial.following is captured.plan:
            self._part.lookup_rest(captured, partial.before, _row(partial.sums))
            return partial.sums
        pooled = _empty_for(captured.plan)
        self._part.lookup(captured, _row(pooled))
        return pooled

    def lookup_ahead(self, plan: _core.Plan, before: _core.Plan) -> None:
        sums = _empty_for(plan)
        self._part.lookup_ahead(plan, before, _row(sums))
        self._partial = _Partial(plan, before, sums)

    def evaluate(self, plan: _core.Plan) -> Tensor:
        pooled = _empty_for(plan)
        self._part.evaluate(plan, _row(pooled))
        return pooled

    def weight_gradients(self, captured: _core.Capture, grad: Tensor, num_ids: NDArray[np.int64]) -> Tensor:
        out = torch.empty(int(num_ids.sum()), dtype=torch.float32, device="cpu")
        for number, ids in _ids_by_feature(num_ids):
            self._part.scale_gradients(captured, number, _row(grad), out[ids].numpy())
        return out

    def sum_of_squares(self, arrived: Arrived) -> float:
        if not arrived:
            return 0.0
        if self._summed is None:
            self._summed = self._part.sum_gradients(_rows(arrived))
        return self._summed.sum_of_squares

    def update(self, arrived: Arrived, *, gradient_scale: float, **hyperparameters: float) -> None:
        if self._summed is not None:
            self._part.update_summed(self._summed, gradient_scale=gradient_scale, **hyperparameters)
        else:
            self._part.update(_rows(arrived), gradient_scale=gradient_scale, **hyperparameters)

    def forget(self) -> None:
        self._summed = self._partial = None

    def drop(self) -> None:
        self._summed = None

    def traffic(self) -> dict[str, float]:
        return {}

    def work_of(self, captured: _core.Capture) -> list[Work]:
        return []


class OwnedInSlots:
    """On a device. Its gradients are those of the one batch that was captured in the step."""

    takes_one_pass = True

    def __init__(self, slots: SlotRows, part: _core.Pool, device: torch.device) -> None:
        self._slots = slots
        self._part = part
        self._device = device
        self._to_device = new_queue(device)
        self._to_host = new_queue(device)

    @property
    def description(self) -> str:
        return self._slots.description

    def announce(self, plan: _core.Plan) -> None:
        self._slots.announce(PlannedFeatures(plan, None))

    def capture(self, plan: _core.Plan) -> SlotBatch:
        return self._slots.capture(PlannedFeatures(plan, None))

    def capture_ahead(self, plan: _core.Plan) -> bool:
        return self._slots.capture_ahead(PlannedFeatures(plan, None))

    def lookup(self, captured: SlotBatch) -> Tensor:
        return Arriving(self._slots.lookup(captured).view(-1), self._to_host).wait()

    def lookup_ahead(self, plan: _core.Plan, before: _core.Plan) -> None:
        self._slots.lookup_ahead(PlannedFeatures(plan, None), PlannedFeatures(before, None))  # refuses it

    def evaluate(self, plan: _core.Plan) -> Tensor:
        self._slots.drain()
        pooled = _empty_for(plan)
        self._part.evaluate(plan, _row(pooled))
        return pooled

    def weight_gradients(self, captured: SlotBatch, grad: Tensor, num_ids: NDArray[np.int64]) -> Tensor:
        out = torch.empty(int(num_ids.sum()), dtype=torch.float32, device="cpu")
        places = dict(_ids_by_feature(num_ids))
        num_trainers = len(num_ids)
        for features, found in self._slots.lookup_gradients(captured, self._on_device(grad)):
            numbers = [feature * num_trainers + trainer for feature in features for trainer in range(num_trainers)]
            lengths = [places[number].stop - places[number].start for number in numbers]
            for number, of_ids in zip(numbers, torch.split(found, lengths), strict=True):
                out[places[number]] = of_ids
        return out

    def sum_of_squares(self, arrived: Arrived) -> float:
        if not arrived:
            return 0.0
        self._take(arrived)
        return float(self._slots.square_of_gradients())

    def update(self, arrived: Arrived, *, gradient_scale: float, **hyperparameters: float) -> None:
        if not arrived:
            return
        self._take(arrived)
        scale = torch.full((), gradient_scale, dtype=torch.float32, device=self._device)
        self._slots.update(gradient_scale=scale, **hyperparameters)

    def _take(self, arrived: Arrived) -> None:
        if not self._slots.has_gradients:
            for captured, grad in arrived:
                self._slots.add_gradient(captured, self._on_device(grad))

    def _on_device(self, grad: Tensor) -> Tensor:
        return sent(grad.view(1, -1), self._device, self._to_device)

    def forget(self) -> None:
        """Slots keep what was announced until the pool is closed."""

    def drop(self) -> None:
        self._slots.drop_gradients()

    def traffic(self) -> dict[str, float]:
        return self._slots.traffic()

    def work_of(self, captured: SlotBatch) -> list[Work]:
        return self._slots.work_of(captured)


def _ids_by_feature(num_ids: NDArray[np.int64]) -> Iterator[tuple[int, slice]]:
    """Of each trainer's part of a feature: its number in the routed plan, and where its ids are among all."""
    ends = num_ids.cumsum().reshape(num_ids.shape)
    for (trainer, feature), count in np.ndenumerate(num_ids):
        end = int(ends[trainer, feature])
        yield feature * len(num_ids) + trainer, slice(end - int(count), end)


def _empty_for(plan: _core.Plan) -> Tensor:
    return torch.empty(sum(plan.output_floats), dtype=torch.float32, device="cpu")


def _row(values: Tensor) -> NDArray[np.float32]:
    """As the core takes them: float32 ``[1, floats]``."""
    of_core: NDArray[np.float32] = values.numpy().reshape(1, -1)
    return of_core


def _rows(arrived: Arrived) -> list[tuple[_core.Capture, NDArray[np.float32]]]:
    return [(captured, _row(grad)) for captured, grad in arrived]
