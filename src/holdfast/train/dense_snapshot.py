"""The dense state at the end of a step, while the device works on.

Invariants
- The copy is ordered after the step's work and before the next one's, on the device itself; the host waits for nothing.
- What is on its way does not share memory with what it is a copy of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.device.arrivals import Arriving
from holdfast.device.queues import Queue, new_queue
from holdfast.pools.dense_state import DenseState
from holdfast.state import state_tree


class Snapshots:
    """Takes them; each device's come back in a queue of their own."""

    def __init__(self) -> None:
        self._queues: dict[torch.device, Queue] = {}

    def take(self, structure: bytes, tensors: Sequence[Tensor]) -> DenseState:
        """tensors: of the state, on a device, on the host, or some here and some there."""
        offsets, total = state_tree.layout(tensors)
        pieces: list[Arriving] = []
        pointers: dict[int, tuple[int, int, int]] = {}
        for device in dict.fromkeys(tensor.device for tensor in tensors):
            here = [number for number, tensor in enumerate(tensors) if tensor.device == device]
            places, flat = _copied([tensors[number].detach() for number in here], device)
            if device not in self._queues:
                self._queues[device] = new_queue(device)
            piece = Arriving(flat, self._queues[device])
            pieces.append(piece)
            for number, place in zip(here, places, strict=True):
                pointers[number] = (piece.address + place, tensors[number].nbytes, offsets[number])
        return DenseState(structure, [pointers[number] for number in range(len(tensors))], total, pieces)


def _copied(tensors: Sequence[Tensor], device: torch.device) -> tuple[list[int], Tensor]:
    """Where each tensor's copy begins in one piece of the device's memory, and that."""
    offsets, total = state_tree.layout(tensors)
    flat = torch.empty(total, dtype=torch.uint8, device=device)
    places = [
        flat[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]
    if places:
        torch._foreach_copy_(places, list(tensors))
    return offsets, flat
