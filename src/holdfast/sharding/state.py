"""The dense state of a group: what one process would save, and every trainer's random numbers.

Invariants
- Dense parameters, optimizers and the loader's position are the same on all trainers, so rank 0's are saved. Their
  checksum is compared with every step that saves them.
- The random numbers of trainers differ. Rank 0's lie where one process keeps its own; those of the others beside them,
  by rank, and only where there are others: so a group of one trainer saves what one process does.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from holdfast import _core, state_tree
from holdfast.dense import TrainingState
from holdfast.errors import Corrupted
from holdfast.pool import DenseState
from holdfast.provenance import RECORD
from holdfast.sharding.group import Group

_OTHERS = "rng_of_ranks"


class GroupState:
    """Collects and restores it. `state` is this trainer's."""

    def __init__(self, group: Group, state: TrainingState) -> None:
        self._group = group
        self._state = state
        self._told: bytes | None = None  # this rank's random numbers, as rank 0 has them
        self._others: dict[str, bytes] = {}  # on rank 0

    def random_numbers_changed(self) -> bool:
        """Since rank 0 was told of them."""
        return self._is_other_trainer and _packed_rng() != self._told

    def exchange_random_numbers(self) -> None:
        """Tells rank 0 of all trainers' random numbers. All trainers call it."""
        if not self._group.is_trainer:
            return
        mine = _packed_rng() if self._is_other_trainer else b""
        everyones = self._group.gather_bytes(mine, "random numbers", among_trainers=True)
        self._told = mine
        if self._group.rank == 0:
            self._others = {str(rank): data for rank, data in enumerate(everyones) if data}

    def collect(self, cursor: int) -> DenseState | None:
        """Rank 0's to save."""
        if self._group.rank != 0:
            return None
        beside = {_OTHERS: self._others} if self._others else {}
        return self._state.collect(state_tree.rng_state(), cursor, **beside)

    def restore(self, structure: bytes, tensors: bytes) -> None:
        """On all ranks, from the same bytes. A trainer that was not there when they were saved keeps the random numbers
        that it began with. Raises StateError, Corrupted."""
        tree = state_tree.unpack(structure, tensors)
        of_others = tree.pop(_OTHERS, {})
        rng = tree.pop("rng")
        if self._group.rank != 0:
            tree.pop(RECORD, None)  # of rank 0's process
        self._state.load(tree)
        if self._group.rank == 0:
            state_tree.set_rng_state(rng)
        elif (mine := of_others.get(str(self._group.rank))) is not None and self._group.is_trainer:
            state_tree.set_rng_state(_unpacked_rng(mine))

    @property
    def _is_other_trainer(self) -> bool:
        return self._group.is_trainer and self._group.rank != 0


def checksum_of(parameters: Iterable[torch.Tensor]) -> int:
    """CRC-32C of the parameters, one after the other."""
    crc = 0
    for parameter in parameters:
        data = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        crc = _core.crc32c(crc, data)
    return crc


def _packed_rng() -> bytes:
    structure, tensors = state_tree.flatten(state_tree.rng_state())
    offsets, total = state_tree.layout(tensors)
    data = np.zeros(total, np.uint8)
    for tensor, offset in zip(tensors, offsets, strict=True):
        data[offset : offset + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return struct.pack("<Q", len(structure)) + structure + data.tobytes()


def _unpacked_rng(packed: bytes) -> dict[str, Any]:
    if len(packed) < 8 or struct.unpack_from("<Q", packed)[0] > len(packed) - 8:
        raise Corrupted("a rank's random numbers are cut short")
    end = 8 + struct.unpack_from("<Q", packed)[0]
    tree: dict[str, Any] = state_tree.unpack(packed[8:end], packed[end:])
    return tree
