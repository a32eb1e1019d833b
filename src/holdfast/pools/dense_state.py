"""A dense state on its way into a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from holdfast import _core

if TYPE_CHECKING:
    from holdfast.device.arrivals import Arriving


@dataclass(frozen=True, slots=True)
class DenseState:
    """A dense state on its way into a slot: JSON text, and (address, bytes, offset) of contiguous CPU tensors, which
    the caller keeps alive and unchanged for the call.

    arriving: what has to come from a device still before all of it is there; it keeps the memory alive itself.
    """

    structure: bytes
    tensors: list[tuple[int, int, int]]
    tensors_bytes: int
    arriving: Sequence[Arriving] = ()

    def wait(self) -> Self:
        """Waits until it is there."""
        for piece in self.arriving:
            piece.wait()
        return self


def commit_to(core: _core.Pool, cursor: int, dense: DenseState | None) -> int:
    """Ends the pool's step, with a dense state once it is there; returns the step."""
    if dense is None:
        return core.commit(cursor, None, [], 0)
    dense.wait()
    return core.commit(cursor, dense.structure, dense.tensors, dense.tensors_bytes)
