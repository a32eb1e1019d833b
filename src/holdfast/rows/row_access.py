"""How a collection reaches the rows of its tables, in one of three ways: beside the pool's processor (near_memory.py),
in slots of a device (slots/slot_rows.py), or at the ranks that own them (group/remote_rows.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast import _core
from holdfast.device.queues import Work
from holdfast.errors import StepError


@dataclass(frozen=True, slots=True)
class BatchIds:
    """A batch's ids, as the plan verb reads them.

    ids: int64. offsets: int32 or int64 ``[num_keys * batch_size + 1]``. weights: float32, parallel to ids. blocks: of
    each feature of the collection, its place among the batch's keys.
    """

    ids: NDArray[np.int64]
    offsets: NDArray[Any]
    weights: NDArray[np.float32] | None
    blocks: tuple[int, ...]
    num_keys: int


@dataclass(frozen=True, slots=True)
class PlannedFeatures:
    """A batch's ids after the plan verb: what forward takes when planning ran ahead in the loader's thread.

    plan: where rows are remote, the way of the ids to their owners. parts: where the vectors of each feature are, of a
    collection that does not pool.
    """

    plan: Any
    weights: Tensor | None
    parts: Any = None


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A batch whose bags are pooled already: what a loop that looks up before it calls the model gives it as features.
    A collection's forward makes pooled features of it.

    values: float32 ``[batch_size, output_width]``.
    """

    values: Tensor


class Captured(Protocol):
    """The rows of one forward, as they are before the step."""

    @property
    def step(self) -> int: ...
    @property
    def bytes(self) -> int:
        """That they take in the log; known when the pool has the step."""


def plan_here(collection: _core.Collection, batch: BatchIds, *, ahead: bool, evaluates: bool = False) -> _core.Plan:
    """The plan verb over tables that this process has."""
    return collection.plan(batch.ids, batch.offsets, batch.weights, batch.blocks, batch.num_keys, not ahead, evaluates)


def check_under_way(captured: Captured, last_step: int, verb: str) -> None:
    """Raises StepError where `captured` is not of the step after last_step, the pool's."""
    if captured.step != last_step + 1:
        raise StepError(f"{verb} of step {captured.step}, which is over")


@dataclass(frozen=True, slots=True)
class KeptGradient:
    """The gradient of what was pooled, float32 and contiguous: where it was so, the tensor that backward was given, so
    that nobody copies it."""

    made: Tensor
    version: int

    @classmethod
    def of(cls, grad: Tensor) -> KeptGradient:
        made = grad.to(torch.float32).contiguous()
        return cls(made, _version(made))

    def unchanged(self) -> Tensor:
        """Raises StepError where somebody wrote into it after the backward, whose buffer it is."""
        if _version(self.made) != self.version:
            raise StepError(
                "the gradient of the pooled vectors was changed in place after its backward, and before its rows were "
                "updated with it: where it is a buffer that is used again, give backward a copy (gradient.clone())"
            )
        return self.made


def _version(tensor: Tensor) -> int:
    """How often it was changed in place, which PyTorch counts but for tensors of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def second_pass() -> StepError:
    """Where rows lie in slots: what is to be said of another forward pass of a collection in one step."""
    return StepError(
        "a second forward pass of one collection in one step: rows in slots are updated from one; accumulate "
        "over several with device.rows = 'near_memory'"
    )


class RowAccess(Protocol):
    """Rows of a collection, looked up and updated in one place or another. Pooled vectors and gradients are float32
    ``[batch_size, output_width]``, on `device`."""

    device: torch.device

    @property
    def description(self) -> str:
        """Where rows are looked up and updated, in words; empty where that is the processor that trains."""

    @property
    def looks_forward(self) -> bool:
        """Whether it helps to announce batches."""

    @property
    def takes_hints(self) -> bool:
        """Whether a batch that is announced may be left out after all: neither slots nor other ranks wait for it."""

    @property
    def answers_late(self) -> bool:
        """Whether it helps to compute something between a capture and its lookup, which waits for others."""

    def plan(self, batch: BatchIds, *, ahead: bool, evaluates: bool) -> Any:
        """PlannedFeatures.plan of a batch. May run in any thread (`ahead`). evaluates: it is not going to be trained,
        so that new keys get no rows."""

    def announce(self, planned: PlannedFeatures) -> None: ...
    def capture(self, planned: PlannedFeatures) -> Any: ...
    def capture_ahead(self, planned: PlannedFeatures) -> bool: ...
    def lookup(self, captured: Any) -> Tensor: ...
    def lookup_ahead(self, following: PlannedFeatures, current: PlannedFeatures) -> None: ...
    def evaluate(self, planned: PlannedFeatures) -> Tensor:
        """Pools without a capture, and leaves no trace."""

    def add_gradient(self, captured: Any, grad: Tensor) -> Tensor:
        """Keeps the gradient of what was pooled; returns the anchor's (see RowOptimizer)."""

    def weight_gradient(self, captured: Any, grad: Tensor, out: Tensor) -> None:
        """Adds to out, float32 on the host and parallel to the batch's ids, what belongs to this collection's."""

    def square_of_gradients(self) -> Tensor:
        """Sum of the squares of this step's row gradients, each row's summed over its occurrences, before any factor:
        float64, of no dimension."""

    @property
    def has_gradients(self) -> bool: ...
    def update(self, *, gradient_scale: Tensor, **hyperparameters: float) -> float | None:
        """Returns the factor where the host waits for it; elsewhere it is looked at when the step is retired."""

    def drop_gradients(self) -> None: ...
    def traffic(self) -> dict[str, float]:
        """Rows and bytes since the collection was made, where they go through slots; by names that begin with
        ``device_``."""

    def work_of(self, captured: Any) -> list[Work]:
        """What the device did for the rows of a capture; to be read when its step is retired."""
