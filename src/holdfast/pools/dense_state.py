"""A dense state on its way into a pool."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from holdfast import _core
from holdfast.errors import NonFiniteLoss, level_of_caller

if TYPE_CHECKING:
    from holdfast.device.arrivals import Arriving


@dataclass(frozen=True, slots=True)
class Stepped:
    """Parts of a dense state that have to be finite: parameters. floats: of each, see _core.first_non_finite. name: of
    the i-th, for messages."""

    floats: Sequence[tuple[int, int, int]]
    name: Callable[[int], str]


@dataclass(frozen=True, slots=True)
class DenseState:
    """A dense state on its way into a slot: JSON text, and (address, bytes, offset) of contiguous CPU tensors, which
    the caller keeps alive and unchanged for the call.

    arriving: what has to come from a device still before all of it is there; it keeps the memory alive itself.
    stepped: what optimizers have updated of it; None where that is not known.
    """

    structure: bytes
    tensors: list[tuple[int, int, int]]
    tensors_bytes: int
    arriving: Sequence[Arriving] = ()
    stepped: Stepped | None = None

    def wait(self) -> Self:
        """Waits until it is there."""
        for piece in self.arriving:
            piece.wait()
        return self

    def checked(self, step: int) -> Self:
        """Waits, too. Raises NonFiniteLoss where a parameter is not finite at the end of `step`: whoever went on from
        there would have no other numbers any more."""
        self.wait()
        if self.stepped is not None and (found := _core.first_non_finite(self.stepped.floats)) is not None:
            raise NonFiniteLoss.of_parameter(self.stepped.name(found), step)
        return self


def warn_of_lost_steps(step: int, with_dense: Sequence[int]) -> None:
    """Says so where a pool is closed at a step whose dense state it does not have. with_dense: steps that have one, the
    newest among them; none where the pool keeps none. An error that ends a run speaks for itself."""
    newest = max((found for found in with_dense if found <= step), default=step)
    if newest == step or sys.exc_info()[1] is not None:
        return
    warnings.warn(
        f"the pool is closed at step {step}, and its newest dense state is of step {newest} (dense_interval), so it "
        "will not go on from where it is: call checkpoint.flush() before it is closed",
        RuntimeWarning,
        stacklevel=level_of_caller(),
    )


def commit_to(core: _core.Pool, cursor: int, dense: DenseState | None) -> int:
    """Ends the pool's step, with a dense state once it is there; returns the step. Raises NonFiniteLoss."""
    if dense is None:
        return core.commit(cursor, None, [], 0)
    dense.checked(core.step + 1)
    return core.commit(cursor, dense.structure, dense.tensors, dense.tensors_bytes)
