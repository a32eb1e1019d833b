"""A dense part that waits for a declared accelerator's times instead of being computed: for timing runs.

Invariants
- The accelerator does one thing at a time, in the order in which it is asked: bottom MLP forward, then what follows the
  pooled vectors once they have crossed, then the bottom MLP backward.
- Gradients of pooled vectors have come when they have crossed back; the bottom MLP's backward pass runs on beside their
  update.
- Nobody waits but in `wait_for_gradients` and `wait`, asleep; and in `train` where gradients go on to another rank,
  which must not have them before they have come.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.data.cut import StreamCut
from holdfast.device.options import AcceleratorDial, DeviceConfig
from holdfast.models.dlrm import DLRM
from holdfast.train.dense_part import Bottom, DenseOptions, DensePart, OnePart
from holdfast.train.options import TrainConfig

_GRADIENT = 1e-6  # of every pooled element: rows move, and hardly change


class DeclaredDensePart:
    """See DensePart, whose place it takes."""

    is_beside = True

    @property
    def description(self) -> str:
        """What a run says of itself."""
        return f"timing only: the dense part waits for the declared times of {self._dial.name}, nothing is learned"

    def __init__(self, dial: AcceleratorDial, *, gradients_travel: bool = False) -> None:
        self._dial = dial
        self._gradients_travel = gradients_travel
        self._free_at = 0.0  # in seconds of time.perf_counter
        self._gradients_at = 0.0

    def forward_bottom(self, dense: Tensor) -> Bottom:
        self._free_at = max(self._free_at, time.perf_counter()) + self._dial.stretch * self._dial.bottom_forward_s
        return Bottom(dense.shape[0], None)

    def train(
        self,
        dense: Tensor | Bottom,
        labels: Tensor,
        pooled: Tensor,
        *,
        before_step: Callable[[Tensor], None] | None = None,
        weight: float = 1.0,
    ) -> Tensor:
        if not isinstance(dense, Bottom):
            self.forward_bottom(dense)
        crossing_s = self._dial.copy_seconds(pooled.numel() * pooled.element_size())
        top_ends = max(self._free_at, time.perf_counter() + crossing_s) + self._dial.stretch * self._dial.top_s
        self._gradients_at = top_ends + crossing_s
        self._free_at = top_ends + self._dial.stretch * self._dial.bottom_backward_s
        if self._gradients_travel:
            self.wait_for_gradients()
        pooled.backward(torch.full_like(pooled, weight * _GRADIENT))  # type: ignore[no-untyped-call]
        loss = torch.zeros(())
        if before_step is not None:
            before_step(loss)
        return loss

    def wait_for_gradients(self) -> None:
        _sleep_until(self._gradients_at)

    def wait(self) -> None:
        _sleep_until(self._free_at)


def dense_part(
    model: DLRM | OnePart,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    config: DeviceConfig,
    training: TrainConfig,
    *,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    part: tuple[int, int] = (0, 1),
    gradients_travel: bool = False,
) -> DensePart | DeclaredDensePart:
    """What computes a model's dense part, or stands in for it. part: of each batch, as the pool has it.
    gradients_travel: of pooled vectors, to other ranks. Raises what DensePart does."""
    if config.dial is not None:
        return DeclaredDensePart(config.dial, gradients_travel=gradients_travel)
    options = DenseOptions(bf16=training.bf16, compile=config.compile, graphs=config.graphs)
    whole = training.batch_size
    begin, end = StreamCut(start=0, end=None, batch_size=whole, part=part[0], of=part[1]).part_of(0, whole)
    size = end - begin
    weight = size * part[1] / whole
    return DensePart(model, optimizer, device, options, batch_size=size, weight=weight, scheduler=scheduler)


def _sleep_until(end: float) -> None:
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left)
