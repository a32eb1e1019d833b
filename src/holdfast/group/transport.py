"""Transport: how a step's tensors travel between ranks: through memory where all of them are on one machine, else over
gloo.

Invariants
- All ranks of a transport make the same calls in the same order, and wait in the same order.
- All of them go one way: it follows from who reaches whom, which all ranks of the group have told each other.
- Numbers are added up in the order of the ranks. So the bits of a sum are the same through memory, over gloo, and from
  device to device (device_sums.py).
- What is begun waits for nobody; what is waited for ends soon after a rank is gone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from holdfast.group.neighbours import Incoming, Neighbours
from holdfast.group.notices import NOT_YET

_TURN = 0.1  # seconds


class Waitable(Protocol):
    """What a group waits for: a dist.Work, a DeviceSum, or one of what is below."""

    def is_completed(self) -> bool: ...
    def wait(self, timeout: timedelta) -> object:
        """Raises RuntimeError; whose text has NOT_YET in it, where it is not there after `timeout`."""


class _ThroughMemory:
    """What comes from neighbours. awaited: messages, by number."""

    def __init__(self, awaited: Sequence[tuple[Incoming, int]]) -> None:
        self._awaited = awaited

    def is_completed(self) -> bool:
        try:
            return all(incoming.has_come(number, 0.0) for incoming, number in self._awaited)
        except RuntimeError:
            return True  # it never will be, which the wait says

    def wait(self, timeout: timedelta) -> None:
        ends = time.monotonic() + timeout.total_seconds()
        lacking = self._awaited
        while True:
            # By turns: one that is gone is noticed while another is late.
            lacking = [of for of in lacking if not of[0].has_come(of[1], min(_TURN, ends - time.monotonic()))]
            if not lacking:
                return
            if time.monotonic() >= ends:
                raise RuntimeError(NOT_YET)


def add_up(parts: Tensor, out: Tensor) -> Tensor:
    """Numbers of several ranks, ``[ranks, n]``, in the order of the ranks. out: ``[n]``, the first rank's or other
    memory."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part
    return out


class _SumOfTwo:
    """Numbers of two ranks: each tells the other all of them, no more bytes than parts and their sums would be, and one
    turn less."""

    def __init__(self, transport: Transport, values: Tensor) -> None:
        self._transport = transport
        self._values = values
        self._both = transport.take_buffer(values.dtype, 2 * len(values))
        self._work = transport.all_gather(self._both, [len(values)] * 2, values)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta) -> None:
        self._work.wait(timeout)
        add_up(self._both.view(2, len(self._values)), self._values)
        self._transport.give_back(self._both)


class _Sum:
    """Numbers of all ranks: each adds up a part of them, and all tell each other."""

    def __init__(self, transport: Transport, values: Tensor) -> None:
        self._transport = transport
        self._values = values
        self._sizes = [len(part) for part in torch.tensor_split(values, len(transport.ranks))]
        mine = self._sizes[transport.position]
        self._parts = transport.take_buffer(values.dtype, mine * len(transport.ranks))
        self._work = transport.all_to_all(self._parts, [mine] * len(transport.ranks), values, self._sizes)
        self._is_told = False

    def is_completed(self) -> bool:
        return self._is_told and self._work.is_completed()

    def wait(self, timeout: timedelta) -> None:
        self._work.wait(timeout)
        if not self._is_told:
            parts = self._parts.view(len(self._sizes), self._sizes[self._transport.position])
            total = add_up(parts, parts[0])
            self._work = self._transport.all_gather(self._values, self._sizes, total)
            self._is_told = True
            self._work.wait(timeout)
        self._transport.give_back(self._parts)


class Transport:
    """Between `ranks`, of which `rank` is this one. process_group: of them, for gloo. neighbours: those of this
    machine. Tensors are one-dimensional, of one dtype, on the host; splits are counts of their elements, by rank."""

    def __init__(
        self, process_group: dist.ProcessGroup | None, ranks: Sequence[int], rank: int, neighbours: Neighbours
    ) -> None:
        self.ranks = ranks
        self.position = ranks.index(rank) if rank in ranks else -1  # which then calls nothing here
        self.process_group = process_group
        self._neighbours = neighbours if neighbours.have_channels_between(ranks) else None
        self._buffers: list[Tensor] = []

    @property
    def is_through_memory(self) -> bool:
        return self._neighbours is not None

    def all_to_all(
        self, received: Tensor, received_splits: Sequence[int], sent: Tensor, sent_splits: Sequence[int]
    ) -> Waitable:
        if self._neighbours is None:
            work: Waitable = dist.all_to_all_single(
                received, sent, list(received_splits), list(sent_splits), group=self.process_group, async_op=True
            )
            return work
        return self._through_memory(self._neighbours, received, received_splits, _parts(sent, sent_splits))

    def all_gather(self, received: Tensor, sizes: Sequence[int], mine: Tensor) -> Waitable:
        """Every rank gets what the others have."""
        num_ranks = len(self.ranks)
        if self._neighbours is None:
            return self.all_to_all(received, sizes, mine.repeat(num_ranks), [len(mine)] * num_ranks)
        return self._through_memory(self._neighbours, received, sizes, [_bytes(mine)] * num_ranks)

    def broadcast(self, values: Tensor) -> Waitable:
        """The first rank's, in place."""
        source, *others = self.ranks
        if self._neighbours is None:
            work: Waitable = dist.broadcast(values, source, group=self.process_group, async_op=True)
            return work
        if self.position > 0:
            incoming = self._neighbours.incoming[source]
            return _ThroughMemory([(incoming, incoming.set_out(_bytes(values)))])
        for rank in others:
            self._neighbours.outgoing[rank].send(_bytes(values))
        return _ThroughMemory([])

    def sum(self, values: Tensor) -> Waitable:
        """In place."""
        return _SumOfTwo(self, values) if len(self.ranks) == 2 else _Sum(self, values)

    def _through_memory(
        self,
        neighbours: Neighbours,
        received: Tensor,
        received_splits: Sequence[int],
        sent_parts: Sequence[NDArray[np.uint8]],
    ) -> Waitable:
        awaited = []
        for position, (rank, part, memory) in enumerate(
            zip(self.ranks, sent_parts, _parts(received, received_splits), strict=True)
        ):
            if position == self.position:
                memory[:] = part
                continue
            if part.size:
                neighbours.outgoing[rank].send(part)
            if memory.size:
                incoming = neighbours.incoming[rank]
                awaited.append((incoming, incoming.set_out(memory)))
        return _ThroughMemory(awaited)

    # Memory that is kept, since what is always new costs more than what is done in it.

    def take_buffer(self, dtype: torch.dtype, count: int) -> Tensor:
        for number, buffer in enumerate(self._buffers):
            if buffer.dtype == dtype and len(buffer) == count:
                return self._buffers.pop(number)
        return torch.empty(count, dtype=dtype, device="cpu")

    def give_back(self, buffer: Tensor) -> None:
        self._buffers = [kept for kept in self._buffers if kept.dtype != buffer.dtype]
        self._buffers.append(buffer)


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    if not tensor.numel():  # one of the core's has no stride, as torch sees it, and so cannot be viewed as bytes
        return np.empty(0, np.uint8)
    seen: NDArray[np.uint8] = tensor.detach().view(torch.uint8).numpy()
    return seen


def _parts(tensor: Tensor, splits: Sequence[int]) -> list[NDArray[np.uint8]]:
    everything, width = _bytes(tensor), tensor.element_size()
    parts, begin = [], 0
    for count in splits:
        end = begin + count * width
        parts.append(everything[begin:end])
        begin = end
    return parts
