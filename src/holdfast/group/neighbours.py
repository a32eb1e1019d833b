"""Neighbours: ranks of this machine, and the channels through memory between them (core/routing/memory_channel.h).

Invariants
- A channel has one thread at either end, and messages that are received in the order in which they were sent.
- Which ranks have channels between them is the same on all ranks of the group: they have told each other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast import _core

_MOST_IN_MEMORY = 1 << 20  # bytes, of channels to all neighbours together, before any is outgrown
_LEAST_OF_A_CHANNEL = 1 << 16


class Incoming:
    """What one rank of this machine sends, into the memory that was set out for it, in the order in which it was."""

    def __init__(self, rank: int, channel: _core.ChannelReader) -> None:
        self._rank = rank
        self._channel = channel
        self._set_out: deque[NDArray[np.uint8]] = deque()
        self._num_set_out = self._num_received = 0

    def set_out(self, memory: NDArray[np.uint8]) -> int:
        """For its next message. Returns the message's number."""
        self._set_out.append(memory)
        self._num_set_out += 1
        return self._num_set_out

    def has_come(self, number: int, seconds: float) -> bool:
        """Whether the message of this number is there, after so long at most. Raises RuntimeError where it will never
        be."""
        ends = 0.0 if seconds <= 0.0 else time.monotonic() + seconds
        while self._num_received < number:
            left = 0.0 if seconds <= 0.0 else ends - time.monotonic()
            reception = self._channel.receive(self._set_out[0], left)
            if reception is _core.Reception.GONE:
                raise RuntimeError(f"rank {self._rank} has closed its channel")
            if reception is _core.Reception.NOT_YET:
                return False
            self._set_out.popleft()
            self._num_received += 1
        return True


class Neighbours:
    """Channels from and to ranks of this machine. outgoing, incoming: by rank. reached: by rank, whom it can receive
    from; the same on all ranks."""

    def __init__(
        self,
        outgoing: Mapping[int, _core.ChannelWriter],
        incoming: Mapping[int, Incoming],
        reached: Sequence[Sequence[int]],
    ) -> None:
        self.outgoing = outgoing
        self.incoming = incoming
        self._reached = reached

    def have_channels_between(self, ranks: Sequence[int]) -> bool:
        """Whether each of these ranks has one to each other: the same answer on all of them."""
        return all(one in self._reached[other] for one, other in permutations(ranks, 2))

    def close(self) -> None:
        """Nothing more is sent. Gives the memory back, but for what somebody still waits for."""
        for channel in self.outgoing.values():
            channel.close()
        self.outgoing, self.incoming = {}, {}


class Gather(Protocol):
    def __call__(self, value: Any, what: str) -> list[Any]:
        """A JSON value of every rank, by rank."""


def meet_neighbours(rank: int, gather: Gather, *, wanted: bool) -> Neighbours:
    """Channels between this rank and those of its machine that want them, too. All ranks call it.

    Ranks in containers that share no processes or no network count as apart, as they do where memory cannot be shared.
    """
    homes = gather(_home() if wanted else None, "everyone's machine")
    mine = homes[rank]
    others = [other for other, home in enumerate(homes) if other != rank and home == mine and mine is not None]
    outgoing: dict[int, _core.ChannelWriter] = {}
    with suppress(RuntimeError):
        capacity = max(_MOST_IN_MEMORY // max(len(others), 1), _LEAST_OF_A_CHANNEL)
        outgoing = {other: _core.ChannelWriter(capacity) for other in others}
    told = {str(other): channel.address for other, channel in outgoing.items()}
    incoming: dict[int, Incoming] = {}
    for other, addresses in enumerate(gather(told, "everyone's channels")):
        if other in outgoing and str(rank) in addresses:
            with suppress(RuntimeError):
                incoming[other] = Incoming(other, _core.ChannelReader(tuple(addresses[str(rank)])))
    reached = gather(list(incoming), "who reaches whom")
    return Neighbours(outgoing, incoming, reached)


def _home() -> list[str | int] | None:
    """What ranks have in common that can share memory; None where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, *(Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("pid", "net"))]
    except OSError:
        return None
