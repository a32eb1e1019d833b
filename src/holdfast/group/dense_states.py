"""The dense states of a group: rank 0's, kept by the rank that `Roles.keeper` names.

Where ranks do nothing but own rows, the first of them keeps dense states beside its rows: trainers keep nothing.

Invariants
- A dense state has been copied when `stage` returns: whoever trains may change it.
- It is on its way to another rank until that rank is asked how far it is, or to settle, or to end; then it is written
  as one of the step that it was staged for. One is on its way at most, and before it has come whole no slot changes.
- Which calls are made, and in which order, is the same on both ranks.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack

import torch
from torch import Tensor

from holdfast import _core
from holdfast.errors import GroupError
from holdfast.group.group import Group, Pending
from holdfast.pools.dense_state import DenseState
from holdfast.pools.opening_options import Mark


class DenseStates:
    """pool: where they are kept, on the rank that does."""

    def __init__(self, group: Group, pool: _core.Pool | None) -> None:
        self.pool = pool
        self._group = group
        self._travel = group.roles.keeper != 0
        self._sent: tuple[Tensor, Pending] | None = None
        self._coming: tuple[Mark, _Packed, Pending] | None = None

    @property
    def durable_step(self) -> int:
        """-1 on a rank that keeps none."""
        return -1 if self.pool is None else self.pool.durable_step

    def load(self) -> tuple[bytes, bytes] | None:
        """The newest one, whatever is still on its way; None in a new pool. On all ranks."""
        self.arrive()
        found = None if self.pool is None else self.pool.dense_state()
        source = self._group.roles.keeper
        structure = self._group.broadcast(b"" if found is None else found[0], "the dense state", source)
        tensors = self._group.broadcast(b"" if found is None else found[1], "the dense state", source)
        return (structure, tensors) if structure else None

    def write_first(self, state: DenseState | None) -> None:
        """Of a new pool, durable when it returns. state: rank 0's."""
        if self._group.rank == 0:
            assert state is not None, "rank 0 has the dense state"
            if self._travel:
                self._send(state)
        elif self.pool is not None:
            packed, arriving = self._receive()
            arriving.wait()
            state = packed.state()
        if self.pool is not None and state is not None:
            self.pool.write_dense(state.structure, state.tensors, state.tensors_bytes)

    def stage(self, mark: Mark, state: DenseState | None) -> None:
        """One of the end of a step. state: rank 0's."""
        if self._group.rank == 0:
            assert state is not None, "rank 0 has the dense state"
            if self._travel:
                self._send(state)
            else:
                self._commit(mark, state)
        elif self.pool is not None:
            self.arrive()
            self._coming = mark, *self._receive()

    def arrive(self) -> None:
        """What is on its way to this rank has come, and is being written."""
        coming, self._coming = self._coming, None
        if coming is not None:
            mark, packed, arriving = coming
            arriving.wait()
            self._commit(mark, packed.state())

    def forget(self) -> None:
        """What is on its way, when another error is."""
        self._sent = self._coming = None

    def close(self) -> None:
        """All of them are durable, here and where they are kept; marks the pool as cleanly closed."""
        with ExitStack() as stack:
            if self.pool is not None:
                stack.callback(self.pool.close)
            self.arrive()
            self._wait_for_sent()

    def _wait_for_sent(self) -> None:
        sent, self._sent = self._sent, None
        if sent is not None:
            sent[1].wait()

    def _commit(self, mark: Mark, state: DenseState) -> None:
        assert self.pool is not None
        self.pool.commit_dense(mark, state.structure, state.tensors, state.tensors_bytes)

    def _send(self, state: DenseState) -> None:
        """To the keeper. On its way when this returns."""
        self._wait_for_sent()
        packed = _Packed.of(state)
        self._group.to_keeper(torch.tensor(packed.sizes, device="cpu"), "the dense state's size").wait()
        self._sent = packed.data, self._group.to_keeper(packed.data, "the dense state")

    def _receive(self) -> tuple[_Packed, Pending]:
        """From rank 0. On its way when this returns."""
        sizes = torch.zeros(2, dtype=torch.int64, device="cpu")
        self._group.to_keeper(sizes, "the dense state's size").wait()
        packed = _Packed.room_for(*sizes.tolist())
        return packed, self._group.to_keeper(packed.data, "the dense state")


class _Packed:
    """A dense state as it travels: its structure, then its tensors, at their offsets. data: uint8."""

    def __init__(self, structure_bytes: int, data: Tensor) -> None:
        self.sizes = [structure_bytes, len(data) - structure_bytes]
        self.data = data

    @classmethod
    def of(cls, state: DenseState) -> _Packed:
        data = torch.zeros(len(state.structure) + state.tensors_bytes, dtype=torch.uint8, device="cpu")
        begin = data.data_ptr()
        ctypes.memmove(begin, state.structure, len(state.structure))
        for address, count, offset in state.tensors:
            ctypes.memmove(begin + len(state.structure) + offset, address, count)
        return cls(len(state.structure), data)

    @classmethod
    def room_for(cls, structure_bytes: int, tensors_bytes: int) -> _Packed:
        """Raises GroupError where there is none for what another rank says."""
        try:
            if min(structure_bytes, tensors_bytes) < 0:
                raise RuntimeError("no sizes")
            return cls(structure_bytes, torch.empty(structure_bytes + tensors_bytes, dtype=torch.uint8, device="cpu"))
        except RuntimeError as error:
            raise GroupError(
                f"rank 0 has a dense state of {structure_bytes} + {tensors_bytes} bytes, which this rank cannot take: "
                f"{error}"
            ) from None

    def state(self) -> DenseState:
        """Of this memory."""
        structure_bytes, tensors_bytes = self.sizes
        structure = bytes(self.data[:structure_bytes].numpy())
        address = self.data.data_ptr() + structure_bytes
        return DenseState(structure, [(address, tensors_bytes, 0)] if tensors_bytes else [], tensors_bytes)
