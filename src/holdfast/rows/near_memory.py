"""Rows looked up and updated by the processor beside the pool, wherever the dense part is trained.

On an accelerator pooled vectors and their gradients cross over, in page-locked buffers and queues of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast import _core
from holdfast.device.arrivals import Arriving
from holdfast.device.queues import Work, host_empty, new_queue, sent
from holdfast.pools.pool import Pool
from holdfast.rows.row_access import BatchIds, KeptGradient, PlannedFeatures, check_under_way, plan_here


@dataclass(frozen=True, slots=True)
class _Partial:
    """What a batch reads of rows that the batch before does not update, pooled."""

    following: PlannedFeatures
    current: PlannedFeatures
    sums: Tensor


class NearMemoryRows:
    """See row_access.RowAccess."""

    def __init__(self, pool: Pool, collection: _core.Collection, device: torch.device) -> None:
        self.device = device
        self._pool = pool
        self._collection = collection
        self._to_device = new_queue(device)
        self._to_host = new_queue(device)
        self._gradients: list[tuple[_core.Capture, KeptGradient, Arriving]] = []
        self._summed: _core.SummedGradients | None = None
        self._partial: _Partial | None = None

    @property
    def description(self) -> str:
        return "" if self.device.type == "cpu" else f"on {self.device}, rows beside the pool"

    @property
    def looks_forward(self) -> bool:
        return self._pool.looks_forward

    @property
    def takes_hints(self) -> bool:
        return True

    @property
    def answers_late(self) -> bool:
        return False

    def plan(self, batch: BatchIds, *, ahead: bool, evaluates: bool) -> _core.Plan:
        return plan_here(self._collection, batch, ahead=ahead, evaluates=evaluates)

    def announce(self, planned: PlannedFeatures) -> None:
        self._pool.core.announce(planned.plan)

    def capture(self, planned: PlannedFeatures) -> _core.Capture:
        self._summed = None
        return self._pool.core.capture(planned.plan)

    def capture_ahead(self, planned: PlannedFeatures) -> bool:
        return self._pool.core.capture_ahead(planned.plan)

    def lookup(self, captured: _core.Capture) -> Tensor:
        partial, self._partial = self._partial, None
        if partial is not None and partial.following.plan is captured.plan:
            self._pool.core.lookup_rest(captured, partial.current.plan, partial.sums.numpy())
            return sent(partial.sums, self.device, self._to_device)
        out = self._empty(captured.plan)
        self._pool.core.lookup(captured, out.numpy())
        return sent(out, self.device, self._to_device)

    def lookup_ahead(self, following: PlannedFeatures, current: PlannedFeatures) -> None:
        sums = self._empty(following.plan)
        self._pool.core.lookup_ahead(following.plan, current.plan, sums.numpy())
        self._partial = _Partial(following, current, sums)

    def evaluate(self, planned: PlannedFeatures) -> Tensor:
        out = self._empty(planned.plan)
        self._pool.core.evaluate(planned.plan, out.numpy())
        return sent(out, self.device, self._to_device)

    def add_gradient(self, captured: _core.Capture, grad: Tensor) -> Tensor:
        check_under_way(captured, self._pool.step, "backward through a forward")
        first = not self._gradients
        self._summed = None
        kept = KeptGradient.of(grad)
        self._gradients.append((captured, kept, Arriving(kept.made, self._to_host)))
        if kept.made.device.type == "cpu":
            return torch.tensor(float(first) if _core.all_finite(kept.made.numpy()) else float("nan"), device="cpu")
        return torch.where(kept.made.isfinite().all(), float(first), float("nan"))

    def weight_gradient(self, captured: _core.Capture, grad: Tensor, out: Tensor) -> None:
        arrived = Arriving(grad.to(torch.float32).contiguous(), self._to_host).wait().numpy()
        for feature, (begin, end) in enumerate(captured.plan.spans):
            self._pool.core.scale_gradients(captured, feature, arrived, out[begin:end].numpy())

    def square_of_gradients(self) -> Tensor:
        if not self._gradients:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        if self._summed is None:
            self._summed = self._pool.core.sum_gradients(self._arrived())
        return torch.tensor(self._summed.sum_of_squares, dtype=torch.float64, device=self.device)

    @property
    def has_gradients(self) -> bool:
        return bool(self._gradients)

    def update(self, *, gradient_scale: Tensor, **hyperparameters: float) -> float:
        scale = float(gradient_scale)
        if self._summed is not None:
            self._pool.core.update_summed(self._summed, gradient_scale=scale, **hyperparameters)
        else:
            self._pool.core.update(self._arrived(), gradient_scale=scale, **hyperparameters)
        return scale

    def drop_gradients(self) -> None:
        self._gradients = []
        self._summed = None

    def traffic(self) -> dict[str, float]:
        return {}

    def work_of(self, captured: _core.Capture) -> list[Work]:
        return []

    def _arrived(self) -> list[tuple[_core.Capture, NDArray[np.float32]]]:
        for _, kept, _ in self._gradients:
            if kept.made.device.type == "cpu":  # of others there are copies
                kept.unchanged()
        return [(captured, arriving.wait().numpy()) for captured, _, arriving in self._gradients]

    def _empty(self, plan: _core.Plan) -> Tensor:
        return host_empty((plan.num_bags, plan.output_width), torch.float32, self.device)
